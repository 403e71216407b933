"""From raw images to the model's input; settings travel with the preset."""

import logging
import warnings

import keras
import keras_hub
import numpy as np

from keras_vit22b.models.backbone import ViT22BBackbone
from keras_vit22b.weights import preset_config
from keras_vit22b.weights import preset_files

logger = logging.getLogger(__name__)

# ITU-R BT.601, as most image libraries convert to gray.
LUMA = (0.299, 0.587, 0.114)


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ViT22BImageConverter(keras_hub.layers.ImageConverter):
    """Match channels, resize, scale and offset images.

    Works on values of 0 to 255, in float32: `pixels * scale + offset` after
    resizing. RGB images given to a gray model become luma (ITU-R BT.601);
    gray ones given to an RGB model are repeated; the log says so, at level
    INFO.

    Args:
        image_size: `(height, width)` in pixels, or `None` to keep the size.
            Defaults to `None`.
        channels: int. Of the model: `1` for gray, `3` for RGB. Defaults to
            `3`.
        convert_channels: bool. Whether to convert between gray and RGB; if
            `False`, the other kind is an error. Defaults to `True`.
        scale: float or one per channel. Defaults to `1 / 127.5`.
        offset: float or one per channel. Defaults to `-1.0`.
        antialias: bool. Whether to filter when shrinking. Defaults to `True`,
            unlike keras-hub.
        **kwargs: `keras_hub.layers.ImageConverter` arguments, such as
            `interpolation` (`"bilinear"`) and `crop_to_aspect_ratio` (`True`).

    Call arguments:
        inputs: `(height, width, channels)` or a batch of such; gray images
            may lack the channel axis if batched.

    Returns:
        A float32 tensor with `channels` channels.

    Raises:
        ValueError: if the channels are neither 1 nor 3, or not to be
            converted.
    """

    backbone_cls = ViT22BBackbone

    def __init__(
        self,
        image_size=None,
        *,
        channels=3,
        convert_channels=True,
        scale=1 / 127.5,
        offset=-1.0,
        antialias=True,
        **kwargs,
    ):
        if channels not in (1, 3):
            raise ValueError(
                f"channels must be 1 (gray) or 3 (RGB). Received: {channels!r}."
            )
        for name, value in (("scale", scale), ("offset", offset)):
            if np.size(value) not in (1, channels):
                raise ValueError(
                    f"{name} must be one number or {channels}, one per "
                    f"channel. Received: {value!r}."
                )
        kwargs.setdefault("data_format", "channels_last")
        kwargs.setdefault("dtype", "float32")
        super().__init__(
            image_size=image_size,
            scale=scale,
            offset=offset,
            antialias=antialias,
            **kwargs,
        )
        self.channels = channels
        self.convert_channels = convert_channels

    @classmethod
    def from_preset(cls, handle, **kwargs):
        """Make the image converter of a preset.

        Args:
            handle: string or path. As in `ViT22BBackbone.from_preset`.
            **kwargs: arguments to override.

        Raises:
            ValueError: if the preset is unknown or has no converter.
        """
        with preset_files.open_preset(handle) as folder:
            converter = cls._from_folder(folder, **kwargs)
        if converter is None:
            raise ValueError(
                f"Preset {str(handle)!r} has no {preset_config.CONVERTER_FILE}."
            )
        return converter

    @classmethod
    def _from_folder(cls, folder, **kwargs):
        """Return the converter that a folder describes, or `None`."""
        config = preset_config.read_converter(folder)
        if config is None:
            return None
        return cls(**{**config, **kwargs})

    def call(self, inputs):
        if isinstance(inputs, dict):
            inputs = {**inputs, "images": self._match(inputs["images"])}
        elif isinstance(inputs, (list, tuple)):
            inputs = type(inputs)(self._match(x) for x in inputs)
        else:
            inputs = self._match(inputs)
        return super().call(inputs)

    def _match(self, images):
        """Return float32 images with the model's channels."""
        if not hasattr(images, "shape"):
            images = np.asarray(images)
        images = _to_float(images)
        if len(images.shape) == 3 and (images.shape[-1] or 0) > 4:
            # A batch of gray images without an axis of channels.
            images = images[..., None]
        found = images.shape[-1]
        if found == self.channels:
            return images
        kinds = {1: "gray", 3: "RGB"}
        if found not in kinds:
            raise ValueError(
                "Images must be (..., height, width, 1) or (..., height, "
                f"width, 3). Received shape {tuple(images.shape)}."
            )
        given, wanted = kinds[found], kinds[self.channels]
        if not self.convert_channels:
            raise ValueError(
                f"The model takes {wanted} images and convert_channels is "
                f"False. Received {given} images of shape "
                f"{tuple(images.shape)}."
            )
        logger.info("Converting %s images to %s.", given, wanted)
        if wanted == "RGB":
            return images * np.ones(3, "float32")
        red, green, blue = (images[..., i : i + 1] for i in range(3))
        return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue

    def convert_on_host(self, images):
        """Do the same with NumPy, for images that have the right size.

        So threads that load data need no backend: in those of several
        processes JAX 0.10 crashes.

        Args:
            images: array `(batch, height, width, channels)`.
        """
        images = self._match(np.asarray(images))
        if self.scale is not None:
            images = images * np.asarray(self.scale, "float32")
        if self.offset is not None:
            images = images + np.asarray(self.offset, "float32")
        return images

    def make_preprocessor(self):
        """Return a `ViT22BImageClassifierPreprocessor` that uses this."""
        return ViT22BImageClassifierPreprocessor(self, name="preprocessor")

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "channels": self.channels,
                "convert_channels": self.convert_channels,
            }
        )
        return config


