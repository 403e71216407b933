"""The test Hub, seen by the real huggingface_hub client."""

import dataclasses
import hashlib
import os
import pathlib
import textwrap
import urllib.error
import urllib.request

import pytest
from hub_server import Fault
from hub_server import HubClient
from hub_server import HubServer

pytestmark = pytest.mark.any_backend

FILES = {
    "README.md": b"---\nlicense: apache-2.0\n---\nA model.\n",
    "config.json": b'{"depth": 2}\n' * 20,
    "empty.txt": b"",
    "model-00001.safetensors": os.urandom(200_000),
    "sub/model-00002.safetensors": os.urandom(70_000),
}
BLOBS = [content for path, content in FILES.items() if "model" in path]
HASHES = [hashlib.sha256(blob).hexdigest() for blob in BLOBS]
BOTH = pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])
PUSH = """
    api = HfApi()
    api.create_repo("org/m", exist_ok=True)
    result = api.upload_folder(repo_id="org/m", folder_path=folder).oid
"""


@pytest.fixture
def server(tmp_path):
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def client(server, tmp_path):
    """Make a client whose HF_HOME is `tmp_path / home`."""

    def make(token=None, home="home", **options):
        return HubClient(server, tmp_path / home, token=token, **options)

    return make


@pytest.fixture
def folder(tmp_path):
    """A folder that holds FILES."""
    for path, content in FILES.items():
        file = tmp_path / "folder" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return tmp_path / "folder"


def stage(server, repo_id="org/m", **options):
    """Put FILES in a repository without a client; return the commit."""
    server.store.create(repo_id, **options)
    return server.store.commit(repo_id, FILES)


def assert_holds_files(snapshot):
    for path, content in FILES.items():
        assert (pathlib.Path(snapshot) / path).read_bytes() == content, path


# === Pushing and pulling ===


@BOTH
def test_push_and_pull_are_byte_equal(server, client, folder, xet):
    sha = client("hf_write", xet=xet).run(PUSH, folder=folder).value
    assert sha == server.store.head("org/m")
    assert bool(server.seen(method="PUT")) == (not xet)
    assert all((server.store.xet_hash(h) is None) != xet for h in HASHES)
    # What came one way is read both ways.
    for read_xet in (False, True):
        reader = client("hf_read", home=f"read-{read_xet}", xet=read_xet)
        pulled = reader.run("result = snapshot_download('org/m')").value
        assert pathlib.Path(pulled).name == sha
        assert_holds_files(pulled)
    assert bool(server.seen("xet-read-token")) == xet
    assert not any(r.token for r in server.seen("^/cdn/"))


@BOTH
def test_second_push_makes_no_commit(server, client, folder, xet):
    code = PUSH + PUSH.replace("result", "again") + "    result = again, result"
    again, first = client("hf_write", xet=xet).run(code, folder=folder).value
    assert again == first
    assert len(list(server.store.history("org/m"))) == 2
    assert len(server.seen("/commit/")) == 1
    assert len(server.seen(method="PUT")) in (0, len(BLOBS))


def test_two_processes_read_through_xet_at_once(server, client, folder):
    server.faults.append(
        Fault("whoami", call=lambda _: outcomes.append(second.run(pull)))
    )
    second, outcomes = client(home="second", xet=True), []
    pull = "result = snapshot_download('org/m')"
    hold = """
    import hf_xet, urllib.request, json
    url = f"{api.endpoint}/api/models/org/m/xet-read-token/main"
    answer = json.load(urllib.request.urlopen(url))
    held = hf_xet.XetSession().new_file_download_group(
        answer["casUrl"], answer["accessToken"], answer["exp"]
    )
    api.whoami()
    """
    first = client("hf_write", xet=True).run(PUSH + hold, folder=folder)
    assert not first.errors
    assert_holds_files(outcomes[0].value)


@BOTH
def test_token_never_reaches_the_cdn(server, client, folder, xet):
    server.store.create("org/staged")
    server.store.commit("org/staged", {"model.safetensors": b"other"})
    code = PUSH + "    snapshot_download('org/staged')"
    assert not client("hf_write", xet=xet).run(code, folder=folder).errors
    at_cdn = [r for r in server.requests if r.host == "localhost"]
    assert len(at_cdn) == (1 if xet else len(BLOBS) + 1)
    assert {r.token for r in at_cdn} == {None}
    assert {r.token for r in server.requests if r not in at_cdn} == {"hf_write"}


