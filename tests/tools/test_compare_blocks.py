"""The tool that compares blocks counts what it says it counts."""

import importlib.util
import json
import pathlib
import sys

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BBackbone

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "compare_blocks.py"
WIDTH, HEADS, HIDDEN, TOKENS = 12, 2, 48, 5
PROXY = {
    "image_shape": (8, 8, 1),
    "patch_size": 4,
    "num_layers": 1,
    "num_heads": HEADS,
    "hidden_dim": WIDTH,
    "mlp_dim": HIDDEN,
    "pooling": "mean",
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_blocks", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Programs are traced by JAX."
)
@pytest.mark.parametrize(
    "kind, norms, matmuls, vectors",
    [
        ("parallel", 1, 2, 2 * WIDTH + HIDDEN + 2 * WIDTH // HEADS),
        ("sequential", 2, 4, 4 * WIDTH + HIDDEN + 2 * WIDTH // HEADS),
    ],
)
def test_counts_of_a_block(tool, kind, norms, matmuls, vectors):
    counts = tool.count_block(kind, (WIDTH, HEADS, HIDDEN), TOKENS)
    kernels = 4 * WIDTH**2 + 2 * WIDTH * HIDDEN
    flops = 2 * TOKENS * kernels + 4 * TOKENS**2 * WIDTH
    assert counts == {
        "parameters": kernels + vectors,
        "kernel_parameters": kernels,
        "norms_of_tokens": norms,
        "norms_of_queries_and_keys": 2,
        "forward": {
            "by_kernels": matmuls,
            "of_attention": 2,
            "flops": flops,
        },
        # Each matmul has a gradient for each of its two factors.
        "forward_and_backward": {
            "by_kernels": 3 * matmuls,
            "of_attention": 6,
            "flops": 3 * flops,
        },
    }


@pytest.mark.any_backend
@pytest.mark.parametrize("kind", ["parallel", "sequential"])
def test_the_preset_that_is_compiled_differs_in_its_block(tool, kind, tmp_path):
    folder = tool.write_preset(kind, tmp_path)
    backbone = ViT22BBackbone.from_preset(
        str(folder), abstract=True, num_layers=1
    )
    assert backbone.block == kind
    assert backbone.hidden_dim == 6144


@pytest.mark.any_backend
def test_a_block_sends_what_one_more_adds(tool):
    def row(status, count, size, cause="ring"):
        keys = {"cause": cause, "phase": "forward", "kind": "all-gather"}
        return keys | {"status": status, "count": count, "bytes": size}

    more = [row("hidden", 9, 90), row("exposed", 1, 5), row("hidden", 2, 4, "")]
    fewer = [row("hidden", 6, 60), row("hidden", 2, 4, "")]
    found = tool.subtract(more, fewer)
    assert found == [row("exposed", 1, 5), row("hidden", 3, 30)]
    assert tool.subtract(fewer, more)[0]["count"] == -1
    assert tool.sent(found, "ring", "forward") == "4 (3 hidden), 0.0 MB"


@pytest.mark.any_backend
def test_kinds_take_turns_and_warm_up_is_not_timed(tool):
    called = []
    steps = {k: lambda k=k: called.append(k) for k in "ps"}
    taken = tool.take_turns(steps, rounds=2)
    assert list(taken) == ["seconds", "processor_seconds"]
    for values in taken.values():
        assert {k: len(v) for k, v in values.items()} == {"p": 2, "s": 2}
    # Four rounds, of which two warm up; each goes first in every other.
    assert "".join(called) == "spps" * 2


@pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="JAX compiles for longer."
)
def test_steps_of_both_kinds_are_timed(tool):
    found = tool.time_steps(PROXY, batch_size=2, rounds=2)
    for clock in tool.CLOCKS:
        low, middle, high = found["ratio"][clock]
        assert 0 < low <= middle <= high
    # A norm's scale and a second output bias.
    counts = found["parameters"]
    assert counts["sequential"] - counts["parallel"] == 2 * WIDTH


@pytest.mark.any_backend
def test_a_proxy_that_trains_longer_knows_its_digits_better(tool, monkeypatch):
    monkeypatch.setattr(tool, "PROXY", PROXY)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(500, 8, 8, 1)).astype("float32")
    labels = (images.mean((1, 2, 3)) > 0).astype("int32")
    found = tool.train_proxy("sequential", 0, 40, images, labels)
    assert found["final_loss"] < found["initial_loss"]
    assert found["training_loss"] < found["initial_loss"]


@pytest.mark.any_backend
def test_both_kinds_are_trained_from_each_seed(tool, monkeypatch):
    def train_proxy(kind, seed, steps, images, labels):
        assert steps == 7 and images.shape == (1797, 8, 8, 1)
        assert len(labels) == 1797
        loss = seed + (0.5 if kind == "sequential" else 0.25)
        return {"final_loss": loss, "training_loss": 0.0}

    monkeypatch.setattr(tool, "train_proxy", train_proxy)
    found = tool.train_proxies(steps=7, seeds=3)
    runs = [(run["seed"], run["block"]) for run in found["runs"]]
    assert runs == [(s, k) for s in range(3) for k in tool.KINDS]
    assert found["final_loss"]["sequential"] == {"mean": 1.5, "std": 1.0}
    assert found["difference"] == {"mean": 0.25, "std": 0.0}


@pytest.mark.any_backend
def test_a_part_measured_anew_leaves_the_others(
    tool, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "compare_blocks.json"
    losses = dict.fromkeys(tool.KINDS, {"mean": 0.25, "std": 0.5})
    proxies = {"final_loss": losses, "training_loss": losses}
    path.write_text(json.dumps({"proxies": proxies}))
    arguments = ["--only", "counts", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
    tool.main()
    printed = capsys.readouterr().out
    assert "| norms of tokens a block | 1 | 2 |" in printed
    assert "| 0.250 ± 0.500 | 0.250 ± 0.500 |" in printed
    record = json.loads(path.read_text())
    assert record["proxies"] == proxies
    assert record["counts"]["tokens"] == 256


@pytest.mark.any_backend
def test_an_unknown_part_is_refused_by_name(tool):
    with pytest.raises(Exception, match="counts,steps.*got speed"):
        tool.parts("counts,speed")
