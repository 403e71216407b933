"""The command line, `keras-vit22b`: one verb a room."""

import contextlib
import json
import logging
import os
import sys
import time
from typing import Annotated

import typer

from keras_vit22b import __version__

DEFAULT_PRESET = "vit1500k_patch7_28_fashion_glyphs"

app = typer.Typer(
    help="ViT-22B as a Keras 3 model package.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main():
    """Run the command line; a bad input prints one line and exits with 1."""
    logging.getLogger("keras_vit22b").addHandler(logging.StreamHandler())
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)


def _print_version(asked):
    if asked:
        typer.echo(f"keras-vit22b {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[
        bool, typer.Option(help="Log what is converted and cast.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
):
    if verbose:
        logging.getLogger("keras_vit22b").setLevel(logging.INFO)


@app.command()
def presets(as_json: Json = False):
    """List the built-in presets."""
    with _quiet_import():
        from keras_vit22b.weights.preset_files import builtin_presets
    rows = builtin_presets()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    typer.echo(f"{'preset':<{width}}  {'parameters':>14}  weights")
    for name, row in rows.items():
        ships = "ship" if row["has_weights"] else "-"
        typer.echo(f"{name:<{width}}  {row['parameter_count']:>14,}  {ships}")


@app.command()
def info(
    name: Annotated[str, typer.Argument(help="Preset name or folder.")],
    as_json: Json = False,
):
    """Show a preset's parameters, bytes, FLOPs and tokens."""
    with _quiet_import():
        from keras_vit22b.models import ViT22BBackbone
        from keras_vit22b.models.size import describe_size
    backbone = ViT22BBackbone.from_preset(name, abstract=True)
    size = {"preset": name, **describe_size(backbone)}
    if as_json:
        typer.echo(json.dumps(size, indent=2))
        return
    typer.echo(f"{name}: {size['tokens']:,} tokens an image")
    for title in ("parameters", "bytes", "flops_per_image"):
        typer.echo(title.replace("_", " "))
        for part, value in size[title].items():
            typer.echo(f"  {part:<16} {value:>22,}")


@app.command()
def inspect(
    name: Annotated[str, typer.Argument(help="Preset, folder or hf://...")],
    as_json: Json = False,
):
    """List a preset's tensors from the headers alone."""
    with _quiet_import():
        from keras_vit22b.weights.preset_files import open_preset
        from keras_vit22b.weights.verification import list_tensors
    with open_preset(name) as folder:
        rows = list_tensors(folder)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        typer.echo(
            f"{row['name']:<{width}}  {row['dtype']:<10} {shape:<20} "
            f"{row['bytes']:>14,}  {row['file']}"
        )


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="Preset, folder or hf://...")],
    as_json: Json = False,
):
    """Check a preset's JSON, tensors, index and hashes."""
    with _quiet_import():
        from keras_vit22b.weights.verification import verify_preset
    report = verify_preset(name)
    if as_json:
        typer.echo(json.dumps(report))
        return
    typer.echo(
        f"{name} is sound: {report['tensors']:,} tensors, "
        f"{report['bytes']:,} bytes in {report['files']} files."
    )


@app.command()
def pull(
    handle: Annotated[str, typer.Argument(help="hf://org/name[@revision]")],
    revision: Annotated[str | None, typer.Option()] = None,
    as_json: Json = False,
):
    """Bring a preset from the Hub into the local cache, checked."""
    with _quiet_import():
        from keras_vit22b.weights.hub import open_hub_preset
    with open_hub_preset(handle, revision=revision) as folder:
        folder.fetch_all()
        result = {"source": folder.source, "folder": str(folder.path)}
    typer.echo(json.dumps(result) if as_json else "\n".join(result.values()))


