"""The same weights give the same features on every backend."""

import importlib.util
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageConverter
from keras_vit22b import from_preset

BACKENDS = ("jax", "tensorflow", "torch")

# Run on the other backend: load a preset, save features of raw images and a
# copy of the preset, then make a model there and save that as well.
SCRIPT = """
import json, sys
import keras
import numpy as np
import keras_vit22b

folder, options = sys.argv[1], json.loads(sys.argv[2])
assert keras.config.backend() == sys.argv[3]
raw = np.load(f"{folder}/raw.npy")


def save_features(backbone, name):
    inputs = backbone.image_converter(raw)
    outputs = backbone(inputs)
    np.savez(
        f"{folder}/{name}.npz",
        inputs=keras.ops.convert_to_numpy(inputs),
        **{k: keras.ops.convert_to_numpy(v) for k, v in outputs.items()},
    )


for dtype in sys.argv[4:]:
    path = f"{folder}/dtypes/{dtype}"
    loaded = keras_vit22b.from_preset(path, dtype=dtype)
    assert {w.dtype for w in loaded.weights} == {dtype}
    loaded.save_to_preset(f"{path}2")

for name in options:
    ours = keras_vit22b.from_preset(f"{folder}/{name}/ours")
    save_features(ours, f"{name}/loaded")
    ours.save_to_preset(f"{folder}/{name}/copy", max_shard_size=2000)
    large = keras_vit22b.from_preset(
        f"{folder}/{name}/ours", image_shape=(16, 16, 3)
    )
    save_features(large, f"{name}/large")
    theirs = keras_vit22b.ViT22BBackbone(**options[name])
    generator = np.random.default_rng(10)
    for weight in theirs.weights:
        weight.assign(generator.normal(0.2, 0.5, weight.shape))
    theirs.image_converter = keras_vit22b.ViT22BImageConverter((8, 12))
    theirs.save_to_preset(f"{folder}/{name}/theirs")
    save_features(theirs, f"{name}/made")
"""

OPTIONS = {
    "parallel": {"num_registers": 1, "layer_scale": 0.5},
    "sequential": {
        "block": "sequential",
        "norm": "layer",
        "qk_norm": "layer",
        "pooling": "cls",
        "activation": "gelu",
        "use_qkv_bias": True,
    },
}

# The code of each dtype in a file.
DTYPES = {"bfloat16": "BF16", "float16": "F16"}


def other_backends():
    return [
        b
        for b in BACKENDS
        if b != keras.config.backend() and importlib.util.find_spec(b)
    ]


@pytest.fixture(scope="module", params=BACKENDS)
def other(request, tmp_path_factory):
    """Let another backend work on our presets; return the folder."""
    if request.param not in other_backends():
        pytest.skip(f"{request.param} is this backend, or is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    generator = np.random.default_rng(11)
    np.save(
        folder / "raw.npy", generator.integers(0, 256, (2, 20, 17, 3), "u1")
    )
    from keras_vit22b import ViT22BBackbone

    config = {}
    for name, options in OPTIONS.items():
        config[name] = {
            "image_shape": (8, 12, 3),
            "patch_size": 4,
            "num_layers": 2,
            "num_heads": 2,
            "hidden_dim": 8,
            "mlp_dim": 16,
            **options,
        }
        backbone = ViT22BBackbone(**config[name])
        for weight in backbone.weights:
            weight.assign(generator.normal(0.2, 0.5, weight.shape))
        backbone.image_converter = ViT22BImageConverter((8, 12))
        backbone.save_to_preset(folder / name / "ours", max_shard_size=2000)
    for dtype in DTYPES:
        ViT22BBackbone(**config["parallel"], dtype=dtype).save_to_preset(
            folder / "dtypes" / dtype
        )
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, json.dumps(config)]
        + [request.param, *DTYPES],
        env={**os.environ, "KERAS_BACKEND": request.param},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return folder


EACH = pytest.mark.parametrize("name", OPTIONS)


def assert_same_features(backbone, path, folder):
    theirs = np.load(path)
    inputs = backbone.image_converter(np.load(folder / "raw.npy"))
    np.testing.assert_allclose(inputs, theirs["inputs"], atol=1e-3)
    # Of the same input, as resizing pixels differs a little.
    for key, output in backbone(theirs["inputs"]).items():
        np.testing.assert_allclose(output, theirs[key], rtol=1e-5, atol=1e-5)


@EACH
def test_saved_here_and_loaded_there(other, name):
    backbone = from_preset(other / name / "ours")
    assert_same_features(backbone, other / name / "loaded.npz", other)


@EACH
def test_saved_there_and_loaded_here(other, name):
    backbone = from_preset(other / name / "theirs")
    assert_same_features(backbone, other / name / "made.npz", other)


@EACH
def test_resized_alike(other, name):
    backbone = from_preset(other / name / "ours", image_shape=(16, 16, 3))
    assert_same_features(backbone, other / name / "large.npz", other)


@EACH
def test_files_are_the_same_on_every_backend(other, name):
    """Those that the other backend saved of what it loaded: every bit."""
    ours, theirs = other / name / "ours", other / name / "copy"
    names = {p.name for p in ours.iterdir()} - {"README.md"}
    assert names == {p.name for p in theirs.iterdir()} - {"README.md"}
    assert sum(name.startswith("model-") for name in names) > 2
    for file in names:
        assert (theirs / file).read_bytes() == (ours / file).read_bytes(), file


def test_every_dtype_is_the_same_on_every_backend(other):
    """Of the other backend's copies of what it loaded."""
    for dtype in DTYPES:
        ours, theirs = other / "dtypes" / dtype, other / "dtypes" / f"{dtype}2"
        for file in ("model.safetensors", "model.weights.json"):
            assert (theirs / file).read_bytes() == (ours / file).read_bytes()
        header = (ours / "model.safetensors").read_bytes()[:4000]
        assert DTYPES[dtype].encode() in header
