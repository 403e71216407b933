"""Presets from the Hub, loaded by the real client over HTTP and Xet.

Each client is a process of its own, which reads its environment once, so one
process makes many loads.
"""

import dataclasses
import json
import logging
import pathlib
import re

import pytest
import safetensors.numpy
from hub_server import Fault
from hub_server import Token

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.weights import hub

BOTH = pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])
PUSH = """
    api = HfApi()
    api.create_repo("org/m", exist_ok=True)
    sha = api.upload_folder(repo_id="org/m", folder_path=folder).oid
"""


def between_marks(server):
    """Requests between the lines that `mark()` draws, as lists."""
    parts = [[]]
    for request in server.requests:
        if request.path == "/api/whoami-v2":
            parts.append([])
        else:
            parts[-1].append(request)
    return parts


def files_in(path):
    return {p.name: p.read_bytes() for p in pathlib.Path(path).iterdir()}


# === Loading ===


@BOTH
def test_pulled_files_are_those_of_the_repository(server, client, preset, xet):
    code = (
        PUSH
        + """
    result = sha, pull("hf://org/m", cache_dir=cache), load("hf://org/m")
    """
    )
    values = {"folder": preset.folder, "cache": preset.folder.parent / str(xet)}
    outcome = client(code, "hf_write", xet=xet, values=values)
    sha, path, loaded = outcome.value
    assert bool(server.seen("xet-read-token")) == xet
    path = pathlib.Path(path)
    assert path.name == sha == server.store.head("org/m")
    assert files_in(path) == preset.files
    assert loaded == [f"hf://org/m@{sha}", preset.digest]


@pytest.mark.any_backend
def test_every_way_to_name_a_revision(server, client, presets):
    old, new = presets
    first = old.stage(server, private=True)
    refs = server.store.repos["org/m"]["refs"]
    refs |= {"refs/tags/v1": first, "refs/pr/1": first}
    last = server.store.commit("org/m", new.files)
    code = """
        result = [
            load("hf://org/m"),
            load("hf://org/m@v1"),
            load("hf://org/m", revision="v1"),
            load("hf://org/m", revision="refs/pr/1"),
            load(f"hf://org/m@{first}"),
            load("hf://org/m@main", token="hf_read"),
            load("hf://org/m", token="hf_write", cache_dir=cache),
        ]
        result.append(len(list(pathlib.Path(cache).glob("models--*"))))
    """
    cache = server.store.folder.parent / "cache"
    values = {"first": first, "cache": cache}
    *rows, caches = client(code, "hf_read", values=values).value
    main = [f"hf://org/m@{last}", new.digest]
    then = [f"hf://org/m@{first}", old.digest]
    assert rows == [main, then, then, then, then, main, main]
    assert caches == 1
    assert {r.token for r in server.requests} >= {"hf_read", "hf_write"}
    assert {r.token for r in server.seen("^/cdn/")} == {None}


@BOTH
@pytest.mark.any_backend
def test_a_pinned_commit_needs_no_request_after_one_load(
    server, client, preset, xet
):
    code = (
        PUSH
        + """
    pinned = f"hf://org/m@{sha}"
    first = load(pinned)
    pull(pinned, cache_dir=pinned_alone)
    mark()
    again = load(pinned), load(pinned, local_files_only=True)
    mark()
    load("hf://org/m")
    result = pinned, first, again
    """
    )
    values = {
        "folder": preset.folder,
        "pinned_alone": preset.folder.parent / f"pinned {xet}",
    }
    outcome = client(code, "hf_write", xet=xet, values=values)
    pinned, first, again = outcome.value
    assert first == [pinned, preset.digest]
    assert again == [first, first]
    _, online, _ = between_marks(server)
    assert online == []
    server.requests.clear()
    code = """
        result = [
            load(pinned),
            load(pinned, local_files_only=True),
            load("hf://org/m"),
            load("hf://org/m", revision="main"),
        ]
        other = "hf://org/m@" + "0" * 40
        result += [attempt(load, other)["message"]]
        result += [attempt(load, "hf://org/other")["message"]]
        # A cache that saw the commit alone does not know the branch.
        result += [pull(pinned, cache_dir=pinned_alone).name]
        branch = attempt(pull, "hf://org/m", cache_dir=pinned_alone)
        result += [branch["message"]]
    """
    values["pinned"] = pinned
    outcome = client(code, xet=xet, values=values, HF_HUB_OFFLINE="1")
    *rows, unknown, other, commit, branch = outcome.value
    assert rows == [first] * 4
    assert "is not in the cache" in unknown and "0" * 40 in unknown
    assert "is not in the cache" in other and "org/other" in other
    assert pinned == f"hf://org/m@{commit}"
    assert "is not in the cache" in branch and "org/m" in branch
    assert server.requests == []


