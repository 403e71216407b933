"""Images from arrays, folders and loaders, in a known order."""

import hashlib
import itertools
import logging
import os
import pathlib

import numpy as np

from keras_vit22b.models.image_folder import ImageFiles
from keras_vit22b.models.image_folder import ImageFolder
from keras_vit22b.models.labelled_images import LabelledImages

logger = logging.getLogger(__name__)


class ImageSource:
    """Images one after another, numbered from 0.

    Args:
        images: as in `extract_features`.
        labels: `(n,)`, of an array or a list of images, or `None`.
        skip_unreadable: bool. Whether to leave out images of a folder that
            cannot be decoded.

    Attributes:
        count: int, or `None` where it is not known.
        class_names: list of strings, empty where they are not known.
        can_skip: bool. Whether it can begin at any image without reading those
            before.

    Raises:
        ValueError: if these are no images.
    """

    def __init__(self, images, labels=None, skip_unreadable=False):
        self.class_names = []
        if isinstance(images, (str, pathlib.Path)):
            images = ImageFolder(images)
        given = labels is not None
        if isinstance(images, (ImageFolder, LabelledImages)):
            if given:
                raise ValueError("These images have labels of their own.")
            labels, self.class_names = images.labels, images.class_names
        sequence = isinstance(images, (ImageFiles, LabelledImages, list, tuple))
        if isinstance(images, LabelledImages):
            images = images.images
        self._images = images
        self._skip_unreadable = skip_unreadable
        self.can_skip, self.count = True, None
        if hasattr(images, "shape"):
            _check_batch(images, "An array of images")
        elif sequence:
            pass
        elif hasattr(images, "__iter__"):
            self.can_skip = False
        else:
            raise ValueError(
                "images must be an array, a list, a folder or an iterable of "
                f"batches. Received: {type(images).__name__}."
            )
        if self.can_skip:
            self.count = len(images)
        self._labels = None
        if labels is not None:
            if not self.can_skip:
                raise ValueError(
                    "labels are of an array or a list of images; a loader has "
                    "its own."
                )
            self._labels = _check_labels(labels, self.count)

    def batches(self, size, first=0):
        """Yield numbers, images and labels of some images at a time.

        Args:
            size: int. The most images of a batch.
            first: int. The image to begin with.
        """
        samples = self._samples(first)
        while batch := list(itertools.islice(samples, size)):
            yield tuple(zip(*batch))

    def describe(self):
        """Return a dict by which to tell these images from others.

        Of a folder, names and sizes of files count, and of a loader nothing,
        since it is read once.
        """
        if not self.can_skip:
            return {"kind": "loader"}
        digest = hashlib.sha256()
        if isinstance(self._images, ImageFiles):
            root = os.path.commonpath([p.parent for p in self._images.paths])
            for path in self._images.paths:
                name = path.relative_to(root).as_posix()
                digest.update(f"{name}\0{path.stat().st_size}\n".encode())
            kind = "files"
        else:
            for index in range(self.count):
                image = self._images[index]
                image = np.ascontiguousarray(image)
                digest.update(f"{image.dtype} {image.shape}\n".encode())
                digest.update(image.view(np.uint8).reshape(-1))
            kind = "array"
        return {
            "kind": kind,
            "count": self.count,
            "sha256": digest.hexdigest(),
            "order": "as given",
        }

    def _samples(self, first):
        """Return an iterator over `(number, image, label or None)`."""
        if isinstance(self._images, ImageFiles):
            return self._file_samples(first)
        if self.can_skip:
            labels = self._labels
            return (
                (i, np.asarray(self._images[i]), _at(labels, i))
                for i in range(first, self.count)
            )
        samples = _loader_samples(self._images)
        numbered = ((i, *sample) for i, sample in enumerate(samples))
        return itertools.islice(numbered, first, None)

    def _file_samples(self, first):
        for index in range(first, self.count):
            try:
                image = self._images[index]
            except ValueError as error:
                if not self._skip_unreadable:
                    raise ValueError(
                        f"{error}. skip_unreadable leaves such images out."
                    ) from error
                logger.warning("%s; left out.", error)
                continue
            yield index, image, _at(self._labels, index)


def _at(labels, index):
    return None if labels is None else labels[index]


def _check_batch(images, what):
    """Raise unless an array is images, rather than one image."""
    shape = tuple(images.shape)
    one = len(shape) == 3 and shape[-1] in (1, 3)
    if len(shape) not in (3, 4) or one:
        raise ValueError(
            f"{what} must be (n, height, width) or (n, height, width, "
            f"channels). Received shape {shape}"
            + ("; one image needs a batch axis." if one else ".")
        )


def _loader_samples(loader):
    for element in loader:
        if isinstance(element, dict):
            raise ValueError(
                "A loader must give images or (images, labels). Received a "
                f"dict with keys {sorted(element)}."
            )
        labels = None
        if isinstance(element, (tuple, list)) and _is_labelled(element):
            element, labels = element[:2]
        if not isinstance(element, (tuple, list)):
            element = np.asarray(element)
            _check_batch(element, "A batch of a loader")
        yield from zip(
            map(np.asarray, element), _check_labels(labels, len(element))
        )


def _is_labelled(element):
    """Tell (images, labels, ...) from a list of images."""
    return len(element) > 1 and (
        isinstance(element, tuple) or np.ndim(element[1]) < 2
    )


def _check_labels(labels, count):
    if labels is None:
        return [None] * count
    labels = np.asarray(labels)
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise ValueError(
            f"{count} images need labels of shape ({count},). Received shape "
            f"{labels.shape}; of one-hot labels, take the argmax."
        )
    return labels