def _to_float(images):
    """Cast to float32 in the images' own library."""
    if type(images).__module__.startswith("tensorflow"):
        import tensorflow as tf

        return tf.cast(images, tf.float32)
    if isinstance(images, np.ndarray):
        return images.astype("float32")
    return keras.ops.cast(images, "float32")


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ViT22BImageClassifierPreprocessor(
    keras_hub.models.ImageClassifierPreprocessor
):
    """Apply a `ViT22BImageConverter` to the images of labelled samples.

    Args:
        image_converter: a `ViT22BImageConverter`.
        **kwargs: `keras.layers.Layer` arguments.
    """

    backbone_cls = ViT22BBackbone
    image_converter_cls = ViT22BImageConverter


def convert_images(images, converter, image_shape):
    """Return the model's input for a list of images.

    Args:
        images: list of arrays `(height, width)` or `(height, width,
            channels)`, of any sizes.
        converter: a `ViT22BImageConverter`, or `None` for images that are
            converted already.
        image_shape: `(height, width, channels)`. What the model takes, or
            `None` for any.

    Returns:
        A float32 array `(n, height, width, channels)`.

    Raises:
        ValueError: if an image has another shape or holds no finite numbers,
            or none of 0 to 255 for a converter.
    """
    images = [x[..., None] if x.ndim == 2 else x for x in images]
    for image in images:
        if image.ndim != 3 or not image.size:
            raise ValueError(
                "An image must be (height, width) or (height, width, "
                f"channels). Received shape {image.shape}; files are read "
                "from a folder, given by its path."
            )
        if image.dtype.kind not in "uif":
            raise ValueError(
                f"An image must hold numbers. Received dtype {image.dtype}."
            )
        if image.dtype.kind == "f" and not np.isfinite(image).all():
            raise ValueError("An image holds NaN or infinite values.")
    if converter is not None:
        _check_range(images)
        # Images of one size are converted together.
        if len({x.shape for x in images}) == 1:
            images = np.stack(images)
            if _has_size(images, converter):
                inputs = converter.convert_on_host(images)
            else:
                inputs = _to_numpy(converter(images))
        else:
            inputs = np.concatenate(
                [_to_numpy(converter(x[None])) for x in images]
            )
    else:
        inputs = np.stack(images).astype("float32")
    if image_shape is not None and inputs.shape[1:] != tuple(image_shape):
        raise ValueError(
            f"The model takes images of shape {tuple(image_shape)}. Received "
            f"{inputs.shape[1:]}; an image_converter would resize them."
        )
    return inputs


def _has_size(images, converter):
    return (
        isinstance(converter, ViT22BImageConverter)
        and converter.image_size in (None, images.shape[1:3])
        and converter.compute_dtype == "float32"
        and converter.data_format == "channels_last"
    )


def _check_range(images):
    low, high = min(x.min() for x in images), max(x.max() for x in images)
    if low < 0 or high > 255:
        raise ValueError(
            f"Images hold values of {low:g} to {high:g}; the preset's "
            "converter expects 0 to 255. Rescale them, or pass "
            "image_converter=None for images that are converted already."
        )
    if high <= 1 and any(x.dtype.kind == "f" and x.any() for x in images):
        warnings.warn(
            "Images look scaled to 0..1, but the preset's converter expects "
            "0..255. Multiply by 255, or pass image_converter=None for images "
            "that are converted already.",
            stacklevel=4,
        )


def _to_numpy(tensor):
    if type(tensor).__module__.startswith("tensorflow"):
        return tensor.numpy()
    return keras.ops.convert_to_numpy(tensor)
