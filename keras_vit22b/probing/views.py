"""Several random crops of each image."""

import dataclasses
import typing

import numpy as np


@dataclasses.dataclass(frozen=True)
class Views:
    """How each image is cropped at random, and how often.

    A crop follows from the seed, its number and the image's alone.

    Attributes:
        augmentation: a `training.InceptionCrop` of the size that the image
            converter wants.
        count: int. Crops of each image. Defaults to `10`, one an epoch of
            `SGDProbe`.
        seed: int. Defaults to `0`.
    """

    augmentation: typing.Any
    count: int = 10
    seed: int = 0

    def __post_init__(self):
        if not hasattr(self.augmentation, "crop_on_host"):
            raise ValueError(
                "augmentation must be a training.InceptionCrop. Received: "
                f"{self.augmentation!r}."
            )
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(
                f"count must be a positive int. Received: {self.count!r}."
            )

    def describe(self):
        """Return the settings as JSON."""
        config = self.augmentation.get_config()
        keys = ("name", "trainable", "dtype", "seed")
        return {
            "count": self.count,
            "seed": self.seed,
            "augmentation": {
                k: list(v) if isinstance(v, tuple) else v
                for k, v in config.items()
                if k not in keys
            },
        }

    def crop(self, images, numbers):
        """Return a list of the crops of each view.

        Args:
            images: list of arrays `(height, width[, channels])`.
            numbers: list of int. Which images these are.
        """
        return [
            [
                self.augmentation.crop_on_host(
                    np.atleast_3d(image)[None], self._draw(number, view)
                )[0]
                for image, number in zip(images, numbers)
            ]
            for view in range(self.count)
        ]

    def _draw(self, number, view):
        generator = np.random.default_rng((self.seed, view, number))
        return generator.random((5, 1), "float32")
