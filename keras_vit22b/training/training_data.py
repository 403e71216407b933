"""Training data whose order follows from a seed, so that it can go on."""

import functools
import os
import zlib

import numpy as np

from keras_vit22b.models.preprocessing import convert_images

# Batches that are made ahead, one a thread.
AHEAD = 4


class TrainingData:
    """Labelled images, shuffled and augmented, from any step onwards.

    Which images a step sees, and how they are cropped, follows from the seed
    and the number of the step alone. So a run that was killed goes on with
    the same images, and a run on many processes sees those of one. Images are
    read when their turn comes. Needs grain.

    Args:
        images: sequence of arrays `(height, width, channels)`, such as an
            array of all, or an `ImageFolder`; of values 0 to 255 if there is
            a converter.
        labels: int array `(n,)`, or multi-hot `(n, classes)`.
        image_shape: `(height, width, channels)`. What the model takes.
        converter: a `ViT22BImageConverter`, or `None` for images that are
            converted already. Defaults to `None`.
        augmentation: an `InceptionCrop`, such as of
            `Recipe.make_augmentation`, or `None`. Defaults to `None`.
        seed: int. Defaults to `0`.

    Raises:
        ImportError: without grain.
        ValueError: if there are no images, or another number of labels.

    Example:
    ```python
    data = keras_vit22b.training.TrainingData(images, labels, (28, 28, 1))
    classifier.fit(data.batches(128, start=0, stop=1000), epochs=1)
    ```
    """

    def __init__(
        self,
        images,
        labels,
        image_shape,
        *,
        converter=None,
        augmentation=None,
        seed=0,
    ):
        _grain()
        labels = np.asarray(labels)
        if not len(images) or len(images) != len(labels):
            raise ValueError(
                f"Every image needs a label. Received {len(images)} images "
                f"and {len(labels)} labels."
            )
        multi_hot = labels.ndim == 2 and labels.shape[1] > 1
        if labels.ndim != 1 and not multi_hot:
            raise ValueError(
                "labels must be (n,), or multi-hot (n, classes). Received "
                f"shape {labels.shape}."
            )
        if not multi_hot and (
            labels.dtype.kind not in "iu" or labels.min() < 0
        ):
            raise ValueError(
                "labels must be integers from 0. Received: "
                f"{labels.dtype} such as {labels.min()}."
            )
        if multi_hot and not np.isin(labels, (0, 1)).all():
            raise ValueError(
                "Multi-hot labels are 0 or 1. Received values from "
                f"{labels.min()} to {labels.max()}."
            )
        self.images, self.labels = images, labels
        self.image_shape = tuple(image_shape)
        self.converter = converter
        self.augmentation = augmentation
        self.seed = seed
        # The last two, since threads may be in different passes.
        self._order = functools.lru_cache(2)(self._shuffle)

    def __len__(self):
        return len(self.images)

    def describe(self):
        """Return a dict by which to tell these data from others.

        Of the images, a few count.
        """
        chosen = np.linspace(0, len(self) - 1, min(len(self), 16)).astype(int)
        sample = 0
        for index in chosen:
            image = np.ascontiguousarray(self.images[int(index)])
            sample = zlib.crc32(image.tobytes(), sample)
        return {
            "images": len(self),
            "sample": sample,
            "labels": zlib.crc32(np.ascontiguousarray(self.labels).tobytes()),
            "seed": self.seed,
        }

    def batches(self, batch_size, *, start, stop, share=(0, 1)):
        """Return the batches of some steps.

        Images are shuffled anew in each pass, and a batch may hold the last of
        one pass and the first of the next.

        Args:
            batch_size: int. Images a step, of all processes.
            start: int. The first step, from 0.
            stop: int. The step before which to end.
            share: `(index, count)` of `distribution.data_share`: which part of
                each batch to give. Defaults to all.

        Returns:
            A `grain.IterDataset` of `(images, labels)`.

        Raises:
            ValueError: if the batch does not divide into the shares.
        """
        _check_share(batch_size, share)
        steps = _grain().MapDataset.range(start, stop)
        return self._load(
            steps.map(lambda step: self._batch(step, batch_size, share))
        )

    def in_order(self, batch_size, *, share=(0, 1), drop_remainder=False):
        """Return each image once, in order and without augmentation.

        Args:
            batch_size: int. Images a batch, of all processes.
            share: as in `batches`.
            drop_remainder: bool. Whether images that do not fill a batch are
                left out, as several shares need it. Defaults to `False`.

        Returns:
            A `grain.IterDataset` of `(images, labels)`.

        Raises:
            ValueError: if the batch does not divide into the shares, or the
                shares' images do not fill one.
        """
        _check_share(batch_size, share)
        index, count = share
        kept = len(self)
        if drop_remainder:
            kept -= kept % batch_size
        if not kept:
            raise ValueError(
                f"{len(self)} images do not fill a batch of {batch_size}."
            )

        def batch(start):
            stop = min(start + batch_size, kept)
            return self._read(np.arange(start + index, stop, count))

        starts = _grain().MapDataset.range(0, kept, batch_size)
        return self._load(starts.map(batch))

    def _batch(self, step, batch_size, share):
        positions = step * batch_size + np.arange(batch_size)
        passes, places = np.divmod(positions, len(self))
        indices = np.empty(batch_size, int)
        for number in np.unique(passes):
            order = self._order(int(number))
            indices[passes == number] = order[places[passes == number]]
        # Of the whole batch, so that crops do not depend on the shares.
        generator = np.random.default_rng((self.seed, 1, step))
        drawn = generator.random((5, batch_size), "float32")
        mine = slice(share[0], None, share[1])
        return self._read(indices[mine], drawn[:, mine])

    def _shuffle(self, number):
        """Return the order of one pass."""
        generator = np.random.default_rng((self.seed, 0, number))
        return generator.permutation(len(self))

    def _read(self, indices, drawn=None):
        images = [np.asarray(self.images[int(i)]) for i in indices]
        labels = self.labels[indices]
        if drawn is not None and self.augmentation is not None:
            images = self._augment(images, drawn)
            # Crops have the right size, so that this needs no backend.
            images, labels = self._convert((images, labels))
        return images, labels

    def _convert(self, batch):
        images, labels = batch
        if isinstance(images, list):
            images = convert_images(images, self.converter, self.image_shape)
        return images, labels

    def _load(self, batches):
        threads = min(AHEAD, os.cpu_count() or 1)
        options = _grain().ReadOptions(
            num_threads=threads, prefetch_buffer_size=AHEAD
        )
        # The second map runs in the thread that takes the batches.
        return batches.to_iter_dataset(options).map(self._convert)

    def _augment(self, images, drawn):
        crop = self.augmentation.crop_on_host
        images = [np.atleast_3d(image) for image in images]
        if len({image.shape for image in images}) == 1:
            return list(crop(np.stack(images), drawn))
        return [
            crop(image[None], drawn[:, i : i + 1])[0]
            for i, image in enumerate(images)
        ]


def _check_share(batch_size, share):
    if batch_size < 1 or batch_size % share[1]:
        raise ValueError(
            f"A batch of {batch_size} images does not divide into {share[1]} "
            "shares."
        )


@functools.cache
def _grain():
    try:
        import grain
    except ImportError:
        raise ImportError(
            "TrainingData reads images by grain: pip install grain"
        ) from None
    return grain
