"""Presets to the Hub: whole, once, and again after an interruption."""

import pytest
from hub_server import Fault

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
    code = "push_to_hub(folder, 'org/m')"
    assert not client(code, "hf_write", values={"folder": folder}).errors
    assert files_at(server) == preset.files


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
def test_each_refusal_says_what_is_needed(server, client, preset):
    preset.stage(server)
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


@pytest.mark.any_backend
def test_an_answer_that_is_lost_after_the_commit_is_no_failure_twice(
    server, client, preset
):
    """The commit is there, its answer is not: the next push makes none."""
    server.store.create("org/m")
    server.faults.append(Fault("/commit/", kind="reset", keep=0))
    code = """
        first = attempt(push_to_hub, folder, "org/m")
        result = first, push_to_hub(folder, "org/m")
    """
    values = {"folder": preset.folder}
    first, second = client(code, "hf_write", values=values).value
    assert files_at(server) == preset.files
    assert second == f"hf://org/m@{server.store.head('org/m')}"
    assert len(list(server.store.history("org/m"))) == 2
    if first["errors"]:
        assert "ValueError" in first["kinds"], first
        assert "org/m" in first["message"]
