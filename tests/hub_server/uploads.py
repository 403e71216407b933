"""Routes that change something: repositories, blobs, commits and refs."""

import base64
import json
import re
import shutil
import time

from hub_server.access import HubError
from hub_server.access import owner
from hub_server.access import permit
from hub_server.access import signed_in
from hub_server.routes import Answer
from hub_server.routes import route
from hub_server.store import is_lfs

# === Repositories ===


@route("GET", "/api/whoami-v2")
def whoami(hub, request):
    token = signed_in(hub, request)
    role = {"displayName": "test", "role": token.role}
    return {
        "type": "user",
        "name": token.user,
        "orgs": [{"name": n} for n in token.namespaces if n != token.user],
        "auth": {"type": "access_token", "accessToken": role},
    }


@route("POST", "/api/repos/create")
def create_repo(hub, request):
    wanted = request.json()
    repo_id = f"{owner(hub, request, wanted['organization'])}/{wanted['name']}"
    value = {"url": f"{hub.url}/{repo_id}", "name": repo_id}
    if repo_id in hub.store.repos:
        value["error"] = "You already created this model repo"
        return Answer.of_json(value, 409)
    hub.store.create(repo_id, private=wanted.get("visibility") == "private")
    return value


@route("DELETE", "/api/repos/delete")
def delete_repo(hub, request):
    wanted = request.json()
    repo_id = f"{owner(hub, request, wanted['organization'])}/{wanted['name']}"
    permit(hub, request, hub.store.repos.get(repo_id), "write")
    hub.store.delete(repo_id)
    return {}


@route("POST", "/api/validate-yaml")
def validate_yaml(hub, request):
    return {"errors": [], "warnings": []}


# === Blobs ===


@route("POST", "/api/models/{repo}/preupload/{revision}", "write")
def preupload(hub, request, repo, revision):
    files = hub.store.resolve(repo, revision)["files"]
    rows = []
    for file in request.json()["files"]:
        path, sample = file["path"], base64.b64decode(file["sample"])
        mode = "lfs" if is_lfs(path, sample, file["size"]) else "regular"
        row = {"path": path, "uploadMode": mode, "shouldIgnore": False}
        if entry := files.get(path):
            row["oid"] = entry["sha256" if entry["lfs"] else "oid"]
        rows.append(row)
    return {"files": rows}


