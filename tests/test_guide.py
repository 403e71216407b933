"""Every block of docs/training_at_scale.md runs, in processes of its own."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import keras
import numpy as np
import pytest

from keras_vit22b import cli

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "training_at_scale.md"

jax_only = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Of the JAX backend."
)
tensorflow_only = pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="Of the TensorFlow backend."
)


def read_blocks():
    """Return `{heading: [(language, text), ...]}` of the guide."""
    sections, heading, block = {}, None, None
    for line in GUIDE.read_text().splitlines():
        if line.lstrip().startswith("```"):
            if block is None:
                block = (line.strip().strip("`"), [])
            else:
                language, lines = block
                text = "\n".join(lines) + "\n"
                sections.setdefault(heading, []).append((language, text))
                block = None
        elif block is not None:
            block[1].append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    assert block is None, f"A block under {heading!r} has no end."
    return sections


SECTIONS = read_blocks()
RUN = set()


def runs(*headings):
    """Give a test all blocks of some sections, which it must run."""
    RUN.update(headings)
    return pytest.mark.parametrize(
        "blocks",
        [[block for heading in headings for block in SECTIONS[heading]]],
        ids=[headings[0]],
    )


def write_script(blocks, folder, free_port):
    """Write what a reader would: files, a session and the commands.

    Python whose first line is `# name.py` is that file. All other Python is
    one session, after the commands.

    Returns:
        A script for the shell.
    """
    script, session = "set -e\n", ""
    for language, text in blocks:
        name = re.match(r"# (\w+\.py)\n", text)
        if language == "python" and name:
            (folder / name[1]).write_text(text)
        elif language == "python":
            session += text
        else:
            assert language == "sh", f"Nothing runs {language!r}:\n{text}"
            script += text
    if session:
        (folder / "session.py").write_text(session)
        script += "python session.py\n"
    for address in set(re.findall(r"127\.0\.0\.1:\d+", script)):
        script = script.replace(address, f"127.0.0.1:{free_port()}")
    return script


def run(script, folder):
    """Run a script in a shell that is set up for nothing; return its output."""
    ours = ("KERAS_BACKEND", "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    env = {name: v for name, v in os.environ.items() if name not in ours}
    env["PATH"] = os.pathsep.join(
        [os.path.dirname(sys.executable), env["PATH"]]
    )
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # Compiling takes most time.
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


@pytest.mark.any_backend
def test_no_block_is_left_out():
    """Blocks of sections in RUN run, since their tests take all of them."""
    assert set(SECTIONS) == RUN


@jax_only
@runs(
    "A laptop as eight devices",
    "One device",
    "A mesh",
    "Overlap",
    "Save on one mesh, load on another",
    "Go on after a kill",
)
def test_one_process(blocks, tmp_path, free_port):
    """The blocks compare losses and weights themselves."""
    output = run(write_script(blocks, tmp_path, free_port), tmp_path)
    assert "in all, on batch 2 x model 4" in output
    assert (tmp_path / "trained" / "config.json").exists()
    assert "'step': 6" in output
    assert (tmp_path / "run" / "checkpoints" / "6").exists()


@jax_only
@runs("Several hosts")
def test_several_hosts(blocks, tmp_path, make_backbone, free_port):
    from keras_vit22b import ViT22BImageClassifier
    from keras_vit22b.weights.verification import verify_preset

    # Like that of the section "One device".
    backbone = make_backbone(
        (32, 32, 3), 8, num_heads=8, num_layers=1, pooling="mean"
    )
    start = ViT22BImageClassifier(backbone, 10)
    start.save_to_preset(tmp_path / "start")
    output = run(write_script(blocks, tmp_path, free_port), tmp_path)
    found = dict(re.findall(r"share (\d of 2): (.*)", output))
    assert found.keys() == {"0 of 2", "1 of 2"}
    assert found["0 of 2"] == found["1 of 2"]
    verify_preset(tmp_path / "shared")
    trained = ViT22BImageClassifier.from_preset(tmp_path / "shared")
    assert np.any(trained.head.kernel.numpy())


@jax_only
@runs("TPU flags")
def test_flags_are_those_that_a_mesh_names(blocks, tmp_path):
    from keras_vit22b.distribution import OverlapMesh

    def flags(kind):
        chip = types.SimpleNamespace(platform="tpu", device_kind=kind)
        options = OverlapMesh(np.array([[chip]]), "auto").compiler_options
        return {f"--{name}={value}" for name, value in options.items()}

    (_, other), (_, v5p) = blocks
    show = 'printf "%s" "$LIBTPU_INIT_ARGS"'
    for kinds, export in (
        (("TPU v4", "TPU v5 lite", "TPU v6 lite"), other),
        (("TPU v5p",), v5p),
    ):
        written = run(export + show, tmp_path)
        assert "\n" not in written
        for kind in kinds:
            assert set(written.split()) == flags(kind)


@pytest.mark.any_backend
@runs("Before there is a machine")
def test_plan_and_compile(blocks, tmp_path, monkeypatch, capsys):
    (_, plan), (_, compile_ahead) = blocks
    monkeypatch.setattr("sys.argv", shlex.split(plan))
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 0
    assert "Recommended: batch" in capsys.readouterr().out
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(
            "Compiling for a TPU needs libtpu: pip install "
            '"keras-vit22b[tpu-check]".'
        )
    output = run(compile_ahead, tmp_path)
    assert "fits: " in output and "hidden" in output


@tensorflow_only
@runs("TensorFlow")
def test_tensorflow(blocks, tmp_path, free_port):
    output = run(write_script(blocks, tmp_path, free_port), tmp_path)
    found = re.findall(r"(\d) replicas: (.*)", output)
    assert sorted(number for number, _ in found) == ["2", "2", "4"]
    losses = [json.loads(logs.replace("'", '"'))["loss"] for _, logs in found]
    assert losses[1] == losses[2]
