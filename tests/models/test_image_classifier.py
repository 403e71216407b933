"""A linear head on the frozen feature."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter

LABELS = np.array([0, 1, 0])


@pytest.fixture
def pixels():
    generator = np.random.default_rng(8)
    return generator.integers(0, 256, (3, 9, 14, 3), "uint8")


def test_scores_are_the_head_of_the_pooled_output(
    make_backbone, images, randomize
):
    backbone = make_backbone()
    classifier = ViT22BImageClassifier(backbone, 5)
    np.testing.assert_array_equal(classifier(images), np.zeros((3, 5)))
    randomize(classifier)
    kernel = ops.convert_to_numpy(classifier.head.kernel)
    bias = ops.convert_to_numpy(classifier.head.bias)
    pooled = ops.convert_to_numpy(backbone(images)["pooled_output"])
    np.testing.assert_allclose(
        classifier(images), pooled @ kernel + bias, rtol=1e-4, atol=1e-5
    )


def test_the_head_is_float32_on_a_half_precision_backbone(
    make_backbone, images
):
    classifier = ViT22BImageClassifier(
        make_backbone(dtype="mixed_bfloat16"), 2, activation="softmax"
    )
    scores = classifier(images)
    assert keras.backend.standardize_dtype(scores.dtype) == "float32"
    np.testing.assert_allclose(ops.sum(scores, -1), 1, atol=1e-6)


def test_config_round_trip(make_backbone):
    classifier = ViT22BImageClassifier(
        make_backbone(num_registers=1),
        2,
        preprocessor=ViT22BImageConverter((8, 12)).make_preprocessor(),
        activation="sigmoid",
        dropout=0.2,
        class_names=["shirt", "shoe"],
        head_dtype="bfloat16",
        name="mine",
    )
    config = classifier.get_config()
    copy = ViT22BImageClassifier.from_config(config)
    assert copy.get_config() == classifier.get_config()
    assert copy.class_names == ["shirt", "shoe"]
    assert copy.head.dtype_policy.name == "bfloat16"
    assert copy.backbone.num_registers == 1
    assert copy.preprocessor.image_converter.image_size == (8, 12)


def test_whole_model_saved_equals_loaded(
    make_backbone, pixels, randomize, tmp_path
):
    classifier = ViT22BImageClassifier(
        make_backbone(),
        2,
        preprocessor=ViT22BImageConverter((8, 12)).make_preprocessor(),
    )
    randomize(classifier)
    classifier.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(pixels, verbose=0), classifier.predict(pixels, verbose=0)
    )


def test_raw_images_are_preprocessed(make_backbone, pixels, randomize):
    converter = ViT22BImageConverter((8, 12))
    classifier = ViT22BImageClassifier(
        make_backbone(), 2, preprocessor=converter.make_preprocessor()
    )
    randomize(classifier)
    scores = classifier.predict(pixels, verbose=0)
    classifier.preprocessor = None
    np.testing.assert_allclose(
        classifier.predict(ops.convert_to_numpy(converter(pixels)), verbose=0),
        scores,
        rtol=1e-5,
        atol=1e-5,
    )


def test_fit_learns_with_everything_on(make_backbone, pixels):
    """Preprocessing, mixed precision, dropout, stochastic depth and remat."""
    classifier = ViT22BImageClassifier(
        make_backbone(
            dtype="mixed_bfloat16",
            dropout_rate=0.1,
            drop_path_rate=0.1,
            remat=True,
        ),
        2,
        preprocessor=ViT22BImageConverter((8, 12)).make_preprocessor(),
        dropout=0.1,
    )
    classifier.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = classifier.fit(
        pixels, LABELS, epochs=20, batch_size=3, verbose=0
    ).history["loss"]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-3)
    assert losses[-1] < 0.5 * losses[0]


def test_a_frozen_backbone_stays_as_it_was(make_backbone, images, arrays):
    backbone = make_backbone(random=True)
    backbone.trainable = False
    classifier = ViT22BImageClassifier(backbone, 2)
    before = arrays(backbone)
    classifier.fit(images, LABELS, epochs=2, verbose=0)
    for ours, theirs in zip(arrays(backbone), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert ops.convert_to_numpy(classifier.head.kernel).any()


def test_class_names_must_be_one_a_class(make_backbone):
    with pytest.raises(ValueError, match="1 class_names for 2 classes"):
        ViT22BImageClassifier(make_backbone(), 2, class_names=["shirt"])


def test_a_sigmoid_head_takes_multi_hot_labels(make_backbone, images):
    classifier = ViT22BImageClassifier(make_backbone(), 3, activation="sigmoid")
    labels = np.ones((len(images), 3), "float32")
    history = classifier.fit(images, labels, verbose=0).history
    # A head at zero says 1/2, whatever the label.
    np.testing.assert_allclose(history["loss"], np.log(2), atol=1e-5)
    assert "binary_accuracy" in history


@pytest.mark.parametrize("metrics", [None, "auto"])
def test_another_loss_does_not_keep_the_default_metric(
    make_backbone, images, metrics
):
    classifier = ViT22BImageClassifier(make_backbone(), 3)
    classifier.compile("sgd", "mse", metrics=metrics)
    labels = np.zeros((len(images), 3), "float32")
    assert set(classifier.fit(images, labels, verbose=0).history) == {"loss"}


def test_without_preprocessor_fit_takes_any_loader(make_backbone, images):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return images, np.zeros(len(images), "int32")

    classifier = ViT22BImageClassifier(make_backbone(), 3)
    classifier.fit(Batches(), verbose=0)
    assert classifier.evaluate(Batches(), verbose=0)
    assert len(classifier.predict(Batches(), verbose=0)) == 2 * len(images)


@pytest.mark.parametrize(
    "activation, from_logits",
    [(None, True), ("linear", True), ("softmax", False)],
)
def test_the_default_loss_knows_whether_scores_are_logits(
    make_backbone, activation, from_logits
):
    classifier = ViT22BImageClassifier(
        make_backbone(), 3, activation=activation
    )
    assert classifier.loss.get_config()["from_logits"] == from_logits


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "relu"}, "activation must be"),
        ({"activation": len}, "activation must be"),
        ({"class_names": ["a"]}, "1 class_names for 3"),
    ],
)
def test_bad_heads_are_refused(make_backbone, options, message):
    with pytest.raises(ValueError, match=message):
        ViT22BImageClassifier(make_backbone(), 3, **options)


@pytest.mark.parametrize(
    "options",
    [{"class_names": [1, 2, 3]}, {"class_names": ["x" * 300, "b", "c"]}],
)
def test_what_could_not_be_read_back_is_not_saved(
    make_backbone, tmp_path, options
):
    classifier = ViT22BImageClassifier(make_backbone(), 3, **options)
    with pytest.raises(ValueError, match="class_names"):
        classifier.save_to_preset(tmp_path / "preset")
    assert not list(tmp_path.iterdir())


def test_arrays_are_shuffled_but_for_what_validates(
    make_backbone, pixels, monkeypatch
):
    backbone = make_backbone()
    converter = ViT22BImageConverter(backbone.image_shape[:2])
    classifier = ViT22BImageClassifier(
        backbone, 40, preprocessor=converter.make_preprocessor()
    )
    seen = []
    parent = keras_hub.models.ImageClassifier

    def fit(self, x, y, **kwargs):
        seen.append((x[:, 0, 0, 0].tolist(), y.tolist(), kwargs))

    monkeypatch.setattr(parent, "fit", fit)
    images = np.zeros((40, 9, 14, 3), "uint8")
    images[:, 0, 0, 0] = labels = np.arange(40)
    classifier.fit(images, labels, validation_split=0.25)
    classifier.fit(images, labels, shuffle=False)
    for first, second, kwargs in seen:
        assert first == second
        assert kwargs["shuffle"] is False
    assert sorted(seen[0][0][:30]) == list(range(30)) != seen[0][0][:30]
    assert seen[0][0][30:] == list(range(30, 40))
    assert seen[1][0] == list(range(40))
