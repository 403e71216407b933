"""Models over many devices, by `keras.distribution` on JAX.

Names are imported on first use, so that other backends never load JAX.
"""

import importlib

_PUBLIC = {
    "OverlapMesh": "keras_vit22b.distribution.mesh",
    "compile_for": "keras_vit22b.planning.compile_ahead",
    "coverage": "keras_vit22b.distribution.coverage_report",
    "data_share": "keras_vit22b.distribution.process_shares",
    "device_mesh": "keras_vit22b.distribution.mesh",
    "initialize": "keras_vit22b.distribution.mesh",
    "plan": "keras_vit22b.planning.planner",
}

__all__ = [*_PUBLIC]


def __getattr__(name):
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(
        f"module 'keras_vit22b.distribution' has no attribute {name!r}"
    )


def __dir__():
    return __all__
