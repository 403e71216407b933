"""`push`, `pull`, `verify` and `inspect` of the command line."""

import json
import pathlib

import pytest

pytestmark = pytest.mark.any_backend

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


def test_a_bad_input_is_a_plain_error(server, client, preset, tmp_path):
    preset.stage(server)
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
        ("verify", tmp_path / "none"): "There is no folder",
        ("verify", tmp_path / "folder"): "config.json is not a file",
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
        lists = row[1] == broken or row[0] == "verify"
        assert lists or errors.count("\n") == 1, (row, errors)