def test_large_blobs_come_in_parts(server, client, folder):
    server.part_size = 64_000
    code = PUSH + "    result = snapshot_download('org/m')"
    assert_holds_files(client("hf_write").run(code, folder=folder).value)
    assert len(server.seen(r"/upload/\w+/\d$", "PUT")) == 4 + 2


def test_only_a_whole_and_right_blob_is_kept(server):
    url = f"{server.cdn}/cdn/org/m/upload/{HASHES[0]}"
    request = urllib.request.Request(url, BLOBS[0][:-1], method="PUT")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)
    assert server.store.stored_bytes() == 0


def test_byte_ranges(server):
    stage(server)
    url = f"{server.url}/org/m/resolve/main/config.json"
    content = FILES["config.json"]
    for text, part in (("2-9", content[2:10]), ("250-", content[250:])):
        request = urllib.request.Request(
            url, headers={"Range": f"bytes={text}"}
        )
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.read()) == (206, part)
    request = urllib.request.Request(url, headers={"Range": "bytes=260-"})
    with pytest.raises(urllib.error.HTTPError, match="416"):
        urllib.request.urlopen(request)


@BOTH
def test_revisions_and_pull_requests(server, client, folder, xet):
    first = server.store.create("org/m")
    server.page_size = 2
    code = """
        api, repo = HfApi(), {"repo_id": "org/m"}
        push = repo | {"folder_path": folder}
        stale = {"parent_commit": first}
        pr = api.upload_folder(**push, create_pr=True)
        api.create_tag("org/m", tag="v1")
        api.create_branch("org/m", branch="dev/a", revision=first)
        head = api.upload_folder(**push, revision="dev/a", **stale)
        stale |= repo | {"revision": "dev/a"}
        late = attempt(api.delete_file, "empty.txt", **stale)
        api.delete_folder("sub", **repo, revision="dev/a")
        paths = ["config.json", "sub", "none"]
        info = api.model_info(
            "org/m", revision=pr.pr_revision, files_metadata=True)
        refs = api.list_repo_refs("org/m", include_pull_requests=True)
        result = {
            "late": late["errors"][0] + late["message"],
            "pull request": pr.pr_revision,
            "refs": [r.ref for k in vars(refs).values() for r in k],
            "sha": api.model_info("org/m").sha,
            "hashes": [s.lfs.sha256 for s in info.siblings if s.lfs],
            "dev": api.list_repo_files("org/m", revision="dev/a"),
            "titles": [c.title for c in api.list_repo_commits(
                "org/m", revision="dev/a")],
            "found": [f.path for f in api.get_paths_info(
                "org/m", paths, revision=pr.pr_revision)],
            "exist": [api.revision_exists("org/m", r) for r in ("v1", "v2")],
        }
        api.delete_repo("org/m")
        result["gone"] = not api.repo_exists("org/m")
    """
    value = (
        client("hf_write", xet=xet).run(code, folder=folder, first=first).value
    )
    message = "Upload folder using huggingface_hub"
    assert "HfHubHTTPError" in value["late"] and "412" in value["late"]
    assert value["pull request"] == "refs/pr/1"
    assert sorted(value["refs"]) == [
        "refs/heads/dev/a",
        "refs/heads/main",
        "refs/pr/1",
        "refs/tags/v1",
    ]
    assert value["sha"] == first
    assert value["hashes"] == HASHES
    flat = [path for path in FILES if "/" not in path]
    assert sorted(value["dev"]) == sorted([".gitattributes", *flat])
    assert value["titles"][1:] == [message, "initial commit"]
    assert value["found"] == ["config.json", "sub"]
    assert value["exist"] == [True, False]
    assert value["gone"]


def test_a_store_outlives_its_server(server, tmp_path):
    sha = stage(server)
    with HubServer(tmp_path / "hub") as again:
        assert again.store.head("org/m") == sha


# === What goes wrong ===

