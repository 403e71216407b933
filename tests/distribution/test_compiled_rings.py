"""The TPU compiler itself puts each transfer of a ring beside a matmul."""

import importlib.util
import re

import keras
import pytest

from keras_vit22b.planning.schedule import read_schedule

pytestmark = [
    pytest.mark.skipif(
        keras.config.backend() != "jax", reason="Rings are of the JAX backend."
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="Compiling for a TPU needs libtpu: pip install libtpu.",
    ),
]

# Two recomputed blocks and their gradients, for a slice that is not there.
SCRIPT = """
import json, sys

topology, batch, model = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import jax
import keras
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_vit22b.distribution import device_mesh
from keras_vit22b.distribution.sharding import layout_map
from keras_vit22b.layers import ParallelBlock
from keras_vit22b.models.abstract import abstract_build
from keras_vit22b.planning.chips import Slice

devices = Slice.from_name(topology).devices()
mesh = device_mesh(batch=batch, model=model, overlap="ring", devices=devices)
distribution = keras.distribution.ModelParallel(
    layout_map=layout_map(mesh, fsdp=True), batch_dim_name="batch"
)
keras.distribution.set_distribution(distribution)
with abstract_build():
    blocks = [
        ParallelBlock(
            1024, 8, 4096, remat=True, dtype="mixed_bfloat16", name=f"block_{i}"
        )
        for i in range(2)
    ]
    for block in blocks:
        block.build((None, 256, 1024))


def struct(shape, dtype, sharding):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


weights = [
    [
        struct(
            w.shape, w.dtype,
            distribution.get_variable_layout(w).backend_layout,
        )
        for w in block.trainable_variables
    ]
    for block in blocks
]
tokens = struct(
    (16 * batch * model, 256, 1024),
    "bfloat16",
    NamedSharding(mesh.backend_mesh, P(("batch", "model"))),
)


def loss(weights, x):
    for block, values in zip(blocks, weights):
        x, _ = block.stateless_call(values, [], x)
    return x.astype("float32").sum()


step = jax.jit(jax.grad(loss, (0, 1))).lower(weights, tokens)
compiled = step.compile(compiler_options=mesh.compiler_options)
print(json.dumps(compiled.as_text()))
"""


def computations(text):
    """Return `{name: lines}` of a module; lines are in the order of issue."""
    found = {}
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line)
        if head:
            lines = found[head[1]] = []
        elif line.startswith("  "):
            lines.append(line)
    return found


def multiplies(line, module):
    """Whether an instruction, or what it calls, is a matmul."""
    called = re.findall(r"(?:calls|body)=%([\w.\-]+)", line)
    return " convolution(" in line or any(
        multiplies(inner, module) for name in called for inner in module[name]
    )


def transfers(text):
    """Return for each permute the matmuls issued while it is under way.

    A synchronous one has none.
    """
    module, found = computations(text), []
    for lines in module.values():
        under_way = {}
        for line in lines:
            start = re.match(r"\s+%(\S+) = .* collective-permute-start\(", line)
            done = re.search(r" collective-permute-done\(%([\w.\-]+)\)", line)
            if start:
                under_way[start[1]] = 0
            elif done:
                found.append(under_way.pop(done[1]))
            elif " collective-permute(" in line:
                found.append(0)
            elif multiplies(line, module):
                under_way = {name: n + 1 for name, n in under_way.items()}
        assert not under_way
    return found


@pytest.mark.parametrize(
    "topology, batch, model, gradients",
    [
        ("v4:2x2x2", 2, 4, "all-to-all"),
        # Where rings that follow no links are synchronous, and no all-to-all
        # is asynchronous.
        ("v5e:4x8", 4, 8, None),
    ],
)
def test_no_transfer_waits(
    run_on_eight_devices, topology, batch, model, gradients
):
    text = run_on_eight_devices(SCRIPT, topology, batch, model)
    found = transfers(text)
    # Forward of the first block, whose output the second needs; and both
    # backward, with the way in once more.
    assert len(found) == (2 + 2) + 2 * (2 + 1 + 1 + 2)
    assert min(found) > 0
    schedule = read_schedule(text, model).transfers
    gathers = [t.status for t in schedule if t.cause == "weight gather"]
    # Two kernels of the first block forward and of both backward. The very
    # first has no matmul before it.
    assert len(gathers) == 6
    assert set(gathers[1:]) == {"hidden"}
    if gradients:
        # The kernels' own; those of biases and norms are small.
        statuses = [t.status for t in schedule if t.kind == gradients]
        assert len(statuses) == 4
        assert "synchronous" not in statuses
