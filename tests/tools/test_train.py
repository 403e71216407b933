"""tools/train.py gives one loss curve on any devices, killed or not."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import kill_training  # noqa: E402
import train as tool  # noqa: E402

jax_only = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Of the JAX backend."
)
tensorflow_only = pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="Of the TensorFlow backend."
)


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preset") / "start"
    # On TensorFlow each replica drops units of its own.
    kill_training.make_preset(folder, dropout=0.0)
    return folder


def losses(folder):
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [r["loss"] for r in records if "loss" in r]


def run(preset, output, *options, settings=(), devices=1, env=None):
    """Run some steps in a process of its own; return it and the folder."""
    command = kill_training.command(preset, output, "total_steps=16", *settings)
    process = subprocess.Popen(
        [*command, "--validation=0", *options],
        env=kill_training.environment(devices) | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process


def curve(*args, **options):
    process = run(*args, **options)
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-3000:]
    assert not out
    return losses(args[1])


@jax_only
def test_meshes_give_the_curve_of_one_device(preset, tmp_path):
    one = curve(preset, tmp_path / "one")
    assert len(one) == 16 and one[-1] < one[0] - 0.01
    for name, options in (
        ("data", ["--data-parallel"]),
        ("mesh", ["--batch=2", "--model=4", "--fsdp"]),
    ):
        found = curve(preset, tmp_path / name, *options, devices=8)
        np.testing.assert_allclose(found, one, atol=1e-4)
    # A run on a mesh goes on, on one device.
    for step in ("12", "16"):
        shutil.rmtree(tmp_path / "mesh" / "checkpoints" / step)
    found = curve(preset, tmp_path / "mesh")
    np.testing.assert_allclose(found, one, atol=1e-4)
    # The record is a preset, with the recipe beside the weights.
    preset = tmp_path / "mesh" / "preset"
    assert {p.name for p in preset.iterdir()} > {
        "recipe.json",
        "model.safetensors",
    }


@jax_only
def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    """The tool also kills runs on one device and on eight."""
    result = kill_training.compare(
        "two processes", 1, tmp_path, seed=os.getpid(), steps=16
    )
    assert result["killed_after"][0] < result["lines"]
    assert result["weights"] and result["log"]


@tensorflow_only
def test_strategies_give_the_curve_of_one_device(preset, tmp_path, free_port):
    # Between workers there is no bfloat16, which Adafactor would have.
    settings = ["optimizer=adamw"]
    one = curve(preset, tmp_path / "one", settings=settings)
    found = curve(
        preset,
        tmp_path / "mirrored",
        "--data-parallel",
        "--cpus=2",
        settings=settings,
    )
    np.testing.assert_allclose(found, one, atol=1e-4)
    workers = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    processes = [
        run(
            preset,
            tmp_path / "workers",
            "--data-parallel",
            settings=settings,
            env={
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": workers,
                        "task": {"type": "worker", "index": index},
                    }
                )
            },
        )
        for index in range(2)
    ]
    kill_training.finish(processes)
    np.testing.assert_allclose(losses(tmp_path / "workers"), one, atol=1e-4)


@tensorflow_only
def test_accumulation_is_refused_under_a_strategy(preset, tmp_path):
    command = kill_training.command(
        preset, tmp_path / "b", "accumulation_steps=2"
    )
    done = subprocess.run(
        [*command, "--data-parallel", "--cpus=2"],
        env=kill_training.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "error: gradient_accumulation_steps=2 fails" in done.stderr


@pytest.mark.any_backend
def test_wrong_options_are_errors(capsys):
    for options, message in (
        (["--batch", "2"], "both --batch and --model"),
        (["--cool-down", "5"], "needs --start"),
        (["--validation", "1"], "below 1"),
    ):
        with pytest.raises(SystemExit):
            tool.parse_arguments(["--data", "x", "--output", "y", *options])
        assert message in capsys.readouterr().err
    options = tool.parse_arguments(
        ["--data", "x", "--output", "y", "--recipe", "nothing"]
    )
    with pytest.raises(ValueError, match="proxy or a folder"):
        tool.make_recipe(options, 0)
