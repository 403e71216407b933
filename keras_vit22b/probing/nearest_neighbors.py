"""Classes of the nearest training images vote."""

import dataclasses

import numpy as np
from scipy.special import softmax

from keras_vit22b.probing.rows import FittedProbe
from keras_vit22b.probing.rows import check_classes
from keras_vit22b.probing.rows import check_rows
from keras_vit22b.probing.rows import chunks


@dataclasses.dataclass(frozen=True)
class NearestNeighbors:
    """k nearest neighbours by cosine, weighted as in DINO.

    A neighbour's vote is `exp(cosine / temperature)`, over the sum of all
    votes. Of equal cosines the first training images count.

    Attributes:
        k: int. Neighbours. Defaults to `20`.
        temperature: float. Defaults to `0.07`.

    Reference:
        [Wu et al., 2018](https://arxiv.org/abs/1805.01978).
    """

    k: int = 20
    temperature: float = 0.07

    def __post_init__(self):
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be a positive int. Received: {self.k!r}.")
        if not 0 < self.temperature < np.inf:
            raise ValueError(
                f"temperature must be positive. Received: {self.temperature!r}."
            )

    def fit(self, features, labels):
        """Keep the training images; none is read.

        Args:
            features: `(n, d)`: an array, or what gives arrays for slices.
                Read whenever the probe is asked.
            labels: `(n,)`, integers or strings.

        Returns:
            A probe with `predict`, `predict_proba` and `score`.

        Raises:
            ValueError: if shapes disagree, or there are fewer than two classes
                or `k` images.
        """
        features, labels = check_rows(features, labels)
        if features.shape[0] < self.k:
            raise ValueError(
                f"{self.k} neighbours need as many training images. Received "
                f"{features.shape[0]}."
            )
        classes, indices = check_classes(labels)
        return FittedNearestNeighbors(self, features, classes, indices)


class FittedNearestNeighbors(FittedProbe):
    """What `NearestNeighbors.fit` returns."""

    def __init__(self, protocol, features, classes, indices):
        super().__init__(classes, features)
        self._protocol = protocol
        self._features = features
        self._indices = indices

    def _probabilities(self, rows):
        cosines, neighbors = self._search(unit(rows))
        votes = softmax(cosines / self._protocol.temperature, axis=1)
        shares = np.zeros((len(rows), len(self.classes_)))
        images = np.broadcast_to(np.arange(len(rows))[:, None], votes.shape)
        np.add.at(shares, (images, self._indices[neighbors]), votes)
        return shares

    def _search(self, queries):
        """Return cosines and training images, both `(m, k)`, best first."""
        k = self._protocol.k
        best = np.empty((len(queries), 0), "float32")
        images = np.empty((len(queries), 0), int)
        for start, rows in chunks(self._features):
            found = queries @ unit(rows).T
            columns = _largest(found, k)
            # The earlier come first, which of equal ones are to count.
            best = np.hstack([best, np.take_along_axis(found, columns, 1)])
            images = np.hstack([images, start + columns])
            columns = _largest(best, k)
            best = np.take_along_axis(best, columns, 1)
            images = np.take_along_axis(images, columns, 1)
        return best, images


def _largest(values, k):
    """Return the columns of each row's `k` largest values, largest first.

    Of equal values the first columns are taken.
    """
    columns = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    if values.shape[1] > k:
        least = -np.partition(-values, k - 1, axis=1)[:, k - 1 : k]
        # More than k where values are equal.
        count = (values >= least).sum(axis=1).max()
        columns = np.argsort(values < least, axis=1, kind="stable")[:, :count]
        values = np.take_along_axis(values, columns, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(columns, order, axis=1)


def unit(rows):
    """Return rows of length one, and rows of zeros as they are."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.maximum(lengths, np.finfo(rows.dtype).tiny)
