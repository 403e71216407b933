"""Presets to the Hub: whole, once, and again after an interruption."""

import dataclasses
import json

import pytest
from hub_server import Fault
from huggingface_hub import ModelCard

BOTH = pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])


def files_at(server, repo="org/m", revision="main"):
    """Contents of the files at a revision, without the Hub's own."""
    store = server.store
    commit = store.resolve(store.repos[repo], revision)
    return {
        name: store.whole_blob(entry["sha256"], entry["size"]).read_bytes()
        for name, entry in commit["files"].items()
        if name != ".gitattributes"
    }


@BOTH
def test_folders_and_models_are_pushed_whole_and_once(
    server, client, presets, xet
):
    old, new = presets
    code = """
        first = push_to_hub(old, "org/m", message="First", private=True)
        again = push_to_hub(old, "org/m", message="Again")
        model = from_preset(first)
        models = [push_to_hub(model, "org/model") for _ in range(2)]
        branch = HfApi().create_branch("org/m", branch="dev")
        other = push_to_hub(new, "org/m", revision="dev")
        request = push_to_hub(new, "org/m", create_pr=True)
        result = [first, again], models, other, request, [
            load(first), load(models[0]), load(other), load(request)
        ]
    """
    values = {"old": old.folder, "new": new.folder}
    outcome = client(code, "hf_write", xet=xet, values=values)
    pushes, models, other, request, loaded = outcome.value
    assert pushes == [f"hf://org/m@{server.store.head('org/m')}"] * 2
    assert models == [f"hf://org/model@{server.store.head('org/model')}"] * 2
    for repo in ("org/m", "org/model"):
        assert len(list(server.store.history(repo))) == 2  # One is the Hub's.
    assert next(server.store.history("org/m"))["title"] == "First"
    assert server.store.repos["org/m"]["private"]
    assert files_at(server) == old.files
    assert other == f"hf://org/m@{server.store.head('org/m', 'dev')}"
    assert files_at(server, revision="dev") == new.files
    assert request == f"hf://org/m@{server.store.head('org/m', 'refs/pr/1')}"
    assert files_at(server, revision="refs/pr/1") == new.files
    assert [digest for _, digest in loaded] == [
        old.digest, old.digest, new.digest, new.digest
    ]  # fmt: skip
    assert bool(server.seen("xet-write-token")) == xet
    assert bool(server.seen(method="PUT")) == (not xet)


@pytest.mark.any_backend
def test_only_a_sound_preset_is_pushed(server, client, preset, tmp_path):
    code = """
        result = [attempt(push_to_hub, f, "org/m")["message"] for f in folders]
    """
    folders = [tmp_path / name for name in ("none", "empty", "bad", "pickle")]
    for folder in folders[1:]:
        folder.mkdir()
    for folder in folders[2:]:
        for name, content in preset.files.items():
            (folder / name).write_bytes(content)
    shard = folders[2] / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (folders[3] / "model.pkl").write_bytes(b"")
    values = {"folders": folders}
    none, empty, bad, pickle = client(code, "hf_write", values=values).value
    assert "There is no folder" in none
    assert "config.json" in empty
    assert f"{shard.name} has sha256" in bad
    assert "model.pkl may run code" in pickle
    assert server.requests == []


@pytest.mark.any_backend
def test_files_that_are_no_preset_stay_at_home(
    server, client, preset, tmp_path
):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name, content in preset.files.items():
        (folder / name).write_bytes(content)
    for name in ("notes.txt", ".env", "train.py", "sub/secret.json"):
        (folder / name).write_text("private")
    # How it was trained goes with it.
    (folder / "recipe.json").write_text("{}")
    code = "push_to_hub(folder, 'org/m')"
    assert not client(code, "hf_write", values={"folder": folder}).errors
    assert files_at(server) == preset.files | {"recipe.json": b"{}"}


@BOTH
@pytest.mark.any_backend
def test_a_push_leaves_nothing_of_the_preset_before(
    server, client, presets, tmp_path, xet
):
    """An index of the old shards would be read before the one new file.

    What else is in the repository stays.
    """
    new = tmp_path / "new"
    code = """
        push_to_hub(old, "org/m")
        model = from_preset(old)
        model.image_converter = None
        model.save_to_preset(new)
        sources = [push_to_hub(new, "org/m") for _ in range(2)]
        loaded = from_preset("hf://org/m")
        result = sources, digest(loaded), loaded.image_converter
    """
    presets[1].stage(server)
    server.store.commit("org/m", {"eval/score.json": b"{}", "notes.txt": b"x"})
    values = {"old": presets[0].folder, "new": new}
    outcome = client(code, "hf_write", xet=xet, values=values)
    sources, digest, converter = outcome.value
    assert (digest, converter) == (presets[0].digest, None)
    kept = {"eval/score.json", "notes.txt"}
    assert files_at(server).keys() == {p.name for p in new.iterdir()} | kept
    assert sources == [f"hf://org/m@{server.store.head('org/m')}"] * 2