@pytest.mark.any_backend
def test_a_branch_that_moves_in_the_middle_mixes_nothing(
    server, client, presets
):
    """The branch moves before each kind of request after the first."""
    old, new = presets
    moments = ["tree/", "HEAD", "model-00001", "model-00002", "index.json"]
    commits = []
    for number, moment in enumerate(moments):
        repo = f"org/m{number}"
        commits.append(old.stage(server, repo))
        server.faults.append(
            Fault(
                f"{repo}/.*" + moment.replace("HEAD", "resolve"),
                method="HEAD" if moment == "HEAD" else None,
                call=lambda _, repo=repo: server.store.commit(repo, new.files),
            )
        )
    code = "result = [load(f'hf://org/m{n}') for n in range(count)]"
    rows = client(code, values={"count": len(moments)}).value
    assert all(fault.hits for fault in server.faults)
    for number, (commit, row) in enumerate(zip(commits, rows)):
        repo = f"org/m{number}"
        assert server.store.head(repo) != commit
        assert row == [f"hf://{repo}@{commit}", old.digest]


# === What goes wrong on the way ===

SHARD, NAME = "resolve/.*model-00002", "model-00002-of-00003.safetensors"
API, LIST = r"api/models/org/m\d+$", "tree/"
GOOD = {"times": None}
# The header is read first: a redirect, and then the file's first bytes.
HEADER, BODY = "^/org/m.*/resolve/.*model-00002", {"skip": 2}
# What goes wrong, and part of the message, or None where the load succeeds.
FAULTS = {
    "503 on the revision": (Fault(API, times=2, status=503), None),
    "503 on the revision for good": (
        Fault(API, **GOOD, status=503),
        "Cannot resolve .*5 attempts failed",
    ),
    "504 on the listing": (Fault(LIST, status=504), None),
    "504 on the listing for good": (
        Fault(LIST, **GOOD, status=504),
        "Cannot list .* on attempt 5, status 504",
    ),
    "503 on a look-up": (Fault(SHARD, "HEAD", times=2, status=503), None),
    "503 on a look-up for good": (
        Fault(SHARD, "HEAD", **GOOD, status=503),
        f"Cannot download {NAME} of .*5 attempts failed",
    ),
    "503 on a file": (Fault(SHARD, "GET", **BODY, times=2, status=503), None),
    "503 on a file for good": (
        Fault(SHARD, "GET", **BODY, **GOOD, status=503),
        f"Cannot download {NAME} of .* on attempt 5, status 503",
    ),
    "429 on a file": (
        Fault(SHARD, "GET", **BODY, status=429, headers={"Retry-After": "3"}),
        None,
    ),
    "404 on a file": (
        Fault(SHARD, "GET", **BODY, **GOOD, status=404),
        f"Cannot download {NAME} of .* on attempt 1, status 404",
    ),
    "cut": (Fault(SHARD, "GET", **BODY, kind="truncate"), None),
    "cut for good": (
        Fault(SHARD, "GET", **BODY, **GOOD, kind="truncate"),
        f"Cannot download {NAME} of .* on attempt 5",
    ),
    "reset": (Fault(SHARD, "GET", **BODY, kind="reset"), None),
    "reset for good": (
        Fault(SHARD, "GET", **BODY, **GOOD, kind="reset"),
        f"Cannot download {NAME} of .* on attempt 5",
    ),
    "dropped": (Fault(SHARD, "GET", **BODY, kind="drop"), None),
    "hanging file": (Fault(SHARD, "GET", **BODY, kind="hang"), None),
    "503 on a header": (Fault(HEADER, "GET", times=2, status=503), None),
    "503 on a header for good": (
        Fault(HEADER, "GET", **GOOD, status=503),
        f"Cannot read the header of {NAME} of .* on attempt 5, status 503",
    ),
    "cut header": (Fault(SHARD, "GET", skip=1, kind="truncate"), None),
    "wrong length in a header": (
        Fault(SHARD, "GET", skip=1, kind="corrupt_start"),
        f"{NAME} is not safetensors: its header claims",
    ),
    "hanging header": (Fault(SHARD, "GET", skip=1, kind="hang"), None),
    "hanging look-up": (Fault(SHARD, "HEAD", kind="hang"), None),
    "hanging listing": (Fault(LIST, kind="hang", keep=0), None),
    "hanging revision": (Fault(API, kind="hang", keep=0), None),
    "wrong bytes": (
        Fault(SHARD, "GET", **BODY, kind="corrupt"),
        f"^{NAME} of .* is damaged: .*removed from the cache; load again",
    ),
    "wrong bytes of JSON": (
        Fault("resolve/.*/config.json", "GET", kind="corrupt"),
        "^config.json of .* is damaged: .*removed from the cache; load again",
    ),
}


