"""Logistic regression by L-BFGS, its penalty chosen on held-out images."""

import dataclasses

import numpy as np
from scipy.special import softmax

from keras_vit22b.probing.rows import FittedProbe
from keras_vit22b.probing.rows import Subset
from keras_vit22b.probing.rows import check_classes
from keras_vit22b.probing.rows import check_rows
from keras_vit22b.probing.rows import chunks
from keras_vit22b.probing.rows import split


@dataclasses.dataclass(frozen=True)
class LogisticProbe:
    """Multinomial logistic regression on features as they are.

    The inverse strength `c` of the L2 penalty that is best on held-out images
    is taken, of equal ones the least, and the probe fitted again to all. As
    DINOv2 does; in float64, the bias without penalty. Rows are read some at a
    time, once an iteration; memory is 22 times that of the kernel.

    Attributes:
        cs: tuple of float. Defaults to 45 from 1e-6 to 1e5, evenly by their
            logs.
        held_out: float. Share of the images that chooses; not used for one
            `c`. Defaults to `0.1`.
        max_iter: int. Defaults to `1000`.
        tolerance: float. Largest gradient of the mean loss at which to stop.
            Defaults to `1e-6`.
        seed: int. Of the images held out. Defaults to `0`.

    Reference:
        [Oquab et al., 2023](https://arxiv.org/abs/2304.07193), whose tolerance
        is 1e-12: as long as there are iterations.
    """

    cs: tuple = tuple(10.0 ** np.linspace(-6, 5, 45))
    held_out: float = 0.1
    max_iter: int = 1000
    tolerance: float = 1e-6
    seed: int = 0

    def __post_init__(self):
        cs = self.cs if isinstance(self.cs, (tuple, list)) else (self.cs,)
        object.__setattr__(self, "cs", tuple(map(float, cs)))
        if not self.cs or not all(0 < c < np.inf for c in self.cs):
            raise ValueError(f"cs must be positive. Received: {self.cs!r}.")
        if not 0 < self.held_out < 1:
            raise ValueError(
                "held_out must lie between 0 and 1. Received: "
                f"{self.held_out!r}."
            )
        if not isinstance(self.max_iter, int) or self.max_iter < 1:
            raise ValueError(
                f"max_iter must be a positive int. Received: {self.max_iter!r}."
            )

    def fit(self, features, labels):
        """Choose the penalty and fit.

        Args:
            features: `(n, d)`: an array, or what gives arrays for slices and
                for arrays of rows.
            labels: `(n,)`, integers or strings.

        Returns:
            A probe with `predict`, `predict_proba` and `score`.

        Raises:
            ValueError: if shapes disagree, a feature is not finite, or there
                are fewer than two classes.
        """
        features, labels = check_rows(features, labels)
        classes, indices = check_classes(labels)
        start = np.zeros((features.shape[1] + 1, len(classes)))
        best, accuracies = self.cs[0], {}
        if len(self.cs) > 1:
            train, held = split(len(labels), self.held_out, self.seed)
            part, rest = Subset(features, train), Subset(features, held)
            kernel = start
            for c in sorted(self.cs):
                # From the last one, which is near.
                kernel = self._minimize(kernel, part, indices[train], c)
                found = FittedLogisticProbe(classes, features, kernel, c, {})
                accuracies[c] = found.score(rest, labels[held])
            best = max(accuracies, key=accuracies.get)
        kernel = self._minimize(start, features, indices, best)
        return FittedLogisticProbe(classes, features, kernel, best, accuracies)

    def _minimize(self, start, features, indices, c):
        """Return kernel and bias `(d + 1, c)` of the least loss."""
        import scipy.optimize

        count = len(indices)

        def loss(flat):
            weights = flat.reshape(start.shape)
            gradient = np.zeros(start.shape)
            total = 0.0
            for first, rows in chunks(features, dtype="float64"):
                own = indices[first : first + len(rows)]
                chances = softmax(rows @ weights[:-1] + weights[-1], axis=1)
                places = np.arange(len(rows)), own
                tiny = np.finfo(float).tiny
                total -= np.log(np.maximum(chances[places], tiny)).sum()
                chances[places] -= 1
                gradient[:-1] += rows.T @ chances
                gradient[-1] += chances.sum(axis=0)
            # The mean, so that one tolerance serves every size.
            kernel = weights[:-1]
            total = total / count + (kernel**2).sum() / (2 * c * count)
            gradient /= count
            gradient[:-1] += kernel / (c * count)
            return total, gradient.ravel()

        found = scipy.optimize.minimize(
            loss,
            start.ravel(),
            jac=True,
            method="L-BFGS-B",
            options={
                "maxiter": self.max_iter,
                "maxfun": 10 * self.max_iter,
                "maxls": 50,
                "gtol": self.tolerance,
                "ftol": 64 * np.finfo(float).eps,
            },
        )
        return found.x.reshape(start.shape)


class FittedLogisticProbe(FittedProbe):
    """What `LogisticProbe.fit` returns.

    Attributes:
        kernel: float64 array `(d + 1, c)`; its last row is the bias.
        c: float. That was chosen.
        held_out: dict from each `c` to its accuracy on what was held out.
    """

    def __init__(self, classes, features, kernel, c, held_out):
        super().__init__(classes, features)
        self.kernel, self.c, self.held_out = kernel, c, held_out

    def _probabilities(self, rows):
        return softmax(rows @ self.kernel[:-1] + self.kernel[-1], axis=1)