@pytest.mark.any_backend
def test_each_refusal_says_what_is_needed(server, client, presets):
    preset, other = presets
    other.stage(server)
    server.store.create("org/slow")
    server.faults.append(Fault("org/slow/preupload", times=None, status=503))
    rows = [
        ["org/m", "hf_read", {}],
        ["org/m", "hf_other", {}],
        ["org/m", False, {}],
        ["org/new", "hf_read", {}],
        ["org/m", "hf_unknown", {}],
        ["org/m", "hf_write", {"revision": "none"}],
        ["org/slow", "hf_write", {}],
        ["no such/name", "hf_write", {}],
    ]
    code = """
        result = [
            attempt(push_to_hub, folder, repository, token=token, **options)
            for repository, token, options in rows
        ]
    """
    values = {"folder": preset.folder, "rows": rows}
    outcome = client(code, values=values)
    for row, answer in zip(rows, outcome.value):
        message = answer["message"]
        assert "ValueError" in answer["kinds"], (row, answer)
        assert row[0] in message, (row, message)
        assert "\n" not in message, (row, message)
        assert sum(answer["waits"]) <= 150
        if row[1] != "hf_write":
            assert "a token that may write there" in message
    assert len(list(server.store.history("org/m"))) == 2


# === What passes is tried again ===

PUT = "/upload/"
PASSING = {
    "503 on the repository": Fault("repos/create", times=2, status=503),
    "503 on the branch": Fault("api/models/org/m$", times=2, status=503),
    "hanging branch": Fault("api/models/org/m$", kind="hang", keep=0),
    "504 on the listing": Fault("/tree/", status=504),
    "502 on the upload's plan": Fault("/preupload/", times=2, status=502),
    "503 on the batch": Fault("/objects/batch", times=2, status=503),
    "503 on a blob": Fault(PUT, "PUT", times=2, status=503),
    "reset of a blob": Fault(PUT, "PUT", kind="drop"),
    "503 on the Xet token": Fault("xet-write-token", times=2, status=503),
    "reset of the Xet token": Fault("xet-write-token", kind="drop"),
    "503 on the commit": Fault("/commit/", times=2, status=503),
    "429 on the commit": Fault("/commit/", times=2, status=429),
    "reset of the commit": Fault("/commit/", kind="drop"),
    "504 after the commit": Fault("/commit/", status=504, handled=True),
    "lost answer of the commit": Fault("/commit/", kind="reset", keep=0),
    "hanging commit": Fault("/commit/", kind="hang", keep=0),
}
IN_XET = [name for name in PASSING if "blob" not in name and "bat" not in name]
IN_LFS = [name for name in PASSING if "Xet" not in name]


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "xet, names", [(False, IN_LFS), (True, IN_XET)], ids=["lfs", "xet"]
)
def test_a_push_outlasts_each_fault_that_passes(
    server, client, preset, xet, names
):
    """One commit comes of it, though the answer to the first was lost."""
    faults = [dataclasses.replace(PASSING[name], hits=0) for name in names]

    def next_fault(_):
        if "org/m" in server.store.repos:
            server.store.delete("org/m")
        for blob in (server.store.folder / "blobs").iterdir():
            blob.unlink()
        server.faults[1:] = faults[len(rows) : len(rows) + 1]
        rows.append(0)

    rows = []
    server.faults.append(Fault("whoami", times=None, call=next_fault))
    code = """
        hub.TIMEOUT = 1
        result = []
        for _ in range(count):
            mark()
            row = attempt(push_to_hub, folder, "org/m")
            history = [c.commit_id for c in HfApi().list_repo_commits("org/m")]
            pulled = from_preset("hf://org/m")
            result.append([row, history, digest(pulled)])
    """
    values = {"folder": preset.folder, "count": len(names)}
    outcome = client(code, "hf_write", xet=xet, values=values)
    for name, fault, answer in zip(names, faults, outcome.value):
        row, history, digest = answer
        assert fault.hits, name
        assert not row["errors"], (name, row)
        assert row["value"] == f"hf://org/m@{history[0]}", name
        assert len(history) == 2, (name, history)  # One is the Hub's.
        assert digest == preset.digest, name
        assert sum(row["waits"]) <= 30, (name, row)


@pytest.mark.any_backend
def test_a_fault_that_does_not_pass_ends_the_push(server, client, preset):
    paths = ["repos/create", "/preupload/", PUT, "/commit/"]
    server.store.create("org/m")
    first = server.store.head("org/m")

    def next_fault(_):
        server.faults[1:] = [Fault(paths.pop(0), times=None, status=503)]

    server.faults.append(Fault("whoami", times=None, call=next_fault))
    code = """
        result = []
        for _ in range(count):
            mark()
            result.append(attempt(push_to_hub, folder, "org/m"))
    """
    values = {"folder": preset.folder, "count": len(paths)}
    for row in client(code, "hf_write", values=values).value:
        assert "ValueError" in row["kinds"]
        assert "attempt 5, status 503. Pushing needs a token" in row["message"]
        assert "pushing again sends only what is missing" in row["message"]
        # The client waits for three blobs side by side.
        assert 15 <= sum(row["waits"]) <= 3 * 150
    assert server.store.head("org/m") == first


