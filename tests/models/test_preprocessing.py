"""Raw images to the model's input, the same however they come."""

import logging

import keras
import numpy as np
import PIL.Image
import pytest
from keras import ops

from keras_vit22b import ViT22BImageClassifierPreprocessor
from keras_vit22b import ViT22BImageConverter


def pixels(*shape):
    generator = np.random.default_rng(9)
    return generator.integers(0, 256, shape, "uint8")


def convert(converter, images):
    return ops.convert_to_numpy(converter(images))


def test_values_are_scaled_and_shifted():
    images = pixels(2, 4, 4, 3)
    output = convert(ViT22BImageConverter(), images)
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, images / 127.5 - 1, atol=1e-6)
    assert output.min() >= -1 and output.max() <= 1


def test_each_channel_can_have_its_own_scale_and_offset():
    images = pixels(2, 4, 4, 3)
    scale, offset = (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)
    converter = ViT22BImageConverter(scale=scale, offset=offset)
    np.testing.assert_allclose(
        convert(converter, images),
        images * np.array(scale) + np.array(offset),
        rtol=1e-5,
    )


def test_no_scale_and_no_offset_keep_the_pixels():
    images = pixels(2, 4, 4, 3)
    converter = ViT22BImageConverter(scale=None, offset=None)
    np.testing.assert_array_equal(convert(converter, images), images)


def test_integers_and_floats_give_the_same():
    images = pixels(2, 9, 7, 3)
    converter = ViT22BImageConverter((4, 4))
    expected = convert(converter, images)
    for dtype in ("float32", "int32", "float64", "float16"):
        np.testing.assert_array_equal(
            convert(converter, images.astype(dtype)), expected
        )


def test_one_image_and_a_batch_give_the_same():
    images = pixels(2, 9, 7, 3)
    converter = ViT22BImageConverter((4, 4))
    np.testing.assert_allclose(
        convert(converter, images[0]), convert(converter, images)[0], atol=1e-6
    )


# === Gray and RGB ===


def test_rgb_becomes_luma_for_a_gray_model(caplog):
    images = pixels(2, 4, 4, 3)
    converter = ViT22BImageConverter(channels=1, scale=None, offset=None)
    with caplog.at_level(logging.INFO, "keras_vit22b"):
        output = convert(converter, images)
    luma = images @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(output[..., 0], luma, rtol=1e-5)
    assert "Converting RGB images to gray" in caplog.text
    # As Pillow does, up to its rounding.
    theirs = np.array(PIL.Image.fromarray(images[0]).convert("L"))
    assert np.abs(output[0, ..., 0] - theirs).max() <= 1


def test_gray_is_repeated_for_an_rgb_model(caplog):
    images = pixels(2, 4, 4, 1)
    converter = ViT22BImageConverter(scale=None, offset=None)
    with caplog.at_level(logging.INFO, "keras_vit22b"):
        output = convert(converter, images)
    np.testing.assert_array_equal(output, np.repeat(images, 3, -1))
    assert "Converting gray images to RGB" in caplog.text


@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_of_gray_images_needs_no_axis_of_channels(channels):
    images = pixels(2, 28, 28, 1)
    converter = ViT22BImageConverter((7, 7), channels=channels)
    np.testing.assert_array_equal(
        convert(converter, images[..., 0]), convert(converter, images)
    )


@pytest.mark.parametrize("channels, given", [(1, 3), (3, 1)])
def test_conversion_can_be_refused(channels, given):
    converter = ViT22BImageConverter(channels=channels, convert_channels=False)
    kinds = {1: "gray", 3: "RGB"}
    message = f"takes {kinds[channels]} images .* Received {kinds[given]}"
    with pytest.raises(ValueError, match=message):
        converter(pixels(2, 4, 4, given))
    assert convert(converter, pixels(2, 4, 4, channels)).shape[-1] == channels


@pytest.mark.parametrize("shape", [(2, 4, 4, 4), (4, 4, 4), (2, 4, 4, 2)])
def test_other_channels_are_an_error(shape):
    with pytest.raises(ValueError, match="Received shape"):
        ViT22BImageConverter()(pixels(*shape))


def test_a_model_is_gray_or_rgb():
    with pytest.raises(ValueError, match="1 .gray. or 3 .RGB.. Received: 4"):
        ViT22BImageConverter(channels=4)


@pytest.mark.parametrize("argument", ["scale", "offset"])
def test_scale_and_offset_must_fit_the_channels(argument):
    with pytest.raises(ValueError, match=f"{argument} must be one number or 1"):
        ViT22BImageConverter(channels=1, **{argument: (1, 2, 3)})


