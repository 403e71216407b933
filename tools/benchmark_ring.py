"""Count the transfers of one block's rings, and check its numbers.

    python tools/benchmark_ring.py --json results/ring.json

On simulated devices nothing overlaps, so this says nothing about speed. It
reports what the compiled program of a `ParallelBlock`, forward and backward,
sends, and how far its output and gradients are from those of one device, all
in float32. Which transfers a TPU hides is what `keras-vit22b compile` reports.

Each ring has a process of its own. Counts are of what runs, steps of loops
each for itself. Bytes are what one device sends, as `Transfer.bytes` in
keras_vit22b/planning/schedule.py. Errors are the largest difference, over the
largest value for relative ones; of weights, that of the worst one.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from keras_vit22b.planning.schedule import KINDS

# (batch, model): rings alone, and one with weights split over "batch".
MESHES = ((1, 4), (1, 8), (1, 16), (2, 4))
OVERLAPS = ("ring", "xla", "off")
HIDDEN_DIM, NUM_HEADS, MLP_DIM = 64, 16, 256
# An odd number of tokens, and chunks of two images, which rings halve.
TOKENS, IMAGES_PER_DEVICE = 5, 2


def expected(overlap, batch, model):
    """Return the transfers to expect, by kind, and the bytes of all.

    Let `n` devices be in a ring and a chunk be the tokens of one. A ring
    passes each chunk on `n - 1` times. Forward, halves go both ways, in and
    out of the heads: 4 transfers a step. Backward, into the heads, chunks go
    one way and two halves of a sum both ways; out of them, gradients go one
    way: 4 more. Without rings, chunks are gathered forward in and backward
    out, and sums scattered forward out and backward in. What a gather of the
    forward pass gave is kept.

    With FSDP both kernels are gathered over "batch", and their gradients
    exchanged. Gradients of norms and biases are all-reduced; into how many
    all-reduces is the compiler's choice.

    Returns:
        A dict from kind to count and an int, or `None` twice for "xla", where
        all is the compiler's choice.
    """
    if overlap == "xla":
        return None, None
    steps = model - 1
    chunk = 4 * IMAGES_PER_DEVICE * TOKENS * HIDDEN_DIM
    over_batch = 2 if batch > 1 else 0
    counts = dict.fromkeys(KINDS, 0)
    counts["all-gather"] = counts["all-to-all"] = over_batch
    del counts["all-reduce"]
    if overlap == "ring":
        counts["collective-permute"] = 8 * steps
        sent = 5 * chunk * steps
    else:
        counts["all-gather"] += 2
        counts["reduce-scatter"] = 2
        sent = 4 * chunk * steps
    kernels = 4 * HIDDEN_DIM * (4 * HIDDEN_DIM + 2 * MLP_DIM) / model
    sent += 2 * kernels * (batch - 1) / batch
    # The block's norm and bias; those of queries and keys; the MLP's bias.
    sent += all_reduced(2 * HIDDEN_DIM, batch * model)
    for devices in (batch, model):
        sent += all_reduced(2 * HIDDEN_DIM // NUM_HEADS, devices)
    sent += all_reduced(MLP_DIM // model, batch)
    return counts, round(sent)


def all_reduced(numbers, devices):
    """Return what a device sends to sum float32 numbers over devices."""
    return 2 * 4 * numbers * (devices - 1) / devices


def measure(batch, model):
    """Return the rows of one mesh; needs `batch * model` devices."""
    import jax
    import keras
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec

    from keras_vit22b.distribution import device_mesh
    from keras_vit22b.distribution.sharding import layout_map
    from keras_vit22b.layers import ParallelBlock
    from keras_vit22b.planning.schedule import read_schedule

    jax.config.update("jax_default_matmul_precision", "highest")
    generator = np.random.default_rng(0)
    shape = (IMAGES_PER_DEVICE * batch * model, TOKENS, HIDDEN_DIM)
    tokens, cotangent = generator.normal(size=(2, *shape)).astype("float32")

    def make():
        block = ParallelBlock(HIDDEN_DIM, NUM_HEADS, MLP_DIM, name="block_0")
        block.build(shape)
        return block

    def step(block):
        def run(weights, tokens, cotangent):
            def forward(weights, tokens):
                return block.stateless_call(weights, [], tokens)[0]

            output, pull_back = jax.vjp(forward, weights, tokens)
            return output, pull_back(cotangent)

        return run

    block = make()
    values = [
        generator.normal(0.1, 0.3, w.shape).astype("float32")
        for w in block.trainable_variables
    ]
    dense = jax.jit(step(block))(values, tokens, cotangent)

    rows = []
    for overlap in OVERLAPS:
        mesh = device_mesh(batch=batch, model=model, overlap=overlap)
        distribution = keras.distribution.ModelParallel(
            layout_map=layout_map(mesh, fsdp=True), batch_dim_name="batch"
        )
        with distribution.scope():
            block = make()
            layouts = [
                distribution.get_variable_layout(w).backend_layout
                for w in block.trainable_variables
            ]
            over_both = NamedSharding(
                mesh.backend_mesh, PartitionSpec(("batch", "model"))
            )
            arguments = jax.device_put(
                (values, tokens, cotangent), (layouts, over_both, over_both)
            )
            compiled = (
                jax.jit(
                    step(block),
                    out_shardings=(over_both, (layouts, over_both)),
                )
                .lower(*arguments)
                .compile()
            )
            found = compiled(*arguments)
        transfers = read_schedule(compiled.as_text(), model).transfers
        rows.append(
            make_row(overlap, batch, model, transfers, errors(found, dense))
        )
    return rows


def make_row(overlap, batch, model, transfers, found_errors):
    """Return what was found beside what was expected, as a dict."""
    counts = dict.fromkeys(KINDS, 0)
    for transfer in transfers:
        counts[transfer.kind] += transfer.count
    expected_counts, expected_bytes = expected(overlap, batch, model)
    return {
        "batch": batch,
        "model": model,
        "overlap": overlap,
        "counts": counts,
        "expected_counts": expected_counts,
        "bytes": sum(t.count * t.bytes for t in transfers),
        "expected_bytes": expected_bytes,
        "errors": found_errors,
    }


def errors(found, dense):
    """Return the largest absolute and relative errors of each result."""
    output, (weights, tokens) = found
    dense_output, (dense_weights, dense_tokens) = dense

    def worst(arrays, dense_arrays):
        pairs = [
            (np.abs(np.asarray(a) - b).max(), np.abs(b).max())
            for a, b in zip(arrays, map(np.asarray, dense_arrays))
        ]
        return {
            "absolute": max(float(error) for error, _ in pairs),
            "relative": max(float(error / size) for error, size in pairs),
        }

    return {
        "output": worst([output], [dense_output]),
        "input_gradient": worst([tokens], [dense_tokens]),
        "weight_gradients": worst(weights, dense_weights),
    }


def table(rows):
    """Return the rows as a table in Markdown."""
    heads = ["mesh", "overlap", *(f"{kind}s" for kind in KINDS), "kB"]
    heads += [name.replace("_", " ") for name in rows[0]["errors"]]
    lines = [
        f"| {' | '.join(heads)} |",
        "|---|---|" + "---:|" * (len(heads) - 2),
    ]
    for row in rows:
        wanted = row["expected_counts"] or {}
        cells = [f"({row['batch']}, {row['model']})", row["overlap"]]
        cells += [
            beside(row["counts"][kind], wanted.get(kind)) for kind in KINDS
        ]
        sent = row["expected_bytes"]
        cells.append(
            beside(f"{row['bytes'] / 1e3:.2f}", sent and f"{sent / 1e3:.2f}")
        )
        cells += [
            f"{e['absolute']:.0e}, {e['relative']:.0e}"
            for e in row["errors"].values()
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def beside(found, wanted):
    return f"{found} / {'-' if wanted is None else wanted}"


def run(batch, model):
    """Measure one mesh in a process of its own."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={batch * model}",
        # Collectives of simulated devices can hang when launched
        # asynchronously, or when all threads wait in different ones.
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        "NPROC": "64",
    }
    command = [sys.executable, __file__, "--task", f"{batch}x{model}"]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def mesh_shape(text):
    batch, _, model = text.partition("x")
    return int(batch), int(model)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mesh",
        type=mesh_shape,
        action="append",
        help="batch x model, such as 1x4; may be given several times",
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--task", type=mesh_shape, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(measure(*options.task)))
        return
    meshes = options.mesh or MESHES
    rows = [row for mesh in meshes for row in run(*mesh)]
    print(
        "Devices are simulated and nothing overlaps: counts and numerics, no "
        "speed.\nFound / expected, in one step of one block; errors are "
        "absolute, relative.\n"
    )
    print(table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
