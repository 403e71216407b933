"""Crops of random area and aspect, resized, and flips.

Source: Szegedy et al., 2015, section 6, https://arxiv.org/abs/1409.4842
"""

import math

import keras
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
        batch, height, width, _ = ops.shape(images)
        if not training:
            return ops.image.resize(images, (self.height, self.width))
        drawn = keras.random.uniform((5, batch), seed=self.seed_generator)
        low, high = self.area
        area = low + (high - low) * drawn[0]
        low, high = map(math.log, self.aspect)
        aspect = ops.exp(low + (high - low) * drawn[1])
        # As parts of the image's sides.
        shape = height / width
        rows = ops.minimum(ops.sqrt(area / aspect / shape), 1.0)
        columns = ops.minimum(ops.sqrt(area * aspect * shape), 1.0)
        flip = drawn[4] < 0.5 if self.flip else ops.zeros((batch,), "bool")
        down = _samples(
            drawn[2] * (1 - rows), rows, height, self.height, images.dtype
        )
        across = _samples(
            drawn[3] * (1 - columns), columns, width, self.width, images.dtype
        )
        across = ops.where(flip[:, None, None], across[:, ::-1], across)
        return ops.einsum("byh,bhwc,bxw->byxc", down, images, across)

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


def _samples(start, part, size, samples, dtype):
    """Return matrices `(batch, samples, size)` that interpolate linearly.

    Args:
        start: tensor `(batch,)`. Where the crop starts, of the side.
        part: tensor `(batch,)`. Its length, of the side.
        size: int. Pixels of the side.
        samples: int. Pixels of the result.
        dtype: string.
    """
    centers = (ops.arange(samples, dtype="float32") + 0.5) / samples
    position = (start[:, None] + part[:, None] * centers) * size - 0.5
    position = ops.clip(position, 0, size - 1)[..., None]
    pixels = ops.arange(size, dtype="float32")
    return ops.cast(ops.maximum(1 - ops.abs(position - pixels), 0), dtype)
