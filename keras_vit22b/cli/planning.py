"""Verbs of machines that are not there."""

import os
from typing import Annotated

import typer

from keras_vit22b.cli.app import Json
from keras_vit22b.cli.app import app
from keras_vit22b.cli.app import quiet_import


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
    with quiet_import():
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
    with quiet_import():
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