@pytest.mark.any_backend
def test_each_fault_passes_or_has_its_own_error(server, client, preset):
    """Within bounded time; once it is over, the same cache loads."""
    for number, (fault, _) in enumerate(FAULTS.values()):
        preset.stage(server, f"org/m{number}")
        path = fault.path.replace(r"org/m\d+", f"org/m{number}")
        path = path.replace("org/m.*/", f"org/m{number}/")
        if path == fault.path:
            path = f"org/m{number}/.*{path}"
        server.faults.append(dataclasses.replace(fault, path=path))
    code = """
        hub.TIMEOUT = 1
        result = [attempt(load, f"hf://org/m{n}") for n in range(count)]
        mark()
        result += [attempt(load, f"hf://org/m{n}") for n in range(count)]
    """
    over = Fault("whoami", call=lambda _: server.faults.clear())
    server.faults.append(over)
    short = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
    faults = list(server.faults)
    outcome = client(code, values={"count": len(FAULTS)}, **short)
    rows, after = outcome.value[: len(FAULTS)], outcome.value[len(FAULTS) :]
    for (name, (_, message)), fault, row in zip(FAULTS.items(), faults, rows):
        assert fault.hits, name
        if message is None:
            assert not row["errors"], (name, row)
            assert row["value"][1] == preset.digest, name
        else:
            assert row["kinds"][0] == "ValueError", (name, row)
            assert re.search(message, row["message"]), (name, row)
            assert len(row["message"].splitlines()) <= 2
        assert sum(row["waits"]) <= 150, (name, row)
    assert [row["message"] for row in after] == [""] * len(FAULTS)
    assert {row["value"][1] for row in after} == {preset.digest}


@BOTH
@pytest.mark.any_backend
def test_bytes_that_are_wrong_at_the_hub_itself_are_found(
    server, client, preset, xet
):
    """And once they are right there, the same cache loads."""
    code = (
        PUSH
        + """
    open_hub_preset("hf://org/m").__exit__()  # The JSON came before.
    mark()
    first = attempt(pull, "hf://org/m")
    mark()
    result = first, attempt(pull, "hf://org/m")
    """
    )
    # What is spoilt twice is as it was.
    server.faults.append(
        Fault("whoami", times=None, call=lambda _: server.store.spoil())
    )
    values = {"folder": preset.folder}
    first, second = client(code, "hf_write", xet=xet, values=values).value
    assert first["kinds"][0] == "ValueError"
    shard = r"model-0000\d-of-00003.safetensors of hf://org/m"
    assert re.search(shard, first["message"]), first
    assert not second["errors"], second
    assert files_in(second["value"]) == preset.files


