"""Least squares with an L2 penalty, in closed form."""

import dataclasses

import numpy as np
from scipy.special import softmax

from keras_vit22b.probing.rows import FittedProbe
from keras_vit22b.probing.rows import check_classes
from keras_vit22b.probing.rows import check_rows
from keras_vit22b.probing.rows import chunks

EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class RidgeProbe:
    """Ridge regression on labels of -1 and 1, as big_vision's few-shot probe.

    Features are standardized by their own mean and deviation, and get one more
    that is constant: so large that the penalty hardly touches the bias. In
    float64; rows are read twice, some at a time. Memory is two matrices of
    `min(n, d + 1)` squared.

    Attributes:
        l2: float. Strength of the penalty. Defaults to `1024.0`.
        constant: float. The feature that is added. Defaults to `100.0`.

    Reference:
        big_vision, evaluators/fewshot_lsr.py.
    """

    l2: float = 1024.0
    constant: float = 100.0

    def __post_init__(self):
        if not 0 < self.l2 < np.inf:
            raise ValueError(f"l2 must be positive. Received: {self.l2!r}.")

    def fit(self, features, labels):
        """Fit the probe.

        Args:
            features: `(n, d)`: an array, or what gives arrays for slices.
            labels: `(n,)`, integers or strings.

        Returns:
            A probe with `predict`, `predict_proba` and `score`. Probabilities
            are the softmax of its scores, and not calibrated.

        Raises:
            ValueError: if shapes disagree, a feature is not finite, or there
                are fewer than two classes.
        """
        features, labels = check_rows(features, labels)
        classes, indices = check_classes(labels)
        mean, deviation = _moments(features)
        deviation = deviation + EPSILON

        def rows(raw):
            scaled = np.empty((len(raw), raw.shape[1] + 1))
            scaled[:, :-1] = (raw - mean) / deviation
            scaled[:, -1] = self.constant
            return scaled

        count, dimension = features.shape
        if count > dimension:
            kernel = _solve_primal(
                rows, features, indices, len(classes), self.l2
            )
        else:
            kernel = _solve_dual(rows, features, indices, len(classes), self.l2)
        return FittedRidgeProbe(classes, features, rows, kernel)


class FittedRidgeProbe(FittedProbe):
    """What `RidgeProbe.fit` returns.

    Attributes:
        kernel: float64 array `(d + 1, c)`, of standardized features and the
            constant.
    """

    def __init__(self, classes, features, rows, kernel):
        super().__init__(classes, features)
        self._rows = rows
        self.kernel = kernel

    def _probabilities(self, rows):
        return softmax(self._rows(rows) @ self.kernel, axis=1)


def _moments(features):
    """Return mean and deviation `(d,)`, in float64, of all rows."""
    count, mean, squares = 0, 0.0, 0.0
    for _, rows in chunks(features, dtype="float64"):
        # Chan's update of a sum of squares about the mean.
        own, n = rows.mean(axis=0), len(rows)
        shift = own - mean
        squares = squares + ((rows - own) ** 2).sum(axis=0)
        squares += shift**2 * count * n / (count + n)
        mean = mean + shift * n / (count + n)
        count += n
    return mean, np.sqrt(squares / count)


def _targets(indices, num_classes):
    targets = np.full((len(indices), num_classes), -1.0)
    targets[np.arange(len(indices)), indices] = 1.0
    return targets


def _solve_primal(rows, features, indices, num_classes, l2):
    """Return `(X^T X + l2)^-1 X^T Y`."""
    import scipy.linalg

    size = features.shape[1] + 1
    gram = np.zeros((size, size), order="F")
    moments = np.zeros((size, num_classes))
    for start, raw in chunks(features, dtype="float64"):
        part = rows(raw)
        # One triangle alone; the transpose is what BLAS wants, uncopied.
        gram = scipy.linalg.blas.dsyrk(
            1.0, part.T, beta=1.0, c=gram, lower=1, overwrite_c=1
        )
        stop = start + len(raw)
        moments += part.T @ _targets(indices[start:stop], num_classes)
    gram[np.diag_indices(size)] += l2
    return scipy.linalg.solve(
        gram,
        moments,
        lower=True,
        assume_a="pos",
        overwrite_a=True,
        overwrite_b=True,
    )


def _solve_dual(rows, features, indices, num_classes, l2):
    """Return `X^T (X X^T + l2)^-1 Y`, which is the same."""
    import scipy.linalg

    whole = np.concatenate(
        [rows(raw) for _, raw in chunks(features, dtype="float64")]
    )
    gram = whole @ whole.T
    gram[np.diag_indices(len(gram))] += l2
    weights = scipy.linalg.solve(
        gram,
        _targets(indices, num_classes),
        assume_a="pos",
        overwrite_a=True,
        overwrite_b=True,
    )
    return whole.T @ weights
