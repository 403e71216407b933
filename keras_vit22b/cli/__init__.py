"""The command line, `keras-vit22b`: one module for the verbs of a room."""

from keras_vit22b.cli import planning
from keras_vit22b.cli import presets
from keras_vit22b.cli import probing
from keras_vit22b.cli import training
from keras_vit22b.cli.app import DEFAULT_PRESET
from keras_vit22b.cli.app import main

__all__ = [
    "DEFAULT_PRESET",
    "main",
    "planning",
    "presets",
    "probing",
    "training",
]
