"""Matmuls in rings give what the dense ones give, and gather no activations."""

import json

import keras
import pytest

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Rings are of the JAX backend."
)

# Both matmuls, a nonlinearity between them, and gradients by all three inputs.
SCRIPT = """
import json, os, re, sys

count, cases = json.loads(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_vit22b.distribution import device_mesh
from keras_vit22b.distribution import ring

jax.config.update("jax_default_matmul_precision", "highest")


def dense(x, into, out):
    y = jnp.tensordot(x, into, 1)
    z = jnp.tensordot(jnp.sin(y), out, out.ndim - 1)
    return jnp.mean(jnp.cos(z)), (y, z)


def with_gradients(function):
    return jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))


def run(
    batch, model, images=None, fsdp=False, flat=False, ring_matmuls=True,
    sum_in_ring=False,
):
    devices = jax.devices()[: batch * model]
    mesh = device_mesh(batch=batch, model=model, devices=devices).backend_mesh
    fsdp = "batch" if fsdp else None
    specs = [P(("batch", "model")), P(fsdp, "model"), P("model", fsdp)]
    images = images or 2 * batch * model
    shapes = [(images, 3, 16), (16, 2 * model, 8), (2 * model, 8, 16)]
    if flat:
        shapes[1:] = (16, 16 * model), (16 * model, 16)
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=s).astype("float32") for s in shapes]
    sharded = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, specs)
    ]

    def exchanged(x, into, out):
        options = {"mesh": mesh, "ring": ring_matmuls}
        # With FSDP the second kernel is gathered beside the first matmul.
        later = (out,) if fsdp else ()
        y, gathered = ring.all_gather_matmul(
            x,
            into,
            later,
            kernel_spec=specs[1],
            later_specs=(specs[2],) * len(later),
            sum_in_ring=sum_in_ring,
            **options,
        )
        z = ring.matmul_reduce_scatter(
            jnp.sin(y),
            *(gathered or (out,)),
            kernel_spec=specs[2],
            gathered=bool(gathered),
            **options,
        )
        return jnp.mean(jnp.cos(z)), (y, z)

    compiled = with_gradients(exchanged).lower(*sharded).compile()
    ours = jax.tree.leaves(compiled(*sharded))
    text = compiled.as_text()
    return {
        "errors": [
            # The loss is a mean of numbers around one, and may be near zero.
            float(np.abs(a - b).max() / (np.abs(b).max() if b.ndim else 1))
            for a, b in zip(
                map(np.asarray, ours),
                jax.tree.leaves(with_gradients(dense)(*arrays)),
            )
        ],
        "shards": [a.sharding.shard_shape(a.shape) for a in ours[1:3]],
        "wanted_shards": [
            [images // batch, 3, *((16,) if flat else (2, 8))],
            [images // (batch * model), 3, 16],
        ],
        "permutes": len(re.findall(" collective-permute\\(", text)),
        "gathers": len(re.findall(" all-gather\\(", text)),
    }


print(json.dumps([run(**case) for case in cases]))
"""


@pytest.fixture(scope="module")
def run(run_on_eight_devices):
    """Run both matmuls on meshes and as dense ones; compare."""

    def run(cases, devices=8):
        return run_on_eight_devices(SCRIPT, json.dumps([devices, cases]))

    return run


def assert_equals_dense(result):
    assert max(result["errors"]) < 1e-5
    assert result["shards"] == result["wanted_shards"]


def test_ring_matmuls_equal_dense_ones_and_so_do_gradients(run):
    cases = [
        {"batch": 1, "model": 4},
        {"batch": 1, "model": 8},
        {"batch": 2, "model": 4, "fsdp": True},
        {"batch": 4, "model": 2, "fsdp": True},
        {"batch": 8, "model": 1, "fsdp": True},
        {"batch": 2, "model": 4, "fsdp": True, "sum_in_ring": True},
        {"batch": 4, "model": 2, "fsdp": True, "sum_in_ring": True},
        {"batch": 2, "model": 4, "flat": True, "fsdp": True},
        # One image a device is not halved, and three unevenly.
        {"batch": 2, "model": 4, "images": 8},
        {"batch": 2, "model": 4, "images": 24},
        {"batch": 2, "model": 4, "ring_matmuls": False, "fsdp": True},
    ]
    for result in run(cases):
        assert_equals_dense(result)


def test_a_ring_of_sixteen_equals_dense(run):
    (result,) = run([{"batch": 1, "model": 16}], devices=16)
    assert_equals_dense(result)


def test_rings_send_chunks_and_gather_nothing(run):
    mesh = {"batch": 1, "model": 8}
    ring, baseline = run([mesh, {**mesh, "ring_matmuls": False}])
    # Forward two halves each; backward x, two halves of dx, and dz.
    assert ring["permutes"] == 2 + 2 + (1 + 2) + 1
    assert ring["gathers"] == 0
    assert baseline["permutes"] == 0
    assert baseline["gathers"] > 0