@app.command()
def push(
    folder: Annotated[str, typer.Argument(help="Preset folder.")],
    repository: Annotated[str, typer.Argument(help="org/name")],
    private: Annotated[bool | None, typer.Option("--private/--public")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    create_pr: Annotated[
        bool, typer.Option(help="Open a pull request instead.")
    ] = False,
    card: Annotated[
        str | None,
        typer.Option(
            help="JSON file of what the card says: license, training_data, "
            "limits, metrics."
        ),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(help="probe.json of this folder, for the card's metrics."),
    ] = None,
    as_json: Json = False,
):
    """Upload a preset folder to the Hub; the token is the one logged in."""
    with _quiet_import():
        from keras_vit22b.weights.push import push_to_hub
    stated = _read_json(card) if card else {}
    if probe:
        stated["metrics"] = stated.get("metrics", []) + _metrics(probe, folder)
    source = push_to_hub(
        folder,
        repository,
        private=private,
        revision=revision,
        message=message,
        create_pr=create_pr,
        card=stated,
    )
    typer.echo(json.dumps({"source": source}) if as_json else source)


def _read_json(path):
    with open(path, encoding="utf-8") as file:
        value = json.load(file)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return value


def _metrics(path, folder):
    """Return the metrics of a probe's record, which must be of a folder."""
    with _quiet_import():
        from keras_vit22b.probing import card_metrics
    record = _read_json(path)
    metrics = card_metrics(record)
    if os.path.realpath(record["preset"]) != os.path.realpath(folder):
        raise ValueError(f"{path} is of {record['preset']!r}, not of {folder}.")
    return metrics


@app.command("compile")
def compile_command(
    preset: Annotated[str, typer.Argument(help="Preset name or folder.")],
    topology: Annotated[str, typer.Option(help="Such as v4:8x8x16.")],
    batch: Annotated[int, typer.Option(help="Size of the axis batch.")],
    model: Annotated[int, typer.Option(help="Size of the axis model.")],
    images_per_chip: Annotated[int, typer.Option()],
    num_layers: Annotated[
        int | None, typer.Option(help="Blocks, if not the preset's.")
    ] = None,
    num_classes: Annotated[int, typer.Option(help="Of the head.")] = 1000,
    fsdp: Annotated[
        bool, typer.Option(help="Shard weights over batch too.")
    ] = True,
    optimizer: Annotated[str, typer.Option()] = "adamw",
    overlap: Annotated[
        str, typer.Option(help="auto, ring, xla or off.")
    ] = "auto",
    remat: Annotated[
        bool, typer.Option(help="Recompute blocks in the backward pass.")
    ] = True,
    plot: Annotated[
        str | None, typer.Option(help="PNG of one block's schedule.")
    ] = None,
    as_json: Json = False,
):
    """Compile a training step for a TPU slice that is not there."""
    from keras_vit22b.planning.chips import set_environment

    set_environment()
    folder = os.path.dirname(plot or "")
    if folder and not os.path.isdir(folder):
        # Compiling may take long, so before it.
        raise ValueError(f"There is no folder {folder} for --plot {plot}.")
    with _quiet_import():
        from keras_vit22b.planning.compile_ahead import compile_for
    report = compile_for(
        topology,
        preset,
        batch=batch,
        model=model,
        images_per_chip=images_per_chip,
        num_layers=num_layers,
        num_classes=num_classes,
        fsdp=fsdp,
        optimizer=optimizer,
        overlap=overlap,
        remat=remat,
    )
    typer.echo(report.to_json() if as_json else str(report))
    if plot is not None and report.schedule is not None:
        report.plot(plot, block=min(1, report.num_layers - 1))


@app.command()
def plan(
    preset: Annotated[str, typer.Argument(help="Preset name or folder.")],
    chips: Annotated[int, typer.Option()],
    kind: Annotated[str, typer.Option(help="v4, v5e, v5p, v6e, h100, h200.")],
    images: Annotated[int, typer.Option(help="A step, of all chips.")],
    num_classes: Annotated[int, typer.Option(help="Of the head.")] = 1000,
    remat: Annotated[
        bool, typer.Option(help="Recompute blocks in the backward pass.")
    ] = True,
    matmul_efficiency: Annotated[
        float, typer.Option(help="Part of the peak that matmuls reach.")
    ] = 0.75,
    as_json: Json = False,
):
    """List meshes for training, with memory, times and predicted MFU."""
    with _quiet_import():
        from keras_vit22b.planning.planner import plan as make_plan
    result = make_plan(
        preset,
        kind=kind,
        chips=chips,
        images=images,
        num_classes=num_classes,
        remat=remat,
        matmul_efficiency=matmul_efficiency,
    )
    typer.echo(result.to_json() if as_json else str(result))


@app.command()
def probe(
    preset: Annotated[
        str, typer.Argument(help="Preset name or folder.")
    ] = DEFAULT_PRESET,
    images: Annotated[
        str | None,
        typer.Option(
            help="Folder of images, one sub-folder a class. Without it, "
            "scikit-learn's digits.",
            show_default=False,
        ),
    ] = None,
    shots: Annotated[
        str, typer.Option(help="Labelled images a class.")
    ] = "1,5,10,50",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    output: Annotated[
        str, typer.Option(help="Folder for probe.json and probe.png.")
    ] = "results",
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    skip_unreadable: Annotated[
        bool, typer.Option(help="Leave out images that cannot be read.")
    ] = False,
    as_json: Json = False,
):
    """Probe frozen features against raw pixels, from a few labels a class."""
    start = time.perf_counter()
    protocol_options = {"shots": _ints(shots), "seeds": tuple(range(seeds))}
    with _quiet_import():
        from keras_vit22b.probing.few_shot import FewShot
        from keras_vit22b.probing.few_shot_report import run_few_shot
    record = run_few_shot(
        preset,
        images,
        FewShot(**protocol_options),
        output=output,
        batch_size=batch_size,
        skip_unreadable=skip_unreadable,
        progress=not as_json,
    )
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    _print_probe(record)
    typer.echo(
        f"{time.perf_counter() - start:.0f} s; wrote "
        f"{os.path.join(output, 'probe.json')} and probe.png"
    )


def _print_probe(record):
    data = record["data"]
    typer.echo(
        f"Accuracy on {data['name']} ({data['images']:,} images, "
        f"{data['classes']} classes), in %: mean and standard deviation over "
        f"seeds {', '.join(map(str, record['protocol']['seeds']))}"
    )
    if data["skipped"]:
        typer.echo(f"{data['skipped']} images could not be read.")
    names = list(record["accuracy"])
    header = "".join(f"{n:>20}" for n in names)
    typer.echo(f"{'labels a class':>14}{header}{'gain':>8}")
    for shots in record["protocol"]["shots"]:
        cells = [record["accuracy"][n][str(shots)] for n in names]
        text = "".join(
            f"{100 * c['mean']:>12.1f} ± {100 * c['std']:>5.1f}" for c in cells
        )
        gain = 100 * (cells[0]["mean"] - cells[1]["mean"])
        typer.echo(f"{shots:>14}{text}{gain:>+8.1f}")


@app.command()
def stability(
    dataset: Annotated[
        str, typer.Option(help="digits or fashion_mnist.")
    ] = "digits",
    learning_rate: Annotated[
        float,
        typer.Option(help="The higher peak; a 25th of it is tried, too."),
    ] = 5e-2,
    steps: Annotated[int, typer.Option(min=2)] = 120,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[
        str, typer.Option(help="Folder for tables and pictures.")
    ] = "results/stability",
    as_json: Json = False,
):
    """Train small models with and without QK norm up to a high rate."""
    start = time.perf_counter()
    with _quiet_import():
        from keras_vit22b.training import stability as lab
        from keras_vit22b.training.stability_bench import StabilityProtocol
    # A third of the steps, of the 120 as of others.
    protocol = StabilityProtocol(
        dataset, steps=steps, warmup_steps=-(-steps // 3)
    )
    laboratory = lab.Laboratory(protocol, output)
    rates = [learning_rate / 25, learning_rate]
    settings = lab.grid(rates, (None, "rms"), ("parallel",), (seed,))
    kept = len(laboratory.done.keys() & set(settings))
    progress = None if as_json else _print_stability
    result = laboratory.report(laboratory.run(settings, progress))
    if as_json:
        typer.echo(lab.as_json(result, indent=2))
        return
    if kept:
        typer.echo(f"{kept} of {len(settings)} runs were in {output} already.")
    typer.echo(
        f"{time.perf_counter() - start:.0f} s; wrote {output}: stability.csv, "
        "stability.json, attention_by_step.png, loss_by_learning_rate.png"
    )


def _print_stability(run, number, count):
    from keras_vit22b.training.stability import summary

    row = summary(run)
    norm = f"{run['qk_norm']} QK norm" if run["qk_norm"] else "no QK norm"
    typer.echo(
        f"{number}/{count}  {run['block']}, {norm}, rate "
        f"{run['learning_rate']:g}, seed {run['seed']}: loss "
        f"{run['initial_loss']:.2f} -> {run['final_loss']:.2f}, largest logit "
        f"{row['largest_logit']:.1f}, least entropy "
        f"{100 * row['least_entropy']:.1f} % "
        f"of log T ({run['seconds']:.0f} s)"
    )


def _ints(text):
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"Expected numbers with commas, such as 1,5,10. Received: {text!r}."
        ) from None


@contextlib.contextmanager
def _quiet_import():
    """Keep native libraries from writing to stderr while they load."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


if __name__ == "__main__":
    main()
