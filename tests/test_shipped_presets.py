"""The presets that ship: folders as the table says, features that transfer."""

import json
import os
import pathlib

import keras
import numpy as np
import pytest
from huggingface_hub import ModelCard

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import presets
from keras_vit22b.cli import DEFAULT_PRESET
from keras_vit22b.models import VARIANTS
from keras_vit22b.probing import FewShot
from keras_vit22b.probing.few_shot_report import run_few_shot
from keras_vit22b.weights.preset_files import builtin_folder


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_each_row_has_the_preset_it_describes(variant):
    backbone = ViT22BBackbone.from_preset(variant.name, abstract=True)
    config = backbone.get_config()
    for name, value in variant.backbone_config().items():
        assert config[name] == value, name
    converter = backbone.image_converter
    assert converter.image_size == variant.image_shape[:2]
    assert converter.channels == variant.image_shape[2]
    metadata = presets()[variant.name]
    assert metadata["parameter_count"] == backbone.count_params()
    card = builtin_folder() / variant.name / "README.md"
    assert f"{backbone.count_params():,}" in card.read_text()


def test_weights_that_ship_are_small_and_have_a_card():
    shipped = [n for n, m in presets().items() if m["has_weights"]]
    assert shipped == [DEFAULT_PRESET]
    folder = builtin_folder() / DEFAULT_PRESET
    assert (folder / "model.safetensors").stat().st_size <= 10_000_000
    card = ModelCard((folder / "README.md").read_text())
    assert f'from_preset("{DEFAULT_PRESET}")' in card.text
    assert "Not stated." not in card.text
    assert card.data.license == "apache-2.0"
    metrics = {r.metric_name: r.metric_value for r in card.data.eval_results}
    assert metrics["the preset's own head"] >= 0.9
    assert len(metrics) == 5


def test_frozen_features_beat_raw_pixels_on_unseen_handwriting():
    record = run_few_shot(DEFAULT_PRESET, None, FewShot())
    features, pixels = record["accuracy"].values()
    for shots, points in {"1": 12, "5": 7, "10": 5, "50": 2}.items():
        gain = features[shots]["mean"] - pixels[shots]["mean"]
        assert 100 * gain >= points, shots


def test_its_own_head_knows_fashion():
    home = os.environ.get("KERAS_HOME", pathlib.Path.home() / ".keras")
    cache = pathlib.Path(home) / "datasets" / "fashion-mnist"
    if not (cache / "t10k-images-idx3-ubyte.gz").is_file():
        pytest.skip(
            "Fashion-MNIST is not in Keras' cache; tools/fashion_mnist.sh "
            "fills it from Debian's package."
        )
    _, (images, labels) = keras.datasets.fashion_mnist.load_data()
    classifier = ViT22BImageClassifier.from_preset(DEFAULT_PRESET)
    if keras.config.backend() != "jax":  # Slower without XLA.
        images, labels = images[:2000], labels[:2000]
    scores = classifier.predict(images[..., None], batch_size=500, verbose=0)
    assert classifier.class_names[0] == "T-shirt or top"
    assert (scores[:, :10].argmax(-1) == labels).mean() >= 0.90


def test_index_names_every_tensor_for_keras_hub():
    folder = builtin_folder() / DEFAULT_PRESET
    index = json.loads((folder / "model.weights.json").read_text())
    classifier = ViT22BImageClassifier.from_preset(DEFAULT_PRESET)
    assert set(index["weight_map"]) == set(classifier.tensors())
    total = sum(
        np.prod(v.shape, dtype=int) * 4 for v in classifier.tensors().values()
    )
    assert index["metadata"]["total_size"] == total
