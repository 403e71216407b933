"""Measure parallel against sequential blocks.

    python tools/compare_blocks.py --output docs

prints a table and writes compare_blocks.json. Four parts, each alike for both
kinds of block and in processes of its own:

- counts: parameters, norms, matmuls and their FLOPs of one block of the 22B,
  in its traced program, forward and backward;
- steps: seconds, and processor seconds of all threads, of a training step of a
  proxy, on JAX and TensorFlow. Both kinds take turns in one process, so that
  other work on the machine slows both;
- transfers: what one more block of the 22B adds to the training step compiled
  for a TPU slice: transfers, and the time predicted;
- proxies: loss on held-out digits after training alike, over seeds.

On two cores it took 13 minutes: counts and steps, when these were quiet, 3,
transfers 7, proxies 3. transfers needs libtpu.
"""

import argparse
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = ("parallel", "sequential")
BACKENDS = ("jax", "tensorflow")
PARTS = ("counts", "steps", "transfers", "proxies")

PRESET = "vit22b_patch14_224"
# As in compile_slices.py.
SLICE = {"topology": "v4:8x8x16", "batch": 128, "model": 8}
IMAGES_PER_CHIP = 32
# Blocks of the two steps that are compared.
MORE, FEWER = 3, 2

# Width and tokens of ViT-B. Attention pooling is left out, since it is the same
# work for both.
STEP_PROXY = {
    "image_shape": (224, 224, 3),
    "patch_size": 16,
    "num_layers": 4,
    "num_heads": 12,
    "hidden_dim": 768,
    "mlp_dim": 3072,
    "pooling": "mean",
}
STEP_BATCH, ROUNDS, WARM_UP = 4, 10, 2
CLOCKS = {
    "seconds": time.perf_counter,
    "processor_seconds": time.process_time,
}

# Small enough to train six times, on 16 tokens an image.
PROXY = {
    "image_shape": (8, 8, 1),
    "patch_size": 2,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 64,
    "mlp_dim": 256,
}
PROXY_STEPS, BATCH_SIZE, HELD_OUT = 200, 64, 400
SEEDS, LEARNING_RATE = 3, 1e-3


