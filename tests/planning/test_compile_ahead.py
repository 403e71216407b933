"""`fit`'s own step, compiled for TPU slices that are not there."""

import importlib.util
import json
import os
import subprocess
import sys

import keras
import pytest

from keras_vit22b import cli
from keras_vit22b.planning import chips
from keras_vit22b.planning.compile_ahead import Memory
from keras_vit22b.planning.compile_ahead import out_of_memory

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Only JAX compiles for TPUs."
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='The TPU compiler is missing: pip install "keras-vit22b[tpu-check]"',
)


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """A backbone whose matmuls are worth a transfer, without weights."""
    from keras_vit22b import ViT22BBackbone
    from keras_vit22b.models.abstract import abstract_build
    from keras_vit22b.weights import preset_config

    with abstract_build():
        backbone = ViT22BBackbone(
            (32, 32, 3),
            8,
            num_layers=2,
            num_heads=4,
            hidden_dim=256,
            mlp_dim=1024,
        )
    folder = tmp_path_factory.mktemp("preset")
    for name, content in backbone._preset_json().items():
        preset_config.write_json(folder / name, content)
    return folder


def compile_step(preset, *options):
    """Run the command in a process of its own; return its report."""
    command = [sys.executable, "-m", "keras_vit22b.cli", "compile", preset]
    process = subprocess.run(
        [*map(str, (*command, *options)), "--json"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout[process.stdout.index("{") :])


@needs_libtpu
@pytest.mark.parametrize(
    "topology, batch",
    [
        ("v4:2x2x2", 2),
        # Its rings follow a snake.
        ("v5e:4x8", 8),
    ],
)
def test_a_step_compiles_with_its_rings_hidden(
    topology, batch, preset, tmp_path
):
    image = tmp_path / "block.png"
    report = compile_step(
        preset,
        *("--topology", topology, "--batch", batch, "--model", 4),
        *("--images-per-chip", 16, "--plot", image),
    )
    assert report["chips"] == 4 * batch
    assert report["memory"]["fits"] is True
    rings = [t for t in report["transfers"] if t["cause"] == "ring"]
    assert {t["status"] for t in rings} == {"hidden"}
    assert {t["phase"] for t in rings} == {"forward", "backward"}
    assert {t["block"] for t in rings} == {0, 1}
    # What goes round a ring is known: a chip sends 3 of 4 parts of T x d
    # numbers in each of 2 gathers or scatters forward, 4 backward, a block.
    sent = 2 * (16 * 8 // 2) * 16 * 256 * 3 // 4
    for phase, times in (("forward", 2), ("backward", 4)):
        total = sum(
            t["count"] * t["bytes"] for t in rings if t["phase"] == phase
        )
        assert total == 2 * times * sent
    gathers = [t for t in report["transfers"] if t["cause"] == "weight gather"]
    assert {t["block"] for t in gathers} == {0, 1, None}  # And the pooling.
    assert {t["axis"] for t in gathers} == {"batch"}
    permutes = [
        t for t in report["transfers"] if t["kind"] == "collective-permute"
    ]
    assert "synchronous" not in {t["status"] for t in permutes}
    # Weights and two slots of AdamW in float32, by the sharding table.
    assert report["memory"]["arguments"] > 3 * 4 * 12 * 2 * 256**2 / (4 * batch)
    assert report["times"]["step"] > report["times"]["matmul"] > 0
    assert image.read_bytes()[:4] == b"\x89PNG"


@needs_libtpu
def test_what_does_not_fit_is_an_answer(preset):
    report = compile_step(
        preset,
        *("--topology", "v5e:2x4", "--batch", 8, "--model", 1),
        *("--images-per-chip", 1, "--num-layers", 1, "--no-fsdp"),
        *("--num-classes", 10_000_000),
    )
    memory = Memory(**report["memory"])
    assert memory.fits is False
    assert memory.needed > memory.available == 15.75 * 2**30
    assert "transfers" not in report


def test_the_compilers_numbers_are_read():
    memory = out_of_memory(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (300.00G) exceeds available HBM (30.75G)."
    )
    assert memory.needed == 300 * 2**30
    assert memory.available == 30.75 * 2**30
    assert out_of_memory("RESOURCE_EXHAUSTED: other words").needed is None


def test_a_mesh_that_is_not_the_slice_is_an_error(monkeypatch, capsys):
    arguments = "compile vit6m_patch16_224 --topology v4:2x2x2"
    arguments += " --batch 2 --model 2 --images-per-chip 1"
    monkeypatch.setattr("os.environ", {**os.environ})
    monkeypatch.setattr("sys.argv", ["keras-vit22b", *arguments.split()])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 1
    assert (
        "there are 8, for which (batch, model) can be"
        in capsys.readouterr().err
    )


def test_without_the_compiler_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install .*tpu-check"):
        chips.check_libtpu()
