"""Frozen features do not depend on how images come in."""

import keras
import numpy as np
import PIL.Image
import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter
from keras_vit22b import extract_features


@pytest.fixture(scope="module")
def backbone():
    keras.utils.set_random_seed(0)
    model = ViT22BBackbone(
        (8, 8, 1),
        4,
        num_layers=3,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
        dtype="float32",
    )
    model.image_converter = ViT22BImageConverter((8, 8), channels=1)
    return model


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (7, 8, 8, 1), "uint8")


def pooled(backbone, images):
    outputs = backbone(backbone.image_converter(images))
    return keras.ops.convert_to_numpy(outputs["pooled_output"])


def test_features_are_the_pooled_output(backbone, images):
    features = extract_features(backbone, images)
    assert features.shape == (7, 8)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, pooled(backbone, images), atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_batch_size_changes_nothing(backbone, images, batch_size):
    np.testing.assert_allclose(
        extract_features(backbone, images, batch_size=batch_size),
        extract_features(backbone, images),
        atol=1e-6,
    )


def test_lists_loaders_and_generators_give_the_same(backbone, images):
    expected = extract_features(backbone, images)
    labels = np.arange(7)

    def loader():
        yield images[:4], labels[:4]
        yield images[4:], labels[4:]

    def lists():
        yield list(images[:4])
        yield list(images[4:])

    for source in (list(images), images[..., 0], loader(), lists()):
        np.testing.assert_allclose(
            extract_features(backbone, source), expected, atol=1e-6
        )
    features, found = extract_features(backbone, loader(), return_labels=True)
    np.testing.assert_allclose(features, expected, atol=1e-6)
    assert found.tolist() == labels.tolist()


def test_tf_data_gives_the_same(backbone, images):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((images, np.arange(7))).batch(2)
    features, labels = extract_features(backbone, data, return_labels=True)
    expected = extract_features(backbone, images)
    np.testing.assert_allclose(features, expected, atol=1e-6)
    assert labels.tolist() == list(range(7))


def test_a_folder_gives_the_same_in_sorted_order(backbone, images, tmp_path):
    for index, image in enumerate(images):
        path = tmp_path / f"class{index % 2}" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(image[..., 0]).save(path)
    features, labels = extract_features(backbone, tmp_path, return_labels=True)
    order = [0, 2, 4, 6, 1, 3, 5]
    expected = extract_features(backbone, images)[order]
    np.testing.assert_allclose(features, expected, atol=1e-6)
    assert labels.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_images_of_any_size_and_color_are_converted(backbone):
    generator = np.random.default_rng(0)
    mixed = [
        generator.integers(0, 256, shape, "uint8")
        for shape in [(9, 12, 3), (8, 8, 1), (20, 5)]
    ]
    assert extract_features(backbone, mixed).shape == (3, 8)


def test_blocks_are_normed_pooled_and_concatenated(backbone, images):
    features = extract_features(backbone, images, blocks=[0, -1])
    tokens = backbone.block_model([0, -1], normed=True)(
        backbone.image_converter(images)
    )
    expected = np.concatenate(
        [
            keras.ops.convert_to_numpy(backbone.pooler(tokens[f"block_{i}"]))
            for i in (0, 2)
        ],
        axis=-1,
    )
    np.testing.assert_allclose(features, expected, atol=1e-5)
    # The last block, normed and pooled, is the backbone's own feature.
    np.testing.assert_allclose(
        features[:, 8:], extract_features(backbone, images), atol=1e-5
    )


def test_blocks_can_go_without_norm(backbone, images):
    raw = extract_features(
        backbone, images, blocks=1, pooling="mean", normed=False
    )
    tokens = backbone.block_model([1], normed=False)(
        backbone.image_converter(images)
    )
    expected = keras.ops.convert_to_numpy(tokens["block_1"]).mean(axis=1)
    np.testing.assert_allclose(raw, expected, atol=1e-5)


def test_converted_images_can_be_given_as_they_are(backbone, images):
    converted = keras.ops.convert_to_numpy(backbone.image_converter(images))
    np.testing.assert_allclose(
        extract_features(backbone, converted, image_converter=None),
        extract_features(backbone, images),
        atol=1e-6,
    )


def test_an_image_scaled_to_one_is_warned_about(backbone, images):
    with pytest.warns(UserWarning, match="0..255"):
        extract_features(backbone, images / 255.0)