MODEL = "resolve/.*model-00001"
# Fault, class of the error or None, waits that the client asked for.
FAULTS = {
    "503 on a file": (Fault(MODEL, "GET", status=503), "HfHubHTTPError", []),
    "503 on a look-up": (Fault(MODEL, "HEAD", times=2, status=503), None, [1]),
    "503 for good": (
        Fault(MODEL, "HEAD", times=None, status=503),
        "LocalEntryNotFoundError",
        [1, 2, 4, 8, 8],
    ),
    "503 on the revision": (
        Fault("revision/", status=503),
        "LocalEntryNotFoundError",
        [],
    ),
    "504 on the listing": (Fault("tree/", status=504), None, [1]),
    "429": (
        Fault(MODEL, "GET", status=429, headers={"Retry-After": "3"}),
        None,
        [4],
    ),
    "cut": (Fault(MODEL, "GET", kind="truncate", keep=9), None, [1]),
    "cut for good": (
        Fault(MODEL, "GET", times=None, kind="truncate"),
        "RemoteProtocolError",
        [1] * 5,
    ),
    "reset": (Fault(MODEL, "GET", kind="reset"), "ReadError", []),
    "dropped": (Fault(MODEL, "GET", kind="drop"), "ReadError", []),
    "hanging": (Fault(MODEL, "GET", kind="hang"), None, [1]),
    "wrong bytes": (Fault(MODEL, "GET", kind="corrupt"), None, []),
}


def test_the_client_sees_each_fault(server, client):
    for number, (fault, *_) in enumerate(FAULTS.values()):
        stage(server, f"org/m{number}")
        path = f"org/m{number}/.*{fault.path}"
        server.faults.append(dataclasses.replace(fault, path=path))
    code = """
        result = [attempt(snapshot_download, f"org/m{n}") for n in range(count)]
    """
    reader = client(HF_HUB_DOWNLOAD_TIMEOUT="2")
    rows = reader.run(code, count=len(FAULTS)).value
    assert all(fault.hits for fault in server.faults)
    for (name, (_, error, waits)), row in zip(FAULTS.items(), rows):
        assert (row["errors"] or [None])[0] == error, name
        assert row["waits"] == waits, name
        if name == "wrong bytes":
            model = pathlib.Path(row["value"]) / "model-00001.safetensors"
            assert model.read_bytes()[:-1] == BLOBS[0][:-1]
            assert model.read_bytes()[-1] == BLOBS[0][-1] ^ 0xFF
        elif error is None:
            assert_holds_files(row["value"])


@BOTH
def test_wrong_bytes_at_rest_are_taken_in_silence(server, client, folder, xet):
    server.faults.append(
        Fault("revision/", call=lambda _: server.store.spoil())
    )
    code = PUSH + "    result = snapshot_download('org/m')"
    pulled = client("hf_write", xet=xet).run(code, folder=folder).value
    models = [path for path in FILES if "model" in path]
    contents = [(pathlib.Path(pulled) / path).read_bytes() for path in models]
    assert contents != BLOBS
    assert [*map(len, contents)] == [*map(len, BLOBS)]


@BOTH
def test_an_answer_lost_after_the_commit(server, client, folder, xet):
    server.store.create("org/m")
    server.faults.append(Fault("/commit/", kind="reset", keep=0))
    code = """
        push = {"repo_id": "org/m", "folder_path": folder}
        first = attempt(HfApi().upload_folder, **push)
        result = first, HfApi().upload_folder(**push).oid
    """
    outcome = client("hf_write", xet=xet).run(code, folder=folder)
    first, sha = outcome.value
    assert sha == server.store.head("org/m")
    commits = len(list(server.store.history("org/m")))
    if xet:  # It tries again and commits the same files twice.
        assert (first["errors"], first["waits"], commits) == ([], [1], 3)
    else:  # It gives up, though the commit is there.
        assert first["errors"][0] == "ReadError"
        assert (first["waits"], commits) == ([], 2)


