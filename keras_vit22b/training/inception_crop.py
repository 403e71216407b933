"""Crops of random area and aspect, resized, and flips.

Source: Szegedy et al., 2015, section 6, https://arxiv.org/abs/1409.4842
"""

import math

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable(package="keras_vit22b")
class InceptionCrop(keras.layers.Layer):
    """Crop a random part of each image, resize it, and flip half of them.

    A crop's area is uniform in `area`, times that of the image, and the
    logarithm of its aspect uniform; a side longer than the image's is cut to
    it. Pixels are interpolated linearly, without antialiasing.

    Args:
        height: int. Of the result.
        width: int.
        area: pair of floats. Defaults to `(0.05, 1.0)`.
        aspect: pair of floats, width by height. Defaults to `(3 / 4, 4 / 3)`.
        flip: bool. Whether half of the images are mirrored. Defaults to
            `True`.
        seed: int or `keras.random.SeedGenerator`. Defaults to `None`.
        **kwargs: `keras.layers.Layer` arguments.

    Call arguments:
        images: tensor `(batch, height, width, channels)`.
        training: bool. Without training images are resized alone.

    Returns:
        A float tensor `(batch, height, width, channels)`.

    Raises:
        ValueError: if a range is not one.
    """

    def __init__(
        self,
        height,
        width,
        *,
        area=(0.05, 1.0),
        aspect=(3 / 4, 4 / 3),
        flip=True,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not 0 < area[0] <= area[1] <= 1:
            raise ValueError(
                f"area must be (low, high) in (0, 1]. Received: {area}."
            )
        if not 0 < aspect[0] <= aspect[1]:
            raise ValueError(
                f"aspect must be (low, high) above 0. Received: {aspect}."
            )
        self.height, self.width = height, width
        self.area, self.aspect = tuple(area), tuple(aspect)
        self.flip = flip
        self.seed = seed
        self.seed_generator = (
            seed
            if isinstance(seed, keras.random.SeedGenerator)
            else keras.random.SeedGenerator(seed)
        )

    def call(self, images, training=True):
        images = ops.cast(images, self.compute_dtype)
        if not training:
            return ops.image.resize(images, (self.height, self.width))
        shape = (5, ops.shape(images)[0])
        drawn = keras.random.uniform(shape, seed=self.seed_generator)
        return ops.cast(self._crop(images, drawn, ops), self.compute_dtype)

    def crop_on_host(self, images, drawn):
        """Do the same with NumPy, in float32, as loaders of data want it.

        Args:
            images: array `(batch, height, width, channels)`.
            drawn: array `(5, batch)`, uniform in [0, 1).
        """
        return self._crop(np.asarray(images, "float32"), drawn, np)

    def _crop(self, images, drawn, xp):
        """Crop by numbers `(5, batch)` in [0, 1), with NumPy or Keras."""
        _, height, width, channels = xp.shape(images)
        low, high = self.area
        area = low + (high - low) * drawn[0]
        low, high = map(math.log, self.aspect)
        aspect = xp.exp(low + (high - low) * drawn[1])
        # As parts of the image's sides.
        shape = height / width
        rows = xp.minimum(xp.sqrt(area / aspect / shape), 1.0)
        columns = xp.minimum(xp.sqrt(area * aspect * shape), 1.0)
        down = _samples(drawn[2] * (1 - rows), rows, height, self.height, xp)
        across = _samples(
            drawn[3] * (1 - columns), columns, width, self.width, xp
        )
        if self.flip:
            mirrored = drawn[4][:, None, None] < 0.5
            across = xp.where(mirrored, across[:, ::-1], across)
        images = xp.reshape(images, (-1, height, width * channels))
        images = xp.matmul(down, images)
        images = xp.reshape(images, (-1, self.height, width, channels))
        return xp.matmul(across[:, None], images)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], self.height, self.width, input_shape[-1])

    def get_config(self):
        return {
            **super().get_config(),
            "height": self.height,
            "width": self.width,
            "area": self.area,
            "aspect": self.aspect,
            "flip": self.flip,
            "seed": self.seed if isinstance(self.seed, int) else None,
        }


def _samples(start, part, size, samples, xp):
    """Return matrices `(batch, samples, size)` that interpolate linearly.

    Args:
        start: tensor `(batch,)`. Where the crop starts, of the side.
        part: tensor `(batch,)`. Its length, of the side.
        size: int. Pixels of the side.
        samples: int. Pixels of the result.
        xp: `numpy` or `keras.ops`.
    """
    centers = (np.arange(samples, dtype="float32") + 0.5) / samples
    position = (start[:, None] + part[:, None] * centers) * size - 0.5
    position = xp.clip(position, 0, size - 1)[..., None]
    pixels = np.arange(size, dtype="float32")
    return xp.maximum(1 - xp.abs(position - pixels), 0)
