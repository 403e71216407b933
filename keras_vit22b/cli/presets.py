"""Verbs of presets: look, check, pull and push."""

import json
import os
from typing import Annotated

import typer

from keras_vit22b.cli.app import Json
from keras_vit22b.cli.app import app
from keras_vit22b.cli.app import quiet_import


@app.command()
def presets(as_json: Json = False):
    """List the built-in presets."""
    with quiet_import():
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
    with quiet_import():
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
    with quiet_import():
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
    with quiet_import():
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
    with quiet_import():
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
    with quiet_import():
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
    with quiet_import():
        from keras_vit22b.probing import card_metrics
    record = _read_json(path)
    metrics = card_metrics(record)
    if os.path.realpath(record["preset"]) != os.path.realpath(folder):
        raise ValueError(f"{path} is of {record['preset']!r}, not of {folder}.")
    return metrics
