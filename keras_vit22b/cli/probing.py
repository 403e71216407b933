"""Verbs of frozen features."""

import json
import os
import time
from typing import Annotated

import typer

from keras_vit22b.cli.app import DEFAULT_PRESET
from keras_vit22b.cli.app import Json
from keras_vit22b.cli.app import app
from keras_vit22b.cli.app import quiet_import


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
    with quiet_import():
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


def _ints(text):
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"Expected numbers with commas, such as 1,5,10. Received: {text!r}."
        ) from None


@app.command()
def features(
    preset: Annotated[str, typer.Argument(help="Preset name or folder.")],
    images: Annotated[
        str,
        typer.Argument(
            help="Folder with one sub-folder a class, .csv of path and label, "
            ".npz, digits, fashion_mnist or fashion_mnist_test."
        ),
    ],
    store: Annotated[str, typer.Argument(help="Folder to write to.")],
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Such as -1,-4; without it, the pooled output.",
            show_default=False,
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="Such as cls,mean; without it, the preset's.",
            show_default=False,
        ),
    ] = None,
    normed: Annotated[
        bool, typer.Option(help="Put blocks through the last norm.")
    ] = True,
    views: Annotated[
        int, typer.Option(min=0, help="Random crops and flips; 0: the image.")
    ] = 0,
    crop_area: Annotated[
        float, typer.Option(help="The least part of an image in a crop.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the crops.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    skip_unreadable: Annotated[
        bool, typer.Option(help="Leave out images that cannot be read.")
    ] = False,
    as_json: Json = False,
):
    """Extract frozen features to disk; the same command goes on if killed."""
    with quiet_import():
        from keras_vit22b.models import ViT22BBackbone
        from keras_vit22b.models.labelled_images import read_images
        from keras_vit22b.probing import Views
        from keras_vit22b.probing import extract_features
        from keras_vit22b.training import InceptionCrop
    source = read_images(images)
    backbone = ViT22BBackbone.from_preset(preset)
    crops = None
    if views:
        height, width, _ = backbone.image_shape
        crop = InceptionCrop(height, width, area=(crop_area, 1.0))
        crops = Views(crop, count=views, seed=seed)
    result = extract_features(
        backbone,
        source,
        blocks=None if blocks is None else _ints(blocks),
        pooling=None if pooling is None else tuple(pooling.split(",")),
        normed=normed,
        batch_size=batch_size,
        views=crops,
        store=store,
        skip_unreadable=skip_unreadable,
        progress=not as_json,
    )
    if as_json:
        typer.echo(json.dumps(result.manifest, indent=2))
        return
    typer.echo(f"{len(result):,} images in {store}:")
    for name, rows in result.features.items():
        typer.echo(f"  {name:<20}{' x '.join(map(str, rows.shape[1:])):>16}")
