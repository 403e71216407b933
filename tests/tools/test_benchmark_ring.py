"""The tool that counts a ring's transfers finds the ones it expects."""

import json
import pathlib
import subprocess
import sys

import keras
import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "benchmark_ring.py"


@pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Rings are of the JAX backend."
)
def test_counts_bytes_and_numbers_are_the_expected_ones(tmp_path):
    command = [sys.executable, TOOL, "--mesh", "2x4"]
    command += ["--json", tmp_path / "ring.json"]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=1800
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert "no speed" in process.stdout
    rows = json.loads((tmp_path / "ring.json").read_text())
    assert [row["overlap"] for row in rows] == ["ring", "xla", "off"]
    for row in rows:
        assert all(e["relative"] < 1e-5 for e in row["errors"].values())
        if row["overlap"] != "xla":
            assert row["expected_counts"].items() <= row["counts"].items()
            assert row["bytes"] == row["expected_bytes"]
