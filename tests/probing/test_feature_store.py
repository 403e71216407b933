"""A store holds the features of one call, whole, however often it is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import PIL.Image
import pytest

from keras_vit22b import ViT22BImageConverter
from keras_vit22b import extract_features
from keras_vit22b.probing import FeatureStore
from keras_vit22b.probing import RidgeProbe
from keras_vit22b.probing import Views
from keras_vit22b.probing import features as features_module
from keras_vit22b.training import InceptionCrop


@pytest.fixture
def backbone(make_backbone):
    model = make_backbone((8, 8, 1), random=True)
    model.image_converter = ViT22BImageConverter((8, 8), channels=1)
    return model


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (11, 8, 8, 1), "uint8")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Two batches of two images, of 8 numbers each."""
    monkeypatch.setattr(features_module, "SHARD_BYTES", 2 * 2 * 8 * 4)


def contents(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_a_store_has_what_a_call_returns(backbone, images, tmp_path):
    labels = np.arange(11) % 3
    store = extract_features(
        backbone,
        images,
        labels=labels,
        blocks=[0, -1],
        pooling=["mean", "map"],
        batch_size=2,
        store=tmp_path / "store",
    )
    names = ["block_0.mean", "block_0.map", "block_1.mean", "block_1.map"]
    assert list(store.features) == names
    together = extract_features(
        backbone, images, blocks=[0, -1], pooling=["mean", "map"], batch_size=2
    )
    for i, name in enumerate(names):
        rows = store.features[name]
        assert rows.shape == (11, 8)
        np.testing.assert_array_equal(rows, together[:, 8 * i : 8 * i + 8])
        block, pooling = name.removeprefix("block_").split(".")
        alone = extract_features(
            backbone, images, blocks=int(block), pooling=pooling, batch_size=2
        )
        np.testing.assert_allclose(rows[:], alone, atol=1e-5)
        assert store.manifest["features"][name] == {
            "block": int(block),
            "pooling": pooling,
            "normed": True,
        }
    assert len(store) == 11 and store.labels.tolist() == labels.tolist()
    assert len(list((tmp_path / "store").glob("*.safetensors"))) > 2
    store.verify()
    # The same call again finds it done.
    before = contents(tmp_path)
    extract_features(
        backbone,
        images,
        labels=labels,
        blocks=[0, -1],
        pooling=["mean", "map"],
        batch_size=2,
        store=tmp_path / "store",
    )
    assert contents(tmp_path) == before


def test_rows_are_those_of_an_array(backbone, images, tmp_path):
    store = extract_features(backbone, images, batch_size=2, store=tmp_path)
    rows = store.features["pooled_output"]
    whole = np.asarray(rows)
    for index in (
        slice(3, 7),
        slice(None, None, -2),
        np.array([9, 1, 1, 4]),
        np.array([-1, 0]),
        np.array([], int),
    ):
        np.testing.assert_array_equal(rows[index], whole[index])
    with pytest.raises(IndexError, match="out of range of 11"):
        rows[np.array([11])]
    with pytest.raises(IndexError, match="slice or an array"):
        rows[3]
    assert store.labels is None


KILLED = """
import sys, time
import keras, numpy as np
import PIL.Image
from keras_vit22b import ViT22BBackbone, ViT22BImageConverter
from keras_vit22b import extract_features
from keras_vit22b.models import image_folder
from keras_vit22b.probing import features

features.SHARD_BYTES = 128
keras.utils.set_random_seed(0)
backbone = ViT22BBackbone(
    (8, 8, 1), 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16,
    pooling="mean",
)
backbone.image_converter = ViT22BImageConverter((8, 8), channels=1)
slow = image_folder.decode
def decode(image):
    time.sleep(float(sys.argv[3]))
    return slow(image)
image_folder.decode = decode
extract_features(backbone, sys.argv[1], batch_size=2, store=sys.argv[2])
"""


def test_a_killed_extraction_goes_on_byte_for_byte(tmp_path):
    photos, generator = tmp_path / "photos", np.random.default_rng(0)
    for i in range(24):
        path = photos / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8), "uint8")
        PIL.Image.fromarray(pixels).save(path)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}

    def start(store, wait):
        command = [sys.executable, "-c", KILLED]
        return subprocess.Popen(
            [*command, str(photos), str(tmp_path / store), str(wait)], env=env
        )

    whole, killed = start("whole", 0), start("killed", 0.1)
    shards = tmp_path / "killed"
    while not (shards / "features-00001.safetensors").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert whole.wait() == 0
    with pytest.raises(ValueError, match="has not ended; the same call goes"):
        FeatureStore(shards)
    # What a kill while a shard is written leaves.
    (shards / ".features-00002.safetensors.1-1.saving").write_bytes(b"half")
    done = (shards / "features-00000.safetensors").stat().st_mtime_ns
    assert start("killed", 0).wait() == 0
    assert (shards / "features-00000.safetensors").stat().st_mtime_ns == done
    assert contents(shards) == contents(tmp_path / "whole")
    store = FeatureStore(shards)
    assert len(store) == 24 and store.class_names == ["a", "b"]
    assert store.labels.tolist() == [0] * 12 + [1] * 12


def test_a_loader_goes_on_too(backbone, images, tmp_path):
    def loader():
        yield images[:5], np.arange(5)
        yield images[5:], np.arange(5, 11)

    def broken():
        yield images[:5], np.arange(5)
        raise OSError("disk")

    options = {"batch_size": 2, "store": tmp_path / "store"}
    with pytest.raises(OSError, match="disk"):
        extract_features(backbone, broken(), **options)
    store = extract_features(backbone, loader(), **options)
    assert store.labels.tolist() == list(range(11))
    np.testing.assert_array_equal(
        store.features["pooled_output"],
        extract_features(backbone, images, batch_size=2),
    )