@pytest.mark.parametrize(
    "source, message",
    [
        (np.zeros((0, 8, 8, 1)), "no images"),
        ([], "no images"),
        (iter(()), "no images"),
        (np.full((2, 8, 8, 1), np.nan), "NaN"),
        (np.zeros((8, 8)), "array of images"),
        (np.zeros((2, 8, 8, 4)), "1\\) or"),
        (np.zeros((8, 8, 3)), "one image needs a batch axis"),
        (iter([np.zeros((8, 8, 1))]), "one image needs a batch axis"),
        (np.full((2, 8, 8, 1), 256.0), "0 to 255"),
        (np.full((2, 8, 8, 1), -1), "0 to 255"),
        (np.full((2, 8, 8, 1), 40_000, "uint16"), "0 to 255"),
        (np.zeros((2, 8, 8, 1), bool), "dtype bool"),
        (np.zeros((2, 8, 8, 1), complex), "dtype complex"),
        ([np.zeros((0, 8, 1))], "Received shape"),
        (["a.png"], "from a folder"),
        (
            iter([(np.zeros((3, 8, 8, 1)), np.zeros(2))]),
            "labels of shape \\(3,\\)",
        ),
        (iter([(np.zeros((3, 8, 8, 1)), np.eye(3))]), "take the argmax"),
        (3, "Received: int"),
        ([{"image": 1}], "image"),
        ("nowhere", "not a folder"),
    ],
)
def test_bad_images_are_refused(backbone, source, message):
    with pytest.raises(ValueError, match=message):
        extract_features(backbone, source)


def test_other_bad_arguments_are_refused(backbone, images):
    for options, message in [
        ({"pooling": "cls"}, "'map' or 'mean'"),
        ({"blocks": [3]}, "Block 3 does not exist"),
        ({"blocks": []}, "blocks is empty"),
        ({"blocks": "last"}, "blocks must be an int"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size must be an int"),
        ({"return_labels": True}, "no labels"),
        ({"image_converter": "other"}, "image_converter"),
    ]:
        with pytest.raises(ValueError, match=message):
            extract_features(backbone, images, **options)
    with pytest.raises(ValueError, match="resize"):
        extract_features(backbone, np.zeros((1, 9, 9, 1)), image_converter=None)


def test_corrupt_files_stop_or_are_skipped_when_asked(backbone, tmp_path):
    for name in ("a/1.png", "b/2.png"):
        path = tmp_path / name
        path.parent.mkdir()
        PIL.Image.new("L", (8, 8)).save(path)
    (tmp_path / "a" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="broken.png.*skip_unreadable"):
        extract_features(backbone, tmp_path)
    features, labels = extract_features(
        backbone, tmp_path, skip_unreadable=True, return_labels=True
    )
    assert features.shape == (2, 8)
    assert labels.tolist() == [0, 1]


def test_a_torch_loader_gives_the_same(backbone, images):
    torch = pytest.importorskip("torch")
    pairs = list(zip(images, range(7)))
    loader = torch.utils.data.DataLoader(pairs, batch_size=2)
    features, labels = extract_features(backbone, loader, return_labels=True)
    expected = extract_features(backbone, images)
    np.testing.assert_allclose(features, expected, atol=1e-6)
    assert labels.tolist() == list(range(7))


def test_a_grain_loader_gives_the_same(backbone, images):
    grain = pytest.importorskip("grain")
    loader = grain.MapDataset.source(list(images)).batch(2)
    np.testing.assert_allclose(
        extract_features(backbone, loader),
        extract_features(backbone, images),
        atol=1e-6,
    )


def test_every_step_has_the_shape_of_a_full_batch(
    backbone, images, monkeypatch
):
    shapes = []
    original = keras.Model.predict_on_batch

    def spy(model, inputs):
        shapes.append(inputs.shape)
        return original(model, inputs)

    monkeypatch.setattr(keras.Model, "predict_on_batch", spy)
    extract_features(backbone, images, batch_size=4)
    assert shapes == [(4, 8, 8, 1)] * 2


def test_a_backbone_without_converter_does_not_guess(images):
    bare = ViT22BBackbone(
        (8, 8, 1), 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
    )
    with pytest.raises(ValueError, match="no image_converter"):
        extract_features(bare, images)


def test_a_classifier_is_refused_with_its_backbone(backbone, images):
    classifier = ViT22BImageClassifier(backbone, 2)
    with pytest.raises(ValueError, match="of a classifier, its `backbone`"):
        extract_features(classifier, images)