@pytest.mark.any_backend
def test_a_file_that_is_damaged_in_the_cache_is_found_and_fetched(
    server, client, preset
):
    preset.stage(server)
    code = """
        path = pull("hf://org/m") / name
        blob = path.resolve()
        content = bytearray(blob.read_bytes())
        content[-1] ^= 255
        blob.write_bytes(content)
        mark()
        result = [attempt(pull, "hf://org/m") for _ in range(2)]
    """
    damaged, again = client(code, values={"name": NAME}).value
    assert f"{NAME} of hf://org/m" in damaged["message"]
    assert files_in(again["value"]) == preset.files
    fetched = {r.path for r in between_marks(server)[1] if "/cdn/" in r.path}
    assert len(fetched) == 1


# === Who may read what ===


@pytest.mark.any_backend
def test_each_refusal_says_what_to_do(server, client, preset):
    preset.stage(server)
    preset.stage(server, "org/private", private=True)
    preset.stage(server, "lab/gated", gated="auto", granted=["alice"])
    preset.stage(server, "lab/open")
    server.store.create("org/empty")
    code = """
        result = [
            attempt(pull, handle, token=token)["message"]
            for handle, token in rows
        ]
    """
    rows = {
        ("hf://org/private", False): "private and the token may not read it",
        ("hf://org/none", "hf_read"): "does not exist",
        ("hf://org/m@v9", "hf_read"): "no such revision",
        ("hf://org/m@" + "1" * 40, "hf_read"): "no such revision",
        ("hf://org/empty", "hf_read"): "no config.json, so it is no preset",
        ("hf://lab/gated", False): "it is gated. Accept its terms",
        ("hf://lab/gated", "hf_other"): "it is gated. Accept its terms",
        ("hf://lab/gated", "hf_fine"): "gated",
        ("hf://lab/gated", "hf_read"): None,
        ("hf://org/private", "hf_read"): None,
        ("hf://lab/open", "hf_unknown"): "status 401",
        ("hf://org/m", False): None,
    }
    outcome = client(code, values={"rows": list(rows)})
    for (row, expected), message in zip(rows.items(), outcome.value):
        if expected is None:
            assert message == "", row
        else:
            assert expected in message, (row, message)
            assert row[0].split("@")[0] in message
            assert "\n" not in message


@pytest.mark.any_backend
def test_a_token_is_in_no_log_error_record_or_repr(
    server, client, preset, tmp_path
):
    secrets = ["hf_SECRETarg0123456789", "hf_SECRETenv0123456789"]
    for secret in secrets:
        server.tokens[secret] = Token("alice", "read", ("alice", "org"))
    preset.stage(server, "org/private", private=True)
    preset.stage(server, "org/slow", private=True)
    preset.stage(server, "lab/gated", gated="auto")
    server.faults += [
        Fault("org/slow/.*model-00001", times=None, status=503),
        Fault("org/private/resolve/.*config.json", status=503),
    ]
    code = """
        logging.basicConfig(level=logging.DEBUG)
        result = []
        for token in (None, secret):
            cache = f"{caches}/{token is None}"
            options = {"token": token, "cache_dir": cache}
            backbone = from_preset("hf://org/private", **options)
            hub_preset = HubPreset("hf://org/private", **options)
            rows = [attempt(load, h, **options) for h in others]
            push = attempt(push_to_hub, folder, "org/private", token=token)
            result += [
                backbone.source, repr(backbone.get_config()), repr(backbone),
                repr(hub_preset), str(hub_preset), rows, push,
            ]
            backbone.save_to_preset(f"{caches}/saved")
        HfApi().whoami()
    """
    values = {
        "secret": secrets[0],
        "caches": tmp_path / "caches",
        "folder": preset.folder,
        "others": ["hf://org/none", "hf://org/slow", "hf://lab/gated"],
    }
    outcome = client(code, secrets[1], values=values)
    text = json.dumps(outcome.value) + outcome.log
    assert "DEBUG" in outcome.log and "again in" in outcome.log
    assert {r.token for r in server.requests} >= set(secrets)
    written = [
        path.read_bytes()
        for folder in ("caches", "home")
        for path in (tmp_path / folder).rglob("*")
        if path.is_file()
    ]
    assert len(written) > 10
    for secret in secrets:
        assert secret not in text
        assert not any(secret.encode() in content for content in written)