# === Size ===


def test_shrinking_is_antialiased():
    # A ninth of the size: each output pixel lies on the middle of a square.
    rows, columns = np.mgrid[:36, :36]
    checkerboard = (255 * ((rows + columns) % 2))[..., None].astype("uint8")
    smooth = convert(ViT22BImageConverter((4, 4), channels=1), checkerboard)
    np.testing.assert_allclose(smooth, 0, atol=0.05)
    rough = ViT22BImageConverter((4, 4), channels=1, antialias=False)
    assert np.abs(convert(rough, checkerboard)).min() > 0.9


def test_shrinking_is_close_to_pillows():
    rows, columns = np.mgrid[:32, :48]
    image = np.stack([rows * 8, columns * 5, rows + columns], -1)
    image = image.astype("uint8")
    theirs = PIL.Image.fromarray(image).resize(
        (12, 8), PIL.Image.Resampling.BILINEAR
    )
    converter = ViT22BImageConverter((8, 12), scale=None, offset=None)
    np.testing.assert_allclose(convert(converter, image), theirs, atol=1)


def test_aspect_ratio_is_kept_by_cropping_the_middle():
    image = np.zeros((4, 12, 1), "uint8")
    image[:, 4:8] = 255
    converter = ViT22BImageConverter((4, 4), channels=1)
    np.testing.assert_allclose(convert(converter, image), 1)
    squeezed = ViT22BImageConverter(
        (4, 4), channels=1, crop_to_aspect_ratio=False
    )
    assert convert(squeezed, image).min() < 0


# === Where images come from ===


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_tf_data_pipeline_gives_the_same(channels, given):
    tf = pytest.importorskip("tensorflow")
    images = pixels(4, 9, 7, given)
    converter = ViT22BImageConverter((4, 6), channels=channels)
    expected = convert(converter, images)
    dataset = tf.data.Dataset.from_tensor_slices(images).batch(2).map(converter)
    output = np.concatenate(list(dataset.as_numpy_iterator()))
    np.testing.assert_allclose(output, expected, atol=1e-4)


def test_tensors_of_the_backend_and_lists_give_the_same():
    images = pixels(2, 9, 7, 3)
    converter = ViT22BImageConverter((4, 4))
    expected = convert(converter, images)
    np.testing.assert_allclose(
        convert(converter, ops.convert_to_tensor(images)), expected, atol=1e-6
    )
    listed = converter(list(images))
    np.testing.assert_allclose(np.stack(listed), expected, atol=1e-6)


def test_preprocessor_leaves_labels_alone():
    images, labels = pixels(2, 9, 7, 3), np.array([1, 0])
    converter = ViT22BImageConverter((4, 4))
    x, y = converter.make_preprocessor()(images, labels)
    np.testing.assert_allclose(x, converter(images), atol=1e-6)
    np.testing.assert_array_equal(y, labels)


# === Settings ===

SETTINGS = {
    "image_size": (8, 12),
    "channels": 1,
    "convert_channels": False,
    "scale": [0.5],
    "offset": 0.25,
    "interpolation": "bicubic",
    "antialias": False,
    "crop_to_aspect_ratio": False,
    "pad_to_aspect_ratio": True,
    "name": "mine",
}


def test_config_round_trip():
    converter = ViT22BImageConverter(**SETTINGS)
    config = converter.get_config()
    assert {k: config[k] for k in SETTINGS} == SETTINGS
    assert ViT22BImageConverter.from_config(config).get_config() == config
    preprocessor = converter.make_preprocessor()
    copy = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(preprocessor)
    )
    assert type(copy) is ViT22BImageClassifierPreprocessor
    assert copy.image_converter.get_config() == config


def test_settings_travel_with_the_preset(make_backbone, tmp_path):
    backbone = make_backbone((8, 12, 1))
    backbone.image_converter = ViT22BImageConverter(**SETTINGS)
    backbone.save_to_preset(tmp_path)
    for converter in (
        ViT22BImageConverter.from_preset(tmp_path),
        type(backbone).from_preset(tmp_path).image_converter,
    ):
        assert type(converter) is ViT22BImageConverter
        assert converter.get_config() == backbone.image_converter.get_config()
    other = ViT22BImageConverter.from_preset(tmp_path, antialias=True)
    assert other.antialias is True


def test_a_preset_without_converter_says_so(make_backbone, tmp_path):
    make_backbone().save_to_preset(tmp_path)
    with pytest.raises(ValueError, match="no image_converter.json"):
        ViT22BImageConverter.from_preset(tmp_path)