def count_blocks():
    """Return the counts of one block of the 22B, of each kind."""
    from keras_vit22b.models import VARIANTS

    variant = VARIANTS[PRESET]
    height, width, _ = variant.image_shape
    tokens = (height // variant.patch_size) * (width // variant.patch_size)
    sizes = (variant.hidden_dim, variant.num_heads, variant.mlp_dim)
    return {
        "preset": PRESET,
        "tokens": tokens,
        "blocks": {kind: count_block(kind, sizes, tokens) for kind in KINDS},
    }


def count_block(kind, sizes, tokens):
    """Count what one block has and does for one image.

    Args:
        kind: one of `KINDS`.
        sizes: tuple of int: width, heads and hidden units of the MLP.
        tokens: int.

    Returns:
        A dict of counts. A norm is an `rsqrt` of the traced forward pass, of
        tokens or of the heads' queries or keys. A matmul is a `dot_general`:
        those of attention, queries by keys and weights by values, have batch
        dimensions, and those by a kernel have none.
    """
    import jax

    from keras_vit22b.models.abstract import abstract_build
    from keras_vit22b.models.backbone import BLOCKS

    shape = (1, tokens, sizes[0])
    with abstract_build():
        block = BLOCKS[kind](*sizes)
        block.build(shape)

    def struct(shape):
        return jax.ShapeDtypeStruct(shape, "float32")

    def forward(weights, inputs):
        return block.stateless_call(weights, [], inputs)[0]

    def both_ways(weights, inputs):
        outputs, pull_back = jax.vjp(forward, weights, inputs)
        return outputs, pull_back(outputs)

    arguments = [struct(w.shape) for w in block.weights], struct(shape)
    program = list(equations(jax.make_jaxpr(forward)(*arguments)))
    norms = [
        len(e.invars[0].aval.shape)
        for e in program
        if e.primitive.name == "rsqrt"
    ]
    return {
        "parameters": sum(math.prod(w.shape) for w in block.weights),
        "kernel_parameters": sum(
            math.prod(w.shape) for w in block.weights if w.name == "kernel"
        ),
        "norms_of_tokens": norms.count(3),
        "norms_of_queries_and_keys": norms.count(4),
        "forward": count_matmuls(program),
        "forward_and_backward": count_matmuls(
            equations(jax.make_jaxpr(both_ways)(*arguments))
        ),
    }


def equations(jaxpr):
    """Yield the equations of a traced program, inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def count_matmuls(program):
    """Count the matmuls of equations, and their FLOPs."""
    counts = {"by_kernels": 0, "of_attention": 0, "flops": 0}
    for equation in program:
        if equation.primitive.name != "dot_general":
            continue
        (contracted, _), (batched, _) = equation.params["dimension_numbers"]
        counts["of_attention" if batched else "by_kernels"] += 1
        left, outputs = equation.invars[0].aval, equation.outvars[0].aval
        inner = math.prod(left.shape[axis] for axis in contracted)
        counts["flops"] += 2 * inner * math.prod(outputs.shape)
    return counts


def time_steps(proxy=STEP_PROXY, batch_size=STEP_BATCH, rounds=ROUNDS):
    """Time training steps of both kinds, in turns.

    Returns:
        A dict with, by clock, `"rounds"`, a list for each kind; `"median"`;
        and `"ratio"`, quartiles over rounds of sequential over parallel.
    """
    import keras
    import numpy as np

    from keras_vit22b import ViT22BBackbone
    from keras_vit22b import ViT22BImageClassifier

    load = os.getloadavg()
    generator = np.random.default_rng(0)
    images = generator.normal(size=(batch_size, *proxy["image_shape"]))
    images = images.astype("float32")
    labels = generator.integers(0, 10, batch_size)
    models = {}
    for kind in KINDS:
        backbone = ViT22BBackbone(**proxy, block=kind)
        models[kind] = ViT22BImageClassifier(backbone, 10, compile=False)
        models[kind].compile(
            keras.optimizers.AdamW(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    taken = take_turns(
        {
            kind: functools.partial(model.train_on_batch, images, labels)
            for kind, model in models.items()
        },
        rounds,
    )
    ratios = {
        clock: [b / a for a, b in zip(*values.values())]
        for clock, values in taken.items()
    }
    return {
        "proxy": proxy,
        "parameters": {k: m.count_params() for k, m in models.items()},
        "batch_size": batch_size,
        "optimizer": "AdamW",
        "jit_compile": models["parallel"].jit_compile,
        "rounds": taken,
        "median": {
            clock: {k: statistics.median(v) for k, v in values.items()}
            for clock, values in taken.items()
        },
        "ratio": {c: statistics.quantiles(v, n=4) for c, v in ratios.items()},
        "cores": os.cpu_count(),
        "load_before": load,
        "load_after": os.getloadavg(),
    }


def take_turns(steps, rounds):
    """Return what each step takes in each round, by clock and kind.

    Args:
        steps: dict from kind to function.
        rounds: int. After `WARM_UP` others, in which steps are compiled.
    """
    taken = {clock: {kind: [] for kind in steps} for clock in CLOCKS}
    for number in range(-WARM_UP, rounds):
        # Each goes first in half of the rounds.
        for kind in list(steps)[:: 1 if number % 2 else -1]:
            starts = [read() for read in CLOCKS.values()]
            steps[kind]()
            ends = [read() for read in CLOCKS.values()]
            if number >= 0:
                for clock, start, end in zip(CLOCKS, starts, ends):
                    taken[clock][kind].append(end - start)
        progress(f"Round {number + 1} of {rounds}")
    return taken


def write_preset(kind, folder):
    """Write the 22B's preset with blocks of a kind, and return its path."""
    path = pathlib.Path(folder) / PRESET
    shutil.copytree(ROOT / "presets" / PRESET, path)
    config = json.loads((path / "config.json").read_text())
    config["config"]["block"] = kind
    (path / "config.json").write_text(json.dumps(config))
    return path


def compile_step(kind, num_layers):
    """Compile a training step for the slice; return transfers and times."""
    from keras_vit22b.distribution import compile_for

    with tempfile.TemporaryDirectory() as folder:
        report = compile_for(
            preset=str(write_preset(kind, folder)),
            **SLICE,
            images_per_chip=IMAGES_PER_CHIP,
            num_layers=int(num_layers),
        )
    if not report.memory.fits:
        raise SystemExit(f"{kind}, {num_layers} blocks: {report}")
    times = report.times()
    waiting = times.pop("waiting")
    return {
        "summary": report.schedule.summary(),
        "waiting": waiting,
        "predicted_seconds": {
            "waiting": sum(waiting.values()),
            **{name: times[name] for name in ("step", "matmul", "compute")},
        },
        "compile_seconds": report.seconds["compile"],
    }


def measure_transfers():
    """Compile steps that differ by one block, and return the difference."""
    steps = {}
    for kind in KINDS:
        for layers in (MORE, FEWER):
            progress(f"Compiling {layers} {kind} blocks for a TPU slice")
            steps[kind, layers] = run("compile", kind, layers)
    record = {
        "preset": PRESET,
        **SLICE,
        "images_per_chip": IMAGES_PER_CHIP,
        "steps": [
            {"block": kind, "num_layers": layers, **step}
            for (kind, layers), step in steps.items()
        ],
        "a_block": {},
    }
    for kind in KINDS:
        more, fewer = steps[kind, MORE], steps[kind, FEWER]
        record["a_block"][kind] = {
            "transfers": subtract(more["summary"], fewer["summary"]),
            **{
                group: {
                    name: value - fewer[group].get(name, 0.0)
                    for name, value in more[group].items()
                }
                for group in ("predicted_seconds", "waiting")
            },
        }
    return record


def subtract(more, fewer):
    """Return what one summary of transfers has and another has not.

    Args:
        more: list of dict, of `Schedule.summary`.
        fewer: list of dict.

    Returns:
        A list of dict. Where `fewer` has more of a kind, counts are negative.
    """

    def numbers(rows):
        return {
            tuple(row[k] for k in ("cause", "phase", "kind", "status")): (
                row["count"],
                row["bytes"],
            )
            for row in rows
        }

    more, fewer = numbers(more), numbers(fewer)
    rows = []
    for key in sorted(more | fewer):
        pairs = zip(more.get(key, (0, 0)), fewer.get(key, (0, 0)))
        count, size = (a - b for a, b in pairs)
        if count or size:
            cause, phase, kind, status = key
            rows.append(
                {"cause": cause, "phase": phase, "kind": kind}
                | {"status": status, "count": count, "bytes": size}
            )
    return rows


def train_proxies(steps=PROXY_STEPS, seeds=SEEDS):
    """Train proxies that differ in block and seed alone.

    Returns:
        A dict with `"runs"` and, as mean and standard deviation over seeds,
        `"final_loss"` and `"training_loss"` by kind, and `"difference"`, of
        final losses from the same seed, sequential less parallel.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[..., None] / 8 - 1).astype("float32")
    runs = []
    for seed in range(seeds):
        for kind in KINDS:
            found = train_proxy(kind, seed, steps, images, digits.target)
            runs.append({"block": kind, "seed": seed, **found})
            progress(f"{kind}, seed {seed}: {found['final_loss']:.3f}")
    losses = {
        name: {k: [r[name] for r in runs if r["block"] == k] for k in KINDS}
        for name in ("final_loss", "training_loss")
    }
    parallel, sequential = losses["final_loss"].values()
    differences = [b - a for a, b in zip(parallel, sequential)]
    return {
        "data": f"scikit-learn's digits, {HELD_OUT} held out",
        "proxy": PROXY,
        "optimizer": "AdamW, cosine decay to zero",
        "learning_rate": LEARNING_RATE,
        "batch_size": BATCH_SIZE,
        "steps": steps,
        "runs": runs,
        **{
            name: {kind: mean_and_std(v) for kind, v in values.items()}
            for name, values in losses.items()
        },
        "difference": mean_and_std(differences),
    }


def train_proxy(kind, seed, steps, images, labels):
    """Train one proxy.

    Returns:
        A dict of its parameters and its losses: on held-out images before and
        after, and on as many that it was trained on.
    """
    import keras
    import numpy as np

    from keras_vit22b import ViT22BBackbone
    from keras_vit22b import ViT22BImageClassifier

    # The split is the same for all, the order the same for both kinds.
    split = np.random.default_rng(0).permutation(len(images))
    held, rest = split[:HELD_OUT], split[HELD_OUT:]
    generator = np.random.default_rng(seed)
    epochs = -(-steps * BATCH_SIZE // len(rest))
    order = np.concatenate([generator.permutation(rest) for _ in range(epochs)])
    order = order[: steps * BATCH_SIZE]

    keras.utils.set_random_seed(seed)
    model = ViT22BImageClassifier(
        ViT22BBackbone(**PROXY, block=kind), 10, compile=False
    )
    rate = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, steps)
    model.compile(
        keras.optimizers.AdamW(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    def loss(chosen):
        return float(
            model.evaluate(
                images[chosen], labels[chosen], batch_size=HELD_OUT, verbose=0
            )
        )

    initial = loss(held)
    model.fit(
        images[order],
        labels[order],
        batch_size=BATCH_SIZE,
        shuffle=False,
        verbose=0,
    )
    return {
        "parameters": model.count_params(),
        "initial_loss": initial,
        "final_loss": loss(held),
        "training_loss": loss(rest[:HELD_OUT]),
    }


def mean_and_std(values):
    return {"mean": statistics.mean(values), "std": statistics.stdev(values)}


TASKS = {
    "counts": count_blocks,
    "steps": time_steps,
    "compile": compile_step,
    "proxies": train_proxies,
}


def run(task, *arguments, backend="jax"):
    """Run one task in a process of its own and return its result."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, __file__, "--task", task, *map(str, arguments)]
    output = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def measure(part):
    """Return the record of one part."""
    start = time.perf_counter()
    if part == "steps":
        record = {
            "backends": {
                backend: run("steps", backend=backend) for backend in BACKENDS
            },
            "cpu": cpu_name(),
        }
    elif part == "transfers":
        record = measure_transfers()
    else:
        record = run(part)
    packages = {
        "counts": ("keras", "jax"),
        "steps": ("keras", "jax", "tensorflow"),
        "transfers": ("keras", "jax", "libtpu"),
        "proxies": ("keras", "jax", "scikit-learn"),
    }
    return {
        **record,
        "seconds_taken": time.perf_counter() - start,
        "versions": {p: importlib.metadata.version(p) for p in packages[part]},
    }


def cpu_name():
    """Return what Linux calls the processor, or `None`."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(": ")[2] for line in lines if "model name" in line]
    return names[0] if names else None


def progress(text):
    print(text, file=sys.stderr, flush=True)


def table(record):
    """Return what was measured as a table in Markdown."""
    lines = ["| | parallel | sequential |", "|---|---:|---:|"]

    def row(name, values):
        lines.append(f"| {name} | {' | '.join(values)} |")

    if "counts" in record:
        blocks = [record["counts"]["blocks"][kind] for kind in KINDS]

        def count(name, *keys, scale=1, form=","):
            values = []
            for value in blocks:
                for key in keys:
                    value = value[key]
                values.append(f"{value / scale if scale > 1 else value:{form}}")
            row(name, values)

        count("parameters a block", "parameters")
        count("norms of tokens a block", "norms_of_tokens")
        count("norms of queries and keys", "norms_of_queries_and_keys")
        for name, key in (
            ("forward", "forward"),
            ("forward and backward", "forward_and_backward"),
        ):
            count(f"matmuls by kernels, {name}", key, "by_kernels")
            count(f"matmuls of attention, {name}", key, "of_attention")
        count(
            "TFLOPs of matmuls an image, forward and backward",
            "forward_and_backward",
            "flops",
            scale=1e12,
            form=".3f",
        )
    if "steps" in record:
        for backend, steps in record["steps"]["backends"].items():
            for clock, (low, middle, high) in steps["ratio"].items():
                parallel, sequential = steps["median"][clock].values()
                row(
                    f"{clock.replace('_', ' ')} a step, {backend}",
                    [
                        f"{parallel:.2f}",
                        f"{sequential:.2f}; {middle:.2f} times ({low:.2f} to "
                        f"{high:.2f})",
                    ],
                )
    if "transfers" in record:
        blocks = [record["transfers"]["a_block"][kind] for kind in KINDS]
        keys = sorted(
            {(t["cause"], t["phase"]) for b in blocks for t in b["transfers"]},
            reverse=True,
        )
        for cause, phase in keys:
            row(
                f"{cause}, {phase}: transfers a block",
                [sent(b["transfers"], cause, phase) for b in blocks],
            )
        for name in ("step", "matmul", "compute", "waiting"):
            row(
                f"{name} a block, predicted for {SLICE['topology']}",
                [
                    f"{1e3 * b['predicted_seconds'][name]:.1f} ms"
                    for b in blocks
                ],
            )
    if "proxies" in record:
        for name, key in (
            ("loss on held-out digits", "final_loss"),
            ("loss on digits trained on", "training_loss"),
        ):
            losses = record["proxies"][key].values()
            row(name, [f"{x['mean']:.3f} ± {x['std']:.3f}" for x in losses])
    return "\n".join(lines)


def sent(transfers, cause, phase):
    """Return count, bytes and how many are hidden, as one cell."""
    chosen = [
        t for t in transfers if (t["cause"], t["phase"]) == (cause, phase)
    ]
    count = sum(t["count"] for t in chosen)
    size = sum(t["bytes"] for t in chosen)
    hidden = sum(t["count"] for t in chosen if t["status"] == "hidden")
    return f"{count} ({hidden} hidden), {size / 1e6:,.1f} MB"


def parts(text):
    """Read parts from a command line."""
    chosen = text.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"expected some of {','.join(PARTS)}, got {','.join(unknown)}"
        )
    return chosen


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=pathlib.Path, default="results")
    parser.add_argument(
        "--only",
        type=parts,
        default=list(PARTS),
        help="some of %(default)s, with commas; the record keeps the others",
    )
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, *arguments = options.task
        if task == "compile":
            from keras_vit22b.planning.chips import set_environment

            set_environment()
        print(json.dumps(TASKS[task](*arguments)))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "compare_blocks.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    for part in options.only:
        progress(f"Measuring {part}")
        record[part] = measure(part)
        path.write_text(json.dumps(record, indent=2) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