@BOTH
def test_a_push_killed_in_the_middle(server, client, folder, xet):
    first = server.store.create("org/m")
    writer = client("hf_write", xet=xet)
    running = []
    # With LFS after the first blob was stored, with Xet after the last chunk.
    where = "/commit/" if xet else "/lfs/verify"
    server.faults.append(
        Fault(where, call=lambda _: running[0].kill(), kind="drop", keep=0)
    )
    running.append(writer.start(PUSH, folder=folder))
    running[0].communicate()
    assert running[0].returncode < 0
    assert server.store.head("org/m") == first
    server.requests.clear()
    code = PUSH + "    result = snapshot_download('org/m')"
    assert_holds_files(writer.run(code, folder=folder).value)
    assert len(server.seen(method="PUT")) < len(BLOBS)
    assert len(list(server.store.history("org/m"))) == 2


def test_a_branch_that_moves_does_not_mix_two_commits(server, client):
    sha = stage(server)
    new = {path: b"new" for path in FILES}
    server.faults.append(
        Fault("/tree/", call=lambda _: server.store.commit("org/m", new))
    )
    pulled = client().run("result = snapshot_download('org/m')").value
    assert server.store.head("org/m") != sha
    assert pathlib.Path(pulled).name == sha
    assert_holds_files(pulled)


def test_a_hostile_path_reaches_the_client(server, client):
    stage(server)
    server.store.commit("org/m", {"../evil.json": b"{}"})
    outcome = client().run("snapshot_download('org/m')")
    assert outcome.errors == ["ValueError"]
    assert "../evil.json" in outcome.message


# === Who may do what ===

NONE, GATED = "RepositoryNotFoundError", "GatedRepoError"
HTTP, LOCAL = "HfHubHTTPError", "LocalEntryNotFoundError"
# Token to the error of: reading an open, private and gated repository, pushing
# to the open one, opening a pull request, making a repository.
ACCESS = {
    False: [None, NONE, GATED, NONE, NONE, HTTP],
    "hf_unknown": [HTTP] * 6,
    "hf_read": [None, None, None, HTTP, HTTP, HTTP],
    "hf_fine": [None, None, LOCAL, None, None, None],
    "hf_other": [None, NONE, GATED, HTTP, None, HTTP],
    "hf_write": [None] * 6,
}


def test_each_token_gets_its_own_errors(server, client, folder):
    stage(server, "org/open")
    stage(server, "org/private", private=True)
    stage(server, "lab/gated", gated="auto", granted=["alice"])
    code = """
        result = []
        for number, token in enumerate(tokens):
            api = HfApi(token=token)
            push = {"repo_id": "org/open", "folder_path": folder}
            rows = [
                attempt(snapshot_download, repo, token=token,
                        cache_dir=f"{folder}-{number}")
                for repo in ("org/open", "org/private", "lab/gated")
            ] + [
                attempt(api.upload_folder, **push, path_in_repo=str(number)),
                attempt(api.upload_folder, **push, path_in_repo="pr",
                        create_pr=True),
                attempt(api.create_repo, f"org/new-{number}"),
            ]
            result.append([(row["errors"] or [None])[0] for row in rows])
    """
    tokens = list(ACCESS)
    outcome = client().run(code, folder=folder, tokens=tokens)
    assert dict(zip(tokens, outcome.value)) == ACCESS


@BOTH
def test_a_pinned_commit_needs_no_request(server, client, folder, xet):
    code = """
        pinned = {"repo_id": "org/m", "revision": result}
        snapshot_download(**pinned)
        api.whoami()
        result = pinned, snapshot_download(**pinned)
    """
    code = textwrap.dedent(PUSH) + textwrap.dedent(code)
    outcome = client("hf_write", xet=xet).run(code, folder=folder)
    pinned, pulled = outcome.value
    assert server.requests[-1].path == "/api/whoami-v2"
    server.requests.clear()
    code = """
        result = snapshot_download(**pinned)
        other = attempt(snapshot_download, "org/m", revision="0" * 40)
        result = result, other["errors"][0]
    """
    outcome = client(xet=xet, HF_HUB_OFFLINE="1").run(code, pinned=pinned)
    assert outcome.value == [pulled, "LocalEntryNotFoundError"]
    assert server.requests == []


def test_a_client_has_nothing_of_its_parents_settings(
    server, client, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    stage(server, private=True)
    outcome = client().run("snapshot_download('org/m')")
    assert outcome.errors[0] == "RepositoryNotFoundError"
    assert {request.token for request in server.requests} == {None}
