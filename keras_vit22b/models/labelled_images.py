"""Labelled images from what people have: arrays, folders, tables, data sets."""

import csv
import dataclasses
import pathlib
import typing
import zipfile

import numpy as np

from keras_vit22b.models.image_folder import ImageFiles
from keras_vit22b.models.image_folder import ImageFolder
from keras_vit22b.models.image_folder import decode


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images and what is known of them.

    Attributes:
        name: string. For reports.
        images: sequence of arrays `(height, width[, channels])`, of 0 to 255,
            read when their turn comes.
        labels: int array `(n,)`, or multi-hot `(n, classes)`, or `None`.
        class_names: list of strings, empty where they are not known.
        columns: dict from name to an array of strings `(n,)`: what else a table
            says of each image, such as its group.
    """

    name: str
    images: typing.Sequence
    labels: np.ndarray | None = None
    class_names: list = dataclasses.field(default_factory=list)
    columns: dict = dataclasses.field(default_factory=dict)

    def __len__(self):
        return len(self.images)

    def choose(self, rows):
        """Return some of the images, in the order of `rows`.

        Args:
            rows: int array `(m,)`.
        """
        rows = np.asarray(rows, int)
        if isinstance(self.images, ImageFiles):
            images = ImageFiles([self.images.paths[row] for row in rows])
        elif isinstance(self.images, np.ndarray):
            images = self.images[rows]
        else:
            images = SomeImages(self.images, rows)
        return dataclasses.replace(
            self,
            images=images,
            labels=None if self.labels is None else self.labels[rows],
            columns={name: c[rows] for name, c in self.columns.items()},
        )


class SomeImages:
    """Images of a sequence at some places, read when their turn comes.

    Args:
        images: sequence of arrays.
        rows: int array `(m,)`.
    """

    def __init__(self, images, rows):
        self._images, self._rows = images, rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._images[int(self._rows[index])]


def read_images(source):
    """Return the images that a name or path stands for.

    Args:
        source: one of

            - `"digits"`, scikit-learn's, or `"fashion_mnist"` and
              `"fashion_mnist_test"`, from Keras' cache;
            - a folder with one sub-folder a class, or of images alone;
            - a `.csv` file with a column `path`, of image files relative to
              it, and one `label`, of integers or names; others are kept;
            - an `.npz` file of `images` and, if there are any, `labels`;
            - a folder that `save_to_disk` of Hugging Face's datasets wrote,
              with columns `image` and `label`; needs datasets.

    Returns:
        `LabelledImages`.

    Raises:
        ImportError: without datasets, if they are needed.
        OSError: if Fashion-MNIST is not there.
        ValueError: if there are no images, or not as they should be.
    """
    if source == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = (digits.images[..., None] * (255 / 16)).astype("float32")
        return LabelledImages("scikit-learn's digits", images, digits.target)
    if source in ("fashion_mnist", "fashion_mnist_test"):
        images, labels = load_fashion_mnist(test=source.endswith("test"))
        return LabelledImages(source, images[..., None], labels.astype(int))
    path = pathlib.Path(source).expanduser()
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix == ".csv":
        return _read_csv(path)
    if (path / "dataset_dict.json").exists():
        raise ValueError(
            f"{path} holds several data sets. Give the folder of one, such as "
            f"{path / 'train'}."
        )
    if (path / "dataset_info.json").exists():
        return _read_dataset(path)
    folder = ImageFolder(path)
    name = folder.path.name or str(folder.path)
    return LabelledImages(name, folder, folder.labels, folder.class_names)


def load_fashion_mnist(test=False):
    """Return images `(n, 28, 28)` of 0 to 255 and labels `(n,)`.

    Args:
        test: bool. Whether the 10,000 of the test set, in place of the 60,000
            to train on. Defaults to `False`.

    Raises:
        OSError: if they are not in Keras' cache and cannot be loaded.
    """
    import keras

    try:
        return keras.datasets.fashion_mnist.load_data()[int(test)]
    except Exception as error:  # Keras raises a bare Exception.
        raise OSError(
            f"Fashion-MNIST could not be loaded: {error} "
            "tools/fashion_mnist.sh fills Keras' cache from Debian's package."
        ) from error


def _read_npz(path):
    try:
        opened = np.load(path)
    except (ValueError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no .npz file of arrays.") from None
    with opened as arrays:
        if "images" not in arrays:
            raise ValueError(
                f"{path} has no images. It holds "
                f"{', '.join(arrays) or 'nothing'}."
            )
        images = arrays["images"]
        labels = arrays["labels"] if "labels" in arrays else None
    if labels is not None and len(labels) != len(images):
        raise ValueError(
            f"{path} has {len(images)} images and {len(labels)} labels."
        )
    return LabelledImages(path.stem, images, labels)


def _read_csv(path):
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"Cannot read {path}: {error}.") from None
    names = list(rows[0]) if rows else []
    if "path" not in names:
        raise ValueError(
            f"{path} needs lines, and a column path. It has columns "
            f"{', '.join(map(str, names)) or 'none'}."
        )
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(
                f"{path}, line {line}: expected {len(names)} values."
            )
    images = ImageFiles([path.parent / row["path"] for row in rows])
    columns = {
        name: np.array([row[name] for row in rows])
        for name in names
        if name not in ("path", "label")
    }
    labels, class_names = None, []
    if "label" in names:
        labels, class_names = _as_labels([row["label"] for row in rows])
    return LabelledImages(path.stem, images, labels, class_names, columns)


def _as_labels(texts):
    """Return labels and their names: none, if all are integers."""
    if all(text.isdecimal() for text in texts):
        return np.array(texts).astype(int), []
    names, labels = np.unique(texts, return_inverse=True)
    return labels, names.tolist()


class _DatasetImages:
    """Images of a `datasets.Dataset`, decoded when they are read."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        return decode(self._dataset[int(index)]["image"])


def _read_dataset(path):
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{path} is of Hugging Face's datasets: pip install datasets"
        ) from None
    dataset = datasets.load_from_disk(str(path))
    missing = {"image", "label"} - set(dataset.column_names)
    if missing:
        raise ValueError(
            f"{path} has no column {' or '.join(sorted(missing))}. Rename "
            f"one of {', '.join(dataset.column_names)}."
        )
    labels = np.asarray(dataset["label"])
    names = getattr(dataset.features["label"], "names", None) or []
    return LabelledImages(path.name, _DatasetImages(dataset), labels, names)