def test_other_features_are_refused(backbone, make_backbone, images, tmp_path):
    options = {"batch_size": 2, "store": tmp_path}
    extract_features(backbone, images, **options)
    other = make_backbone((8, 8, 1))
    other.image_converter = backbone.image_converter
    for changed, what in (
        ((other, images), "model.weights: '"),
        ((backbone, images[::-1]), "images.sha256: '"),
        ((backbone, images[1:]), "images.count: 11 and 10"),
    ):
        with pytest.raises(ValueError, match=f"(?s)differently.*{what}"):
            extract_features(*changed, **options)
    with pytest.raises(ValueError, match="features.block_0.mean: None and {"):
        extract_features(backbone, images, blocks=0, pooling="mean", **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match="holds other files"):
        extract_features(backbone, images, store=tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["thesis.tex"]


def test_probes_refuse_features_of_another_model(
    backbone, make_backbone, images, tmp_path
):
    other = make_backbone((8, 8, 1))
    other.image_converter = backbone.image_converter
    stores = [
        extract_features(model, images, store=tmp_path / name)
        for model, name in ((backbone, "one"), (other, "other"))
    ]
    ours, theirs = (store.features["pooled_output"] for store in stores)
    probe = RidgeProbe().fit(ours, np.arange(11) % 2)
    assert probe.predict(ours).shape == (11,)
    with pytest.raises(ValueError, match="differently:\n  model.weights"):
        probe.predict(theirs)
    # Arrays have no origin.
    probe.predict(theirs[:])


def test_bytes_that_changed_are_found(backbone, images, tmp_path):
    store = extract_features(backbone, images, batch_size=2, store=tmp_path)
    path = tmp_path / "features-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="features-00001.safetensors: sha256"):
        store.verify()
    path.unlink()
    with pytest.raises(ValueError, match="Cannot open .*features-00001"):
        FeatureStore(tmp_path)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2}', '{"format": 1, "shards": []}']
)
def test_a_broken_manifest_is_an_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="no manifest of a feature store"):
        FeatureStore(tmp_path)
    with pytest.raises(ValueError, match="no complete feature store: extract"):
        FeatureStore(tmp_path / "nothing")


def test_views_are_crops_of_their_own(backbone, images, tmp_path):
    views = Views(InceptionCrop(8, 8, area=(0.5, 1.0)), count=3, seed=1)
    store = extract_features(
        backbone, images, views=views, batch_size=2, store=tmp_path
    )
    rows = store.features["pooled_output"]
    assert rows.shape == (11, 3, 8)
    assert np.abs(rows[:, 0] - rows[:, 1]).max() > 1e-3
    np.testing.assert_array_equal(rows[2:5, 1], np.asarray(rows)[2:5, 1])
    assert store.manifest["views"]["count"] == 3
    assert store.manifest["views"]["augmentation"]["area"] == [0.5, 1.0]
    # Of an image and a number, whatever the batch.
    array = extract_features(backbone, images[:3], views=views)
    np.testing.assert_allclose(array, rows[:3], atol=1e-5)


@pytest.mark.parametrize("kind", ["function", "model"])
def test_any_model_will_do(images, tmp_path, kind):
    def sums(batch):
        batch = keras.ops.convert_to_numpy(batch)
        return {
            "rows": batch.sum(axis=(2, 3)) / 255,
            "columns": batch.sum(axis=(1, 3)) / 255,
        }

    model = sums
    if kind == "model":
        inputs = keras.Input((8, 8, 1))
        outputs = keras.layers.Flatten()(inputs)
        model = keras.Model(inputs, keras.layers.Dense(4)(outputs))
    options = {"image_converter": None, "batch_size": 3, "store": tmp_path}
    store = extract_features(model, images, **options)
    if kind == "function":
        expected = sums(images.astype("float32"))
        for name in ("rows", "columns"):
            np.testing.assert_allclose(
                store.features[name], expected[name], rtol=1e-6
            )
    else:
        assert store.features["features"].shape == (11, 4)
        assert "weights" in store.manifest["model"]
    again = extract_features(model, images, **options)
    assert json.dumps(again.manifest) == json.dumps(store.manifest)
    with pytest.raises(ValueError, match="image_converter"):
        extract_features(model, images)
    with pytest.raises(ValueError, match="blocks and pooling are those of"):
        extract_features(model, images, blocks=1, image_converter=None)


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda x: np.asarray(x), r"\(batch, d\). Received shape \(11, 8, 8"),
        (lambda x: np.asarray(x)[:2, 0, 0], r"Received shape \(2, 1\)"),
        ("resnet50", "a Keras model or a callable. Received: str"),
    ],
)
def test_what_is_no_model_is_an_error(images, model, message):
    with pytest.raises(ValueError, match=message):
        extract_features(model, images, image_converter=None)


def test_labels_of_a_store_are_integers(backbone, images, tmp_path):
    with pytest.raises(ValueError, match="integers.*cat first"):
        extract_features(
            backbone, images, labels=["cat"] * 11, store=tmp_path / "a"
        )
    with pytest.raises(ValueError, match="11 images need labels"):
        extract_features(backbone, images, labels=[0], store=tmp_path / "b")
    with pytest.raises(ValueError, match="no images"):
        extract_features(backbone, iter([]), store=tmp_path / "c")