@pytest.mark.any_backend
def test_a_lost_pull_request_is_not_opened_twice(server, client, preset):
    server.store.create("org/m")
    server.faults.append(Fault("/commit/.*create_pr=1", kind="reset", keep=0))
    code = "push_to_hub(folder, 'org/m', create_pr=True)"
    values = {"folder": preset.folder}
    outcome = client(code, "hf_write", values=values)
    assert "see there whether the pull request is open" in outcome.message
    assert len(server.store.repos["org/m"]["discussions"]) == 1


@pytest.mark.any_backend
def test_pushing_again_sends_only_what_is_missing(server, client, preset):
    """After a push that ended at its second blob."""
    server.faults.append(Fault(PUT, "PUT", times=None, skip=1, status=403))
    over = Fault("whoami", call=lambda _: server.faults.clear())
    server.faults.append(over)
    code = """
        first = attempt(push_to_hub, folder, "org/m")
        mark()
        result = first, push_to_hub(folder, "org/m")
    """
    values = {"folder": preset.folder}
    first, second = client(code, "hf_write", values=values).value
    assert "status 403" in first["message"]
    stored = [r.path for r in server.seen(PUT, "PUT") if r.status == 200]
    shards = [name for name in preset.files if name.endswith(".safetensors")]
    assert len(stored) == len(set(stored)) == len(shards) == 3
    assert files_at(server) == preset.files
    assert second == f"hf://org/m@{server.store.head('org/m')}"


@pytest.mark.any_backend
def test_hundreds_of_files_come_in_one_commit(server, client, tmp_path):
    """So shards, index and card are there together, or none is."""
    code = """
        from keras_vit22b import ViT22BBackbone
        backbone = ViT22BBackbone(
            (8, 8, 3), 4, num_layers=40, num_heads=2, hidden_dim=8, mlp_dim=16
        )
        backbone.save_to_preset(folder, max_shard_size=1)
        push_to_hub(folder, "org/m")
    """
    folder = tmp_path / "many"
    assert not client(code, "hf_write", values={"folder": folder}).errors
    assert len(files_at(server)) > 280
    assert len(list(server.store.history("org/m"))) == 2


# === The card ===


@pytest.mark.any_backend
def test_a_pushed_card_names_its_repository(server, client, tmp_path):
    """Its code works, and so does pushing it on from there."""
    code = """
        import re
        import shutil
        from keras_vit22b import ViT22BBackbone

        def run(card):
            names = {}
            exec(re.search("```python\\n(.*?)```", card, re.S)[1], names)
            return list(names["features"].shape)

        backbone = ViT22BBackbone(
            (8, 8, 3), 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
        )
        tiny = {"limits": "Tiny.", "license": "mit"}
        backbone.save_to_preset(folder, card=tiny)
        stated = {"limits": "None."}
        result = []
        for what, name, card in [
            (folder, "org/one", None),
            (folder, "org/two", stated),
            (backbone, "org/three", stated),
            ("two", "org/four", {"training_data": "Noise."}),
        ]:
            if what == "two":
                shutil.copytree(pull("hf://org/two"), copy)
                what = copy
            source = push_to_hub(what, name, card=card)
            assert push_to_hub(what, name, card=card) == source
            result.append(run((pull(source) / "README.md").read_text()))
        before = (pathlib.Path(folder) / "README.md").read_text()
        assert "# folder" in before and 'from_preset(".")' in before
        try:
            HfApi().create_branch("org/one", branch="dev")
            push_to_hub(folder, "org/one", revision="dev", card=stated)
        finally:
            shutil.rmtree(copy)
    """
    values = {"folder": tmp_path / "folder", "copy": tmp_path / "copy"}
    outcome = client(code, "hf_write", values=values)
    assert outcome.value == [[2, 8]] * 4
    cards = {}
    for name in ("one", "two", "three", "four"):
        files = files_at(server, f"org/{name}")
        cards[name] = ModelCard(files["README.md"].decode())
        assert cards[name].text.strip().startswith(f"# {name}\n")
        assert f'from_preset("hf://org/{name}")' in cards[name].text
        stated = json.loads(files["metadata.json"]).get("card", {})
        assert cards[name].data.license == stated.get("license")
        assert f"## Limits\n\n{stated['limits']}\n" in cards[name].text
    assert [cards[n].data.license for n in cards] == ["mit", "mit", None, "mit"]
    assert "Tiny." in cards["one"].text
    assert "None." in cards["four"].text and "Noise." in cards["four"].text
    assert len(list(server.store.history("org/two"))) == 2
    branch = files_at(server, "org/one", "dev")["README.md"].decode()
    assert 'from_preset("hf://org/one@dev")' in branch


@pytest.mark.any_backend
def test_a_card_that_was_edited_is_pushed_as_it_is(server, client, preset):
    code = """
        push_to_hub(folder, "org/m")
        result = attempt(push_to_hub, folder, "org/m", card={"limits": "None."})
    """
    outcome = client(code, "hf_write", values={"folder": preset.folder})
    assert files_at(server)["README.md"] == b"A small model.\n"
    assert "README.md was edited and is kept" in outcome.value["message"]
    assert len(list(server.store.history("org/m"))) == 2
