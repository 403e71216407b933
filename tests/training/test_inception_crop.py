"""Crops are parts of the image, interpolated linearly."""

import keras
import numpy as np
import pytest

from keras_vit22b.training import InceptionCrop


def ramps(n, height, width):
    """Images whose two channels are the row and the column of a pixel."""
    rows, columns = np.mgrid[:height, :width].astype("float32")
    return np.repeat(np.stack([rows, columns], -1)[None], n, 0)


def crop(layer, images, **kwargs):
    return keras.ops.convert_to_numpy(layer(images, **kwargs))


def test_the_whole_image_stays_as_it_is():
    images = np.random.default_rng(0).normal(size=(2, 5, 7, 3))
    images = images.astype("float32")
    layer = InceptionCrop(5, 7, area=(1, 1), aspect=(7 / 5, 7 / 5), flip=False)
    np.testing.assert_allclose(crop(layer, images), images, atol=1e-5)


def test_crops_are_upright_parts_of_the_wanted_area_and_aspect():
    layer = InceptionCrop(16, 16, area=(0.2, 0.5), seed=1, flip=False)
    outputs = crop(layer, ramps(200, 64, 64))
    steps = np.diff(outputs, axis=1)[..., 0], np.diff(outputs, axis=2)[..., 1]
    heights, widths = (16 * np.median(s, axis=(1, 2)) / 64 for s in steps)
    areas, aspects = heights * widths, widths / heights
    assert 0.19 < areas.min() < 0.23 and 0.47 < areas.max() < 0.51
    assert 0.74 < aspects.min() < 0.8 and 1.25 < aspects.max() < 1.35
    # A row of the result is a row of the image.
    assert np.ptp(outputs[..., 0], axis=2).max() < 1e-3
    assert outputs.min() >= 0 and outputs.max() <= 63
    starts = outputs[:, 0, 0]
    assert np.ptp(starts, axis=0).min() > 10


def test_the_host_crops_as_the_layer_does(monkeypatch):
    images = np.random.default_rng(0).normal(size=(6, 9, 7, 3))
    drawn = np.random.default_rng(5).random((5, 6), "float32")
    monkeypatch.setattr(keras.random, "uniform", lambda *args, **kwargs: drawn)
    layer = InceptionCrop(4, 5)
    on_host = layer.crop_on_host(images, drawn)
    assert on_host.dtype == "float32"
    np.testing.assert_allclose(on_host, crop(layer, images), atol=1e-5)


def test_half_of_the_images_are_mirrored():
    layer = InceptionCrop(8, 8, area=(1, 1), aspect=(1, 1), seed=1)
    outputs = crop(layer, ramps(200, 8, 8))
    mirrored = outputs[:, 0, 0, 1] > outputs[:, 0, -1, 1]
    assert 70 < mirrored.sum() < 130
    np.testing.assert_allclose(
        outputs[mirrored][:, :, ::-1], ramps(mirrored.sum(), 8, 8), atol=1e-5
    )


def test_a_seed_gives_the_same_crops():
    images = ramps(4, 9, 6)
    first, second = (
        crop(InceptionCrop(4, 4, seed=3), images) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    layer = InceptionCrop(4, 4, seed=3)
    assert np.abs(crop(layer, images) - crop(layer, images)).max() > 0


def test_without_training_images_are_resized():
    images = ramps(2, 8, 8)
    layer = InceptionCrop(4, 4)
    outputs = crop(layer, images, training=False)
    wanted = keras.ops.convert_to_numpy(keras.ops.image.resize(images, (4, 4)))
    np.testing.assert_allclose(outputs, wanted)


@pytest.mark.parametrize("wrong", [{"area": (0.0, 1.0)}, {"aspect": (2, 1)}])
def test_wrong_ranges_are_errors(wrong):
    with pytest.raises(ValueError, match="must be"):
        InceptionCrop(4, 4, **wrong)
