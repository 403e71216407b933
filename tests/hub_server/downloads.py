"""Routes that change nothing: listings, history and files."""

import urllib.parse

from hub_server.access import HubError
from hub_server.access import namespace
from hub_server.routes import Answer
from hub_server.routes import route
from hub_server.store import git_oid

# === Listings ===


@route("GET", "/api/models/{repo}", "read")
def info(hub, request, repo, revision="main"):
    commit = hub.store.resolve(repo, revision)
    return {
        "id": repo["id"],
        "modelId": repo["id"],
        "author": namespace(repo),
        "sha": commit["sha"],
        "lastModified": commit["date"],
        "private": repo["private"],
        "gated": repo["gated"],
        "disabled": False,
        "tags": [],
        "siblings": [
            sibling(path, entry, "blobs" in request.query)
            for path, entry in commit["files"].items()
        ],
    }


route("GET", "/api/models/{repo}/revision/{revision}", "read")(info)


def sibling(path, entry, blobs):
    """One file of `info`; with its size and hashes if they are asked for."""
    row = {"rfilename": path}
    if blobs:
        row |= {"size": entry["size"], "blobId": entry["oid"]}
    if blobs and entry["lfs"]:
        lfs = {"size": entry["size"], "sha256": entry["sha256"]}
        row["lfs"] = lfs | {"pointerSize": 134}
    return row


@route("GET", "/api/models/{repo}/tree/{revision}", "read")
def tree(hub, request, repo, revision, path=""):
    files = hub.store.resolve(repo, revision)["files"]
    recursive = request.query.get("recursive", "").lower() in ("true", "1")
    start = f"{path}/" if path else ""
    items = {}
    for name in files:
        if not name.startswith(start):
            continue
        steps = name.removeprefix(start).split("/")
        depth = len(steps) if recursive else 1
        for count in range(1, depth + 1):
            inner = start + "/".join(steps[:count])
            items[inner] = item(hub, inner, files.get(inner))
    if path and not items:
        raise HubError(404, f"{path} does not exist", "EntryNotFound")
    first = int(request.query.get("cursor", 0))
    last = first + hub.page_size
    headers = {}
    if last < len(items):
        there = urllib.parse.urlsplit(request.path).path
        query = urllib.parse.urlencode(request.query | {"cursor": last})
        headers["Link"] = f'<{hub.url}{there}?{query}>; rel="next"'
    return Answer.of_json(list(items.values())[first:last], **headers)


route("GET", "/api/models/{repo}/tree/{revision}/{path}", "read")(tree)


def item(hub, path, entry):
    """One row of a listing: a file, or a folder for an entry of None."""
    if entry is None:
        oid = git_oid(path.encode())
        return {"type": "directory", "path": path, "size": 0, "oid": oid}
    size, sha256 = entry["size"], entry["sha256"]
    row = {"type": "file", "path": path, "size": size, "oid": entry["oid"]}
    if entry["lfs"]:
        row["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
        if xet_hash := hub.store.xet_hash(sha256):
            row["xetHash"] = xet_hash
    return row


@route("POST", "/api/models/{repo}/paths-info/{revision}", "read")
def paths_info(hub, request, repo, revision):
    files = hub.store.resolve(repo, revision)["files"]
    form = urllib.parse.parse_qs(request.body.read().decode())
    rows = []
    for path in form.get("paths", []):
        folder = path.rstrip("/") + "/"
        if path in files or any(name.startswith(folder) for name in files):
            rows.append(item(hub, path, files.get(path)))
    return rows


@route("GET", "/api/models/{repo}/commits/{revision}", "read")
def commits(hub, request, repo, revision):
    return [
        {
            "id": commit["sha"],
            "title": commit["title"],
            "message": commit["message"],
            "date": commit["date"],
            "authors": [{"user": commit["user"]}],
        }
        for commit in hub.store.history(repo["id"], revision)
    ]


@route("GET", "/api/models/{repo}/refs", "read")
def refs(hub, request, repo):
    value = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
    kinds = {"heads": "branches", "tags": "tags", "pr": "pullRequests"}
    for ref, sha in repo["refs"].items():
        _, kind, name = ref.split("/", 2)
        row = {"name": name, "ref": ref, "targetCommit": sha}
        value[kinds[kind]].append(row)
    return value


# === Files ===


@route("GET", "/{repo}/resolve/{revision}/{path}", "content")
def resolve(hub, request, repo, revision, path):
    commit = hub.store.resolve(repo, revision)
    headers = {"X-Repo-Commit": commit["sha"], "Accept-Ranges": "bytes"}
    entry = commit["files"].get(path)
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound", **headers)
    size, sha256 = entry["size"], entry["sha256"]
    if not entry["lfs"]:
        headers["ETag"] = f'"{entry["oid"]}"'
        return Answer(200, hub.store.blob(sha256), headers).limit(request)
    there = f"/cdn/{repo['id']}/resolve/{sha256}/{urllib.parse.quote(path)}"
    headers["Location"] = f"{hub.cdn}{there}?size={size}"
    headers["X-Linked-Size"] = str(size)
    headers["X-Linked-Etag"] = f'"{sha256}"'
    if xet_hash := hub.store.xet_hash(sha256):
        api = f"{hub.url}/api/models/{repo['id']}"
        token = f"{api}/xet-read-token/{commit['sha']}"
        headers["X-Xet-Hash"] = xet_hash
        headers["Link"] = f'<{token}>; rel="xet-auth"'
    return Answer(302, headers=headers)


@route("GET", "/cdn/{repo}/resolve/{sha256}/{path}")
def download(hub, request, repo, sha256, path):
    blob = hub.store.whole_blob(sha256, request.query["size"])
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"}
    return Answer(200, blob, headers).limit(request)
