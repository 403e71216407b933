"""ViT-22B as a Keras 3 model package.

Names are imported on first use, so that importing the package stays fast.
`import keras_vit22b.models` registers its classes with Keras, which
`keras_hub.models.Backbone.from_preset` needs.
"""

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "ViT22BBackbone": "keras_vit22b.models",
    "ViT22BImageClassifier": "keras_vit22b.models",
    "ViT22BImageClassifierPreprocessor": "keras_vit22b.models",
    "ViT22BImageConverter": "keras_vit22b.models",
    "extract_features": "keras_vit22b.probing",
    "from_preset": "keras_vit22b.loading",
    "presets": "keras_vit22b.loading",
    "push_to_hub": "keras_vit22b.weights.push",
}
_ROOMS = (
    "distribution",
    "evaluation",
    "layers",
    "models",
    "probing",
    "training",
    "weights",
)

__all__ = ["__version__", *_PUBLIC, *_ROOMS]


def __getattr__(name):
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"keras_vit22b.{name}")
    raise AttributeError(f"module 'keras_vit22b' has no attribute {name!r}")


def __dir__():
    return __all__