# === Repositories with other files, and hostile ones ===


@pytest.mark.any_backend
def test_only_the_files_of_a_preset_are_fetched(server, client, preset):
    others = {
        name: b"never to be fetched"
        for name in (
            "pytorch_model.bin",
            "model.weights.h5",
            "model.keras",
            "weights.pkl",
            "modeling.py",
            "extra.json",
            "task.json",
            "sub/config.json",
            "sub/model.safetensors",
            "config.json.exe",
            ".hidden",
        )
    }
    preset.stage(server)
    server.store.commit("org/m", others | {"other.safetensors": b"x" * 99})
    code = "result = load('hf://org/m'), pull('hf://org/m')"
    loaded, path = client(code).value
    assert loaded[1] == preset.digest
    assert {p.name for p in pathlib.Path(path).rglob("*")} == set(preset.files)
    fetched = {r.path.split("?")[0].split("/")[-1] for r in server.seen("reso")}
    assert fetched == set(preset.files)


def test_headers_are_looked_at_and_only_what_is_needed_is_fetched(
    server, client, make_backbone, tmp_path
):
    """A backbone needs no file that holds the head alone."""
    classifier = ViT22BImageClassifier(make_backbone(), num_classes=40)
    folder = tmp_path / "classifier"
    classifier.save_to_preset(folder, max_shard_size=1500)
    files = files_in(folder)
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    head = weight_map["head.kernel"]
    others = {f for t, f in weight_map.items() if not t.startswith("head.")}
    assert head not in others
    server.store.create("org/m")
    server.store.commit("org/m", files)
    code = """
        from keras_vit22b.weights.preset_files import open_preset
        from keras_vit22b.weights.verification import list_tensors

        hub.USUAL_HEADER = 64
        with open_preset("hf://org/m") as folder:
            tensors = list_tensors(folder)
        mark()
        load("hf://org/m")
        result = [row["name"] for row in tensors]
    """
    assert sorted(client(code).value) == sorted(weight_map)
    looked, loaded = (
        {
            (r.path.split("?")[0].split("/")[-1], r.range)
            for r in part
            if "/cdn/" in r.path and r.method == "GET"
        }
        for part in between_marks(server)
    )
    lengths = {
        name: 8 + int.from_bytes(files[name][:8], "little")
        for name in {head, *others}
    }
    assert looked == {
        (name, f"bytes=0-{stop - 1}")
        for name, length in lengths.items()
        for stop in (64, length)
    }
    assert {name for name, bytes_ in loaded - looked} == others


@pytest.mark.any_backend
def test_a_text_too_large_is_refused_before_it_is_fetched(
    server, client, preset
):
    preset.stage(server)
    limit = max(
        len(content)
        for name, content in preset.files.items()
        if not name.endswith(".safetensors")
    )
    code = """
        hub.LARGEST_TEXT = limit
        load("hf://org/m")
        hub.LARGEST_TEXT -= 1
        mark()
        result = attempt(load, "hf://org/m", cache_dir=cache)["message"]
    """
    cache = server.store.folder.parent / "cache"
    values = {"limit": limit, "cache": cache}
    message = client(code, values=values).value
    assert f"has {limit:,} bytes; the limit is {limit - 1:,}." in message
    assert not any("resolve/" in r.path for r in between_marks(server)[1])
    assert hub.LARGEST_TEXT <= 100_000_000


def edit(files, name, **changes):
    """Change the top level, or the config, of a JSON file."""
    content = json.loads(files[name])
    if "config" in content:
        changes = {"config": content["config"] | changes}
    return files | {name: json.dumps(content | changes).encode()}