@route("POST", "/{repo}.git/info/lfs/objects/batch", "write")
def lfs_batch(hub, request, repo):
    objects = request.json()["objects"]
    for item in objects:
        if hub.store.holds(item["oid"]):
            continue
        href = f"{hub.cdn}/cdn/{repo['id']}/upload/{item['oid']}"
        upload = {"href": href, "header": {}}
        if hub.part_size and item["size"] > hub.part_size:
            count = -(-item["size"] // hub.part_size)
            upload["header"] = {"chunk_size": str(hub.part_size)} | {
                str(n): f"{href}/{n}" for n in range(1, count + 1)
            }
            upload["href"] = f"{hub.url}/lfs-complete"
        verify = {"href": f"{hub.url}/{repo['id']}.git/info/lfs/verify"}
        item["actions"] = {"upload": upload, "verify": verify}
    return {"transfer": "multipart", "objects": objects}


@route("PUT", "/cdn/{repo}/upload/{sha256}")
def put_blob(hub, request, repo, sha256):
    with hub.store.writing(sha256) as file:
        shutil.copyfileobj(request.body, file)
    return {}


@route("PUT", "/cdn/{repo}/upload/{sha256}/{number}")
def put_part(hub, request, repo, sha256, number):
    part = hub.store.folder / "parts" / f"{sha256}.{number}"
    part.write_bytes(request.body.read())
    return Answer(headers={"ETag": f'"{part.name}"'})


@route("POST", "/lfs-complete")
def complete_parts(hub, request):
    wanted = request.json()
    rows = sorted(wanted["parts"], key=lambda row: row["partNumber"])
    parts = [hub.store.folder / "parts" / row["etag"][1:-1] for row in rows]
    with hub.store.writing(wanted["oid"]) as file:
        for part in parts:
            file.write(part.read_bytes())
            part.unlink()
    return {}


@route("POST", "/{repo}.git/info/lfs/verify", "write")
def lfs_verify(hub, request, repo):
    if not hub.store.holds(request.json()["oid"]):
        raise HubError(404, "Object not found")
    return {}


@route("GET", "/api/models/{repo}/xet-read-token/{revision}", "content")
def xet_read_token(hub, request, repo, revision, write=False):
    address = hub.store.xet_address(write)
    expiry = int(time.time()) + 3600
    value = {"accessToken": "xet", "exp": expiry, "casUrl": address}
    headers = {
        "X-Xet-Cas-Url": address,
        "X-Xet-Access-Token": "xet",
        "X-Xet-Token-Expiration": str(expiry),
    }
    return Answer.of_json(value, **headers)


@route("GET", "/api/models/{repo}/xet-write-token/{revision}", "write")
def xet_write_token(hub, request, repo, revision):
    return xet_read_token(hub, request, repo, revision, write=True)


# === Commits ===


@route("POST", "/api/models/{repo}/commit/{revision}", "write")
def commit(hub, request, repo, revision):
    lines = [json.loads(line) for line in request.body]
    header = lines.pop(0)["value"]
    base = f"{hub.url}/{repo['id']}"
    value = {}
    with hub.store.lock:
        if request.query.get("create_pr") == "1":
            number = discuss(hub, request, repo, header["summary"])["num"]
            revision = f"refs/pr/{number}"
            value["pullRequestUrl"] = f"{base}/discussions/{number}"
        files = hub.store.resolve(repo, revision)["files"]
        sha = hub.store.commit(
            repo["id"],
            dict(c for line in lines for c in changes(hub, files, **line)),
            revision=revision,
            title=header["summary"],
            message=header["description"],
            parent=header.get("parentCommit"),
            user=signed_in(hub, request).user,
        )
    return value | {"commitUrl": f"{base}/commit/{sha}", "commitOid": sha}


def changes(hub, files, key, value):
    """Changes, as (path, entry or None), that one line of a commit asks."""
    path = value["path"].rstrip("/")
    if re.search(r"(^|/)\.{0,2}(/|$)", path) or "\\" in path:
        raise HubError(400, f"Invalid path: {path!r}")
    if key == "file":
        content = base64.b64decode(value["content"])
        return [(path, hub.store.entry(content))]
    if key == "lfsFile":
        return [(path, hub.store.lfs_entry(value["oid"], value["size"]))]
    gone = [path] if path in files else []
    if key == "deletedFolder":
        gone = [file for file in files if file.startswith(f"{path}/")]
    if not gone:
        error = "A file with this name doesn't exist"
        raise HubError(404, error, "EntryNotFound")
    return [(file, None) for file in gone]


@route("POST", "/api/models/{repo}/discussions", "read")
def open_pull_request(hub, request, repo):
    return discuss(hub, request, repo, request.json()["title"])


def discuss(hub, request, repo, title):
    """Open a pull request; its branch starts where main is."""
    with hub.store.lock:
        number = len(repo["discussions"]) + 1
        head = hub.store.resolve(repo, "main")
        value = {
            "num": number,
            "title": title,
            "author": {"name": signed_in(hub, request).user},
            "createdAt": head["date"],
            "status": "draft",
            "repo": {"name": repo["id"], "type": "model"},
            "isPullRequest": True,
            "changes": {"base": "refs/heads/main"},
            "filesWithConflicts": [],
            "events": [],
        }
        repo["discussions"].append(value)
        repo["refs"][f"refs/pr/{number}"] = head["sha"]
        hub.store.save(repo)
    return value


@route("GET", "/api/models/{repo}/discussions/{number}", "read")
def discussion(hub, request, repo, number):
    return repo["discussions"][int(number) - 1]


@route("POST", "/api/models/{repo}/tag/{revision}", "write")
def tag(hub, request, repo, revision):
    return add_ref(hub, repo, f"refs/tags/{request.json()['tag']}", revision)


@route("POST", "/api/models/{repo}/branch/{name}", "write")
def branch(hub, request, repo, name):
    start = request.json().get("startingPoint", "main")
    return add_ref(hub, repo, f"refs/heads/{name}", start)


def add_ref(hub, repo, ref, revision):
    with hub.store.lock:
        if ref in repo["refs"]:
            raise HubError(409, f"Reference already exists: {ref}")
        repo["refs"][ref] = hub.store.resolve(repo, revision)["sha"]
        hub.store.save(repo)
    return {}
