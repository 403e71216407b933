"""Verbs of training."""

import time
from typing import Annotated

import typer

from keras_vit22b.cli.app import Json
from keras_vit22b.cli.app import app
from keras_vit22b.cli.app import quiet_import


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
    with quiet_import():
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
