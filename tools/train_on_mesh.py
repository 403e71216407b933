"""Train a proxy on a mesh and on one device, and compare the losses.

    python tools/train_on_mesh.py --output docs

50 `fit` steps of AdamW on scikit-learn's digits, in float32 with the highest
precision of matmuls: on one device, and on a (2, 4) mesh of 8 simulated devices
with FSDP and rings, from the same seed and in the same order. Each run has a
process of its own. Writes mesh_loss.json and mesh_loss.png, and prints a line.

The proxy is the smallest of the package's table with four heads instead of
two, since heads divide over the "model" axis.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

BATCH, MODEL = 2, 4
STEPS = 50
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
SEED = 0
VARIANT, NUM_HEADS = "vit250k_patch7_28", 4
PACKAGES = ("keras-vit22b", "keras", "jax", "numpy", "scikit-learn")


def load_batches(steps):
    """Return images `(n, 28, 28, 1)` and labels `(n,)`, in training order."""
    from sklearn.datasets import load_digits

    from keras_vit22b import ViT22BImageConverter

    digits = load_digits()
    images = (digits.images[..., None] * (255 / 16)).astype("float32")
    images = np.asarray(ViT22BImageConverter((28, 28), channels=1)(images))
    generator = np.random.default_rng(SEED)
    epochs = -(-steps * BATCH_SIZE // len(images))
    order = [generator.permutation(len(images)) for _ in range(epochs)]
    order = np.concatenate(order)[: steps * BATCH_SIZE]
    return images[order], digits.target[order]


def make_classifier():
    """Return a classifier of digits with random weights."""
    import keras

    from keras_vit22b import ViT22BBackbone
    from keras_vit22b import ViT22BImageClassifier
    from keras_vit22b.models import VARIANTS

    keras.utils.set_random_seed(SEED)
    config = {**VARIANTS[VARIANT].backbone_config(), "num_heads": NUM_HEADS}
    model = ViT22BImageClassifier(ViT22BBackbone(**config), 10)
    model.compile(keras.optimizers.AdamW(LEARNING_RATE))
    return model


def train(steps):
    """Return the trained model and the loss of each step."""
    from keras_vit22b.training import TrainingLog

    images, labels = load_batches(steps)
    model, log = make_classifier(), TrainingLog(every=1)
    model.fit(
        images,
        labels,
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
        callbacks=[log],
    )
    return model, [record["loss"] for record in log.records]


def count_transfers(model):
    """Return how often the step that `fit` ran does each kind of transfer."""
    import jax
    import keras

    from keras_vit22b.planning.schedule import read_schedule

    layout = keras.distribution.distribution().get_data_layout
    images, labels = load_batches(1)
    data = [
        jax.device_put(array, layout(array.shape).backend_layout)
        for array in (images, labels)
    ]
    state = [
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    ]
    step = jax.jit(model.train_step).lower(state, data).compile()
    counts = {}
    for transfer in read_schedule(step.as_text(), MODEL).transfers:
        counts[transfer.kind] = counts.get(transfer.kind, 0) + transfer.count
    return counts


def train_on_one_device(steps):
    model, losses = train(steps)
    return {"losses": losses, "parameters": model.count_params()}


def train_on_mesh(steps):
    import keras

    from keras_vit22b import ViT22BImageClassifier
    from keras_vit22b.distribution import device_mesh

    # "ring" is refused where a matmul could not run so.
    mesh = device_mesh(batch=BATCH, model=MODEL, overlap="ring")
    distribution = keras.distribution.ModelParallel(
        layout_map=ViT22BImageClassifier.get_layout_map(mesh, fsdp=True),
        batch_dim_name="batch",
    )
    with distribution.scope():
        model, losses = train(steps)
        return {"losses": losses, "transfers_a_step": count_transfers(model)}


def run(task, steps):
    """Run one task in a process of its own and return its result."""
    devices = BATCH * MODEL if task == "mesh" else 1
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        # Collectives of simulated devices can hang when launched
        # asynchronously, or when all threads wait in different ones.
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        "NPROC": "64",
    }
    command = [sys.executable, __file__, "--task", task, "--steps", str(steps)]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def plot(record, path):
    """Draw both curves, and below them their difference."""
    from matplotlib.figure import Figure

    one, mesh = (np.array(losses) for losses in record["losses"].values())
    difference = np.abs(mesh - one) / one
    steps = np.arange(1, len(one) + 1)
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (2, 1)}
    )
    above.plot(steps, one, color="#f0a050", linewidth=5, label="one device")
    above.plot(
        steps,
        mesh,
        color="#1a3a6a",
        linewidth=1.5,
        linestyle="--",
        label=f"({BATCH}, {MODEL}) mesh, FSDP, rings",
    )
    above.set_ylabel("loss")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    above.set_title(
        f"A proxy of {record['parameters']:,} parameters on scikit-learn's "
        "digits, float32"
    )
    # Where the losses are equal there is no point.
    shown = difference > 0
    below.semilogy(
        steps[shown], difference[shown], "o", color="#1a3a6a", markersize=4
    )
    below.axhline(2**-23, color="gray", linewidth=1, linestyle=":")
    below.annotate(
        "float32's epsilon",
        (1, 2**-23),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        color="gray",
    )
    below.set_ylabel("relative difference")
    below.set_xlabel("step of fit")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def make_record(steps):
    one, mesh = run("one", steps), run("mesh", steps)
    differences = np.abs(np.subtract(mesh["losses"], one["losses"]))
    return {
        "model": f"{VARIANT} with {NUM_HEADS} heads",
        "parameters": one["parameters"],
        "data": "scikit-learn's digits, resized to 28 x 28",
        "optimizer": f"AdamW, learning rate {LEARNING_RATE}",
        "batch_size": BATCH_SIZE,
        "seed": SEED,
        "mesh": {"batch": BATCH, "model": MODEL},
        "fsdp": True,
        "overlap": "ring",
        "transfers_a_step": mesh["transfers_a_step"],
        "losses": {"one device": one["losses"], "mesh": mesh["losses"]},
        "largest_difference": float(differences.max()),
        "largest_relative_difference": float(
            (differences / one["losses"]).max()
        ),
        "versions": {p: importlib.metadata.version(p) for p in PACKAGES},
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=pathlib.Path, default="results")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
        task = {"one": train_on_one_device, "mesh": train_on_mesh}[options.task]
        print(json.dumps(task(options.steps)))
        return
    record = make_record(options.steps)
    if not record["transfers_a_step"].get("collective-permute"):
        raise SystemExit("The step on the mesh held no ring.")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "mesh_loss.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    plot(record, options.output / "mesh_loss.png")
    losses = record["losses"]["one device"]
    print(
        f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}: the "
        f"({BATCH}, {MODEL}) mesh differs from one device by at most "
        f"{record['largest_relative_difference']:.1e} of the loss; transfers "
        f"a step: {record['transfers_a_step']}"
    )


if __name__ == "__main__":
    main()
