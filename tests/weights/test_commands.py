"""`push`, `pull`, `verify` and `inspect` of the command line."""

import json
import pathlib

from huggingface_hub import ModelCard

# Run the command line in the client; give its exit code, output and errors.
RUN = """
    import contextlib, io, sys
    from keras_vit22b import cli

    def run(*arguments):
        sys.argv = ["keras-vit22b", *map(str, arguments)]
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output):
            with contextlib.redirect_stderr(errors):
                try:
                    cli.main()
                except SystemExit as error:
                    code = error.code
        return code, output.getvalue(), errors.getvalue()
"""


def test_push_pull_inspect_and_verify(server, client, preset):
    code = (
        RUN
        + """
    result = [
        run("push", folder, "org/m", "--private", "--message", "First"),
        run("push", folder, "org/m", "--json"),
        run("pull", "hf://org/m"),
        run("pull", "hf://org/m", "--revision", "main", "--json"),
        run("inspect", "hf://org/m"),
        run("inspect", "hf://org/m", "--json"),
        run("inspect", folder, "--json"),
        run("verify", folder),
        run("verify", folder, "--json"),
        run("verify", "hf://org/m", "--json"),
    ]
    """
    )
    rows = client(code, "hf_write", values={"folder": preset.folder}).value
    assert [code for code, _, _ in rows] == [0] * len(rows), rows
    assert [errors for _, _, errors in rows] == [""] * len(rows)
    outputs = [output for _, output, _ in rows]
    source = f"hf://org/m@{server.store.head('org/m')}"
    assert server.store.repos["org/m"]["private"]
    assert next(server.store.history("org/m"))["title"] == "First"
    assert outputs[0] == f"{source}\n"
    assert json.loads(outputs[1]) == {"source": source}
    path = outputs[2].split()[1]
    assert outputs[2] == f"{source}\n{path}\n"
    assert json.loads(outputs[3]) == {"source": source, "folder": path}
    pulled = {p.name: p.read_bytes() for p in pathlib.Path(path).iterdir()}
    assert pulled == preset.files
    tensors = json.loads(outputs[5])
    assert tensors == json.loads(outputs[6])
    for row in tensors:
        assert row["name"] in outputs[4] and row["file"] in outputs[4]
    assert f"is sound: {len(tensors)} tensors" in outputs[7]
    assert json.loads(outputs[8])["tensors"] == len(tensors)
    assert outputs[9] == outputs[8]


def test_a_card_is_stated_from_files(server, client, tmp_path, make_backbone):
    folder, other = tmp_path / "mine", tmp_path / "other"
    make_backbone().save_to_preset(folder)
    scores = {"5": {"mean": 0.9}}
    record = {
        "preset": str(folder),
        "data": {"name": "digits"},
        "accuracy": {"frozen features": scores, "raw pixels": scores},
    }
    card = {"license": "mit", "limits": "None."}
    files = {
        "card": card,
        "probe": record,
        "other": record | {"preset": str(other)},
        "list": [],
    }
    paths = {}
    for name, content in files.items():
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(content))
    push = ["push", folder, "org/m"]
    rows = [
        [*push, "--card", paths["card"], "--probe", paths["probe"]],
        [*push, "--probe", paths["other"]],
        [*push, "--probe", paths["card"]],
        [*push, "--card", paths["list"]],
        [*push, "--card", tmp_path / "none.json"],
        [*push, "--card", paths["probe"]],
    ]
    code = RUN + "\n    result = [run(*row) for row in rows]\n"
    first, *others = client(code, "hf_write", values={"rows": rows}).value
    assert first[0] == 0, first
    text = (server.store.resolve(server.store.repos["org/m"], "main"))["files"][
        "README.md"
    ]
    text = server.store.whole_blob(text["sha256"], text["size"]).read_text()
    data = ModelCard(text).data
    assert data.license == "mit"
    assert [r.metric_value for r in data.eval_results] == [0.9]
    messages = [
        f"is of '{other}', not of {folder}",
        "Expected the record of `keras-vit22b probe`",
        "must hold a JSON object",
        "No such file",
        "unknown field 'preset'",
    ]
    for (code, output, errors), message in zip(others, messages, strict=True):
        assert (code, output) == (1, ""), errors
        assert message in errors and errors.count("\n") == 1
    assert len(list(server.store.history("org/m"))) == 2


def test_a_bad_input_is_a_plain_error(server, client, presets, tmp_path):
    preset, other = presets
    other.stage(server)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name, content in preset.files.items():
        (broken / name).write_bytes(content)
    (broken / "model-00001-of-00003.safetensors").write_bytes(b"short")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    rows = {
        ("push", broken, "org/m"): "model-00001-of-00003.safetensors",
        ("push", tmp_path / "none", "org/m"): "There is no folder",
        ("push", preset.folder, "org/m"): "a token that may write there",
        ("pull", "hf://org/none"): "does not exist",
        ("pull", "hf://org/m@v9"): "no such revision",
        ("pull", "hf://org/m@v9", "--revision", "v8"): "names revision 'v9'",
        ("pull", preset.folder): "hf://org/name",
        ("inspect", "hf://org/none"): "does not exist",
        ("inspect", broken): "model-00001-of-00003.safetensors",
        ("inspect", "no_such_preset"): "Unknown preset",
        ("verify", broken): "model-00001-of-00003.safetensors",
        ("verify", tmp_path / "none"): "neither a built-in name nor a folder",
        ("verify", tmp_path / "folder"): "it has no config.json",
        ("verify", "hf://org/none"): "does not exist",
    }
    code = RUN + "\n    result = [run(*row) for row in rows]\n"
    values = {"rows": list(rows)}
    outcome = client(code, "hf_read", values=values)
    for (row, message), answer in zip(rows.items(), outcome.value):
        code, output, errors = answer
        assert (code, output) == (1, ""), (row, answer)
        assert errors.startswith("Error: "), (row, errors)
        assert message in errors, (row, errors)
        # One line, or a list of faults under it.
        assert all(f.startswith("  ") for f in errors.splitlines()[1:]), errors
        lists = row[1] == broken
        assert lists or errors.count("\n") == 1, (row, errors)
