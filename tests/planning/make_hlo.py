"""Make the HLO texts in tests/planning/hlo, by compiling for TPU slices.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 KERAS_BACKEND=jax \
        python tests/planning/make_hlo.py

Made with jax 0.10.2 and libtpu 0.0.42.1.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_vit22b.distribution.mesh import device_mesh
from keras_vit22b.planning.chips import Slice

FOLDER = pathlib.Path(__file__).parent / "hlo"
# What a schedule asks the place in the model of.
PLACED = re.compile(r" (fusion|while|all-|reduce-|collective-)\S*\(")
TOKENS, WIDTH, HEADS, OUT = 64, 256, 8, 128


def main():
    ring("v4:2x2x2")
    gathered_weights("v4:2x2x2", "v4_synchronous_gather")
    gathered_weights("v5e:2x4", "v5e_fused_gather")
    gathered_beside_a_ring("v5e:2x4", "v5e_gather_through_loop")


def ring(topology):
    """A block's first matmul as a ring, with its gradient."""
    mesh = device_mesh(
        batch=2, model=4, devices=Slice.from_name(topology).devices()
    )

    def loss(x, kernel):
        with jax.named_scope("block_3/in_projection"):
            y = mesh.all_gather_matmul(x, kernel, (None, "model", None))
        return (y.astype("float32") ** 2).sum()

    save(
        "v4_ring",
        jax.grad(loss, argnums=(0, 1)),
        struct(mesh, (16, TOKENS, WIDTH), ("batch", "model")),
        struct(mesh, (WIDTH, HEADS, OUT), None, "model"),
    )


def gathered_weights(topology, name):
    """A chain of matmuls, each with a weight that is gathered first."""
    mesh = device_mesh(
        batch=4, model=2, devices=Slice.from_name(topology).devices()
    )

    def forward(x, *kernels):
        for index, kernel in enumerate(kernels):
            with jax.named_scope(f"jvp(model)/block_{index}/in_projection"):
                kernel = jax.lax.all_gather(kernel, "batch", tiled=True)
                x = jnp.tanh(x @ kernel)
        return x

    save(
        name,
        jax.shard_map(
            forward,
            mesh=mesh.backend_mesh,
            in_specs=(P("batch"), *[P("batch")] * 3),
            out_specs=P("batch"),
        ),
        struct(mesh, (8192, 1024), "batch"),
        *[struct(mesh, (1024, 1024), "batch")] * 3,
    )


def gathered_beside_a_ring(topology, name):
    """A loop of matmuls, and a weight for what comes after it."""
    mesh = device_mesh(
        batch=2, model=4, devices=Slice.from_name(topology).devices()
    )

    def forward(x, kernel, last):
        with jax.named_scope("jvp(model)/block_0/in_projection"):
            x = mesh.all_gather_matmul(x, kernel, (None, "model", None))
        with jax.named_scope("jvp(model)/block_0/out_projection"):
            return mesh.matmul_reduce_scatter(x, last, ("model", None, "batch"))

    save(
        name,
        forward,
        struct(mesh, (64, 64, 1024), ("batch", "model")),
        struct(mesh, (1024, 8, 1024), None, "model"),
        struct(mesh, (8, 1024, 1024), "model", None, "batch"),
    )


def struct(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(
        shape, "bfloat16", sharding=NamedSharding(mesh.backend_mesh, P(*spec))
    )


def save(name, function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    header, _, rest = text.partition("\n")
    # Tables of source lines, and settings that no schedule needs.
    body = rest[re.search(r"^(%|ENTRY )", rest, re.MULTILINE).start() :]
    body = re.sub(r" stack_frame_id=\d+", "", body)
    body = re.sub(
        r", backend_config=\{.*$",
        keep_cycles,
        body,
        flags=re.MULTILINE,
    )
    lines = [
        line if PLACED.search(line) else re.sub(r", metadata=\{.*?\}", "", line)
        for line in body.splitlines()
    ]
    body = "\n".join(lines) + "\n"
    (FOLDER / f"{name}.txt").write_text(f"{header}\n\n{body}")


def keep_cycles(match):
    cycles = re.search(r'"estimated_cycles":"\d+"', match[0])
    return f", backend_config={{{cycles[0]}}}" if cycles else ""


if __name__ == "__main__":
    main()