@pytest.mark.any_backend
def test_a_hostile_repository_has_its_own_error(server, client, preset):
    files, index = preset.files, "model.safetensors.index.json"
    shard = files[NAME]
    weight_map = json.loads(files[index])["weight_map"]
    tensors = safetensors.numpy.load(shard)
    first = next(iter(tensors))
    elsewhere = next(n for n, file in weight_map.items() if file != NAME)

    def indexed(name):
        return edit(files, index, weight_map=weight_map | {"class": name})

    def stored(**changes):
        return files | {NAME: safetensors.numpy.save(tensors | changes)}

    plain = "the plain name of a .safetensors file"
    rows = [
        (indexed("../../blobs/x.safetensors"), plain),
        (indexed("/etc/x.safetensors"), plain),
        (indexed("C:\\x.safetensors"), plain),
        (indexed("sub/x.safetensors") | {"sub/x.safetensors": b"x"}, plain),
        (indexed("model.bin") | {"model.bin": b"pickle"}, plain),
        (indexed([NAME]), plain),
        (indexed("gone.safetensors"), "gone.safetensors is in the index, but"),
        (indexed(NAME), f"class is not in {NAME}, as the index says"),
        (
            stored(extra=tensors[first]),
            f"extra is in {NAME}, but not in the index",
        ),
        (
            stored(**{elsewhere: tensors[first]}),
            f"{elsewhere} is in model-0000",
        ),
        (
            stored(**{first: tensors[first].astype("int8")}),
            "has total_size",
        ),
        (
            stored(**{first: tensors[first].view("int32")}),
            f"{first} is int32, expected float32; only floats are cast",
        ),
        (edit(files, index, metadata={"total_size": 1}), "has total_size 1,"),
        (files | {"../config.json": b"{}"}, None),
        (files | {NAME: shard[:-1]}, f"{NAME} is not safetensors"),
        (files | {NAME: shard + b"x"}, f"{NAME} is not safetensors"),
        (files | {NAME: b"\xff" * 8 + shard}, "the limit is 25,000,000"),
        (files | {NAME: b"\x89HDF\r\n\x1a\n" + shard}, "the limit is"),
        (files | {NAME: b"\x80\x04}q\0." + shard}, "the limit is"),
        (edit(files, "config.json", num_layers=1024), "describes at least"),
        (
            edit(
                files,
                "config.json",
                num_layers=48,
                hidden_dim=6144,
                mlp_dim=24576,
            ),
            "describes at least",
        ),
        (
            edit(files, "config.json", activation={"class_name": "Lambda"}),
            "config.json is not valid: activation",
        ),
        (
            edit(files, "image_converter.json", scale={"class_name": "Lambda"}),
            "image_converter.json is not valid: scale",
        ),
        (
            files
            | {
                "config.json": files["config.json"].replace(
                    b"keras_vit22b>ViT22BBackbone", b"keras>Lambda"
                )
            },
            "describes 'keras>Lambda'",
        ),
        (edit(files, "config.json", module="os"), "unknown field 'module'"),
        (edit(files, "config.json", auto_map={}), "unknown field 'auto_map'"),
        (files | {"config.json": b"[" * 100_000}, "Cannot read"),
        (files | {"config.json": b""}, "Cannot read"),
        (
            {n: c for n, c in files.items() if "safetensors" not in n},
            "gone",
        ),
    ]
    for number, (content, _) in enumerate(rows):
        server.store.create(f"org/m{number}")
        server.store.commit(f"org/m{number}", content)
    code = "result = [attempt(load, f'hf://org/m{n}') for n in range(count)]"
    outcome = client(code, values={"count": len(rows)})
    for number, ((_, message), row) in enumerate(zip(rows, outcome.value)):
        if message is None:
            assert row["value"][1] == preset.digest
        elif message == "gone":  # model.weights.json is there, its files not.
            assert "has neither model.safetensors" in row["message"], row
        else:
            assert row["kinds"][0] == "ValueError", (number, row)
            assert message in row["message"], (number, row)
    names = {
        r.path.split("?")[0].split("/")[-1] for r in server.seen("resolve")
    }
    assert names <= set(files)


@pytest.mark.any_backend
def test_waits_between_attempts_are_bounded(monkeypatch):
    """The bound that the timeouts in other tests are cut down from."""
    assert hub.ATTEMPTS * hub.TIMEOUT <= 300
    waits = [min(2.0**n, hub.LONGEST_WAIT) for n in range(hub.ATTEMPTS)]
    assert sum(waits) <= 60
    assert logging.getLogger(hub.__name__).name == "keras_vit22b.weights.hub"
