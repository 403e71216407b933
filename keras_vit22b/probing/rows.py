"""Features as rows that are read when they are needed.

Whatever has a shape `(n, d)` and gives rows for a slice will do: an array, a
memory map, or the features of a `FeatureStore`. Probes read some rows at a
time, so that memory does not grow with their number.
"""

import abc

import numpy as np

from keras_vit22b.probing.feature_store import check_same_origin

# Rows of 6,144 numbers take 100 MB.
CHUNK = 4096


def check_rows(features, labels=None, *, views=False):
    """Return features that slice, and labels as an array, if they agree.

    Args:
        features: `(n, d)`: an array, or what gives arrays for slices.
        labels: `(n,)`, integers or strings. Defaults to `None`.
        views: bool. Whether `(n, views, d)` will do as well. Defaults to
            `False`.

    Returns:
        The features, or a pair of them and the labels.

    Raises:
        ValueError: if shapes disagree or there is no row.
    """
    if not hasattr(features, "shape"):
        features = np.asarray(features)
    shape = tuple(features.shape)
    if len(shape) not in ((2, 3) if views else (2,)) or 0 in shape:
        raise ValueError(
            f"Expected features (n, d){' or (n, views, d)' if views else ''}, "
            f"none of them 0. Received shape {shape}."
        )
    if labels is None:
        return features
    labels = np.asarray(labels)
    if labels.shape != shape[:1]:
        raise ValueError(
            "Expected a label for each row of features. Received shapes "
            f"{shape} and {labels.shape}."
        )
    return features, labels


def check_classes(labels):
    """Return the classes, sorted, and the index of each label's.

    Raises:
        ValueError: if labels are not finite or of fewer than two classes.
    """
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ValueError("Labels hold NaN or infinite values.")
    classes, indices = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(
            "A probe needs at least two classes. Received only "
            f"{classes.tolist()}."
        )
    return classes, indices


def chunks(features, *, dtype="float32"):
    """Yield `(start, rows)`, checked to be finite.

    Raises:
        ValueError: if a row holds a value that is not.
    """
    for start in range(0, features.shape[0], CHUNK):
        rows = np.asarray(features[start : start + CHUNK], dtype)
        check_finite(rows, range(start, start + len(rows)))
        yield start, rows


def check_finite(rows, numbers):
    """Raise if a row holds NaN or an infinite value, and name the first.

    Args:
        rows: `(m, d)`.
        numbers: sequence of `m` ints. Which rows they are.
    """
    if np.isfinite(rows).all():
        return
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))[0]
    raise ValueError(
        f"Features hold NaN or infinite values, first in row {numbers[bad]}."
    )


class Subset:
    """Some rows of features, read when they are asked for.

    Args:
        features: `(n, d)`: what gives rows for an array of ints.
        rows: int array `(m,)`, ascending.
    """

    def __init__(self, features, rows):
        self._features, self._rows = features, rows
        self.shape = (len(rows), *features.shape[1:])
        origin = getattr(features, "origin", None)
        if origin is not None:
            self.origin = origin

    def __getitem__(self, key):
        return self._features[self._rows[key]]


def split(count, held_out, seed):
    """Return rows to fit and rows held out, both ascending.

    Args:
        count: int. Of all rows.
        held_out: float. Share of them.
        seed: int.

    Raises:
        ValueError: if one of the two would be empty.
    """
    held = round(count * held_out)
    if not 0 < held < count:
        raise ValueError(
            f"{held_out:g} of {count} images leaves none to train on or none "
            "to choose by."
        )
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[held:]), np.sort(order[:held])


class FittedProbe(abc.ABC):
    """What a probe's `fit` returns; the interface of scikit-learn.

    Attributes:
        classes_: array `(c,)`, sorted. What `predict` chooses from.
    """

    def __init__(self, classes, features):
        """Args: the classes, and the features that were fitted."""
        self.classes_ = classes
        self.n_features_in_ = features.shape[-1]
        self._origin = getattr(features, "origin", None)

    @abc.abstractmethod
    def _probabilities(self, rows):
        """Return `(m, c)` for features `(m, d)`."""

    def predict_proba(self, features):
        """Return probabilities `(n, c)`, float32, in the order of `classes_`.

        Args:
            features: `(n, d)`.

        Raises:
            ValueError: if `d` is not that of the training features, both are
                of stores and were made differently, or a feature is not
                finite.
        """
        features = check_rows(features)
        check_same_origin(self._origin, getattr(features, "origin", None))
        if features.shape[1] != self.n_features_in_:
            raise ValueError(
                f"The probe was fitted on features of {self.n_features_in_} "
                f"numbers. Received {features.shape[1]}."
            )
        return np.concatenate(
            [
                np.asarray(self._probabilities(rows), "float32")
                for _, rows in chunks(features)
            ]
        )

    def predict(self, features):
        """Return the likeliest class of each row, `(n,)`."""
        return self.classes_[self.predict_proba(features).argmax(axis=1)]

    def score(self, features, labels):
        """Return the accuracy, 0 to 1."""
        features, labels = check_rows(features, labels)
        return float((self.predict(features) == labels).mean())
