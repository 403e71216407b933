"""What all verbs of the command line share."""

import contextlib
import logging
import os
import sys
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


@contextlib.contextmanager
def quiet_import():
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
