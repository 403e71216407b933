"""Importing is light: what is heavy is loaded when it is used."""

import json
import subprocess
import sys

import pytest

HEAVY = {"tensorflow", "jax", "torch", "keras_hub", "matplotlib", "sklearn"}


def modules_after(statement):
    """Run a statement in a fresh interpreter; return what it loaded."""
    code = f"import json, sys; {statement}; print(json.dumps([*sys.modules]))"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    return set(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import keras_vit22b",
        "import keras_vit22b; keras_vit22b.__version__; dir(keras_vit22b)",
        "import keras_vit22b.distribution; dir(keras_vit22b.distribution)",
    ],
)
def test_importing_the_package_loads_nothing_heavy(statement):
    assert not modules_after(statement) & (HEAVY | {"keras", "numpy"})


def test_layers_need_keras_alone():
    # Keras itself loads matplotlib and scikit-learn where it finds them.
    by_keras = modules_after("import keras")
    loaded = modules_after("import keras_vit22b.layers") - by_keras
    assert "keras_vit22b.layers.parallel_block" in loaded
    assert not loaded & (HEAVY | {"keras_vit22b.models"})


def test_evaluation_needs_numpy_alone():
    loaded = modules_after("import keras_vit22b.evaluation")
    assert "keras_vit22b.evaluation.calibration" in loaded
    assert not loaded & (HEAVY | {"keras"})


def test_every_public_name_exists():
    statement = (
        "import keras_vit22b as k; "
        "assert all(getattr(k, n) is not None for n in k.__all__)"
    )
    assert "keras_vit22b.models" in modules_after(statement)


def test_presets_is_a_function_whatever_was_used_before():
    modules_after(
        "import keras_vit22b as k; k.presets(); k.from_preset; k.models; "
        "assert callable(k.presets) and k.presets() == k.presets()"
    )


def test_an_unknown_name_is_an_error():
    import keras_vit22b

    with pytest.raises(AttributeError, match="no attribute 'ViT23B'"):
        _ = keras_vit22b.ViT23B
