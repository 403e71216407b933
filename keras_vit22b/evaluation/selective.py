"""What a model that may abstain gets wrong, and what it has never seen."""

import dataclasses

import numpy as np


def risk_coverage(confidence, correct):
    """Return the error among the most confident, by how many these are.

    Images of equal confidence are accepted together: each has the mean error
    of its group.

    Args:
        confidence: `(n,)`. Larger is surer.
        correct: bool array `(n,)`.

    Returns:
        `(coverage, risk)`, both `(n,)`: shares of images, `1 / n` to 1, and the
        error among as many.

    Reference:
        [Geifman & El-Yaniv, 2017](https://arxiv.org/abs/1705.08500).
    """
    confidence, correct = np.asarray(confidence, float), np.asarray(correct)
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        raise ValueError(
            "Expected confidence (n,) and correct (n,). Received shapes "
            f"{confidence.shape} and {correct.shape}."
        )
    if not len(confidence) or not np.isfinite(confidence).all():
        raise ValueError("Confidences must be finite, and at least one.")
    _, group, sizes = np.unique(
        -confidence, return_inverse=True, return_counts=True
    )
    errors = np.bincount(group, weights=~correct.astype(bool)) / sizes
    wrong = np.cumsum(np.repeat(errors, sizes))
    count = np.arange(1, len(confidence) + 1)
    return count / len(confidence), wrong / count


def area_under_risk_coverage(confidence, correct):
    """Return the mean risk over all coverages (AURC), 0 to 1; less is better.

    Args:
        confidence: `(n,)`. Larger is surer.
        correct: bool array `(n,)`.
    """
    return float(risk_coverage(confidence, correct)[1].mean())


def detection(inside, outside):
    """Return how well scores tell images of the task from others.

    Args:
        inside: `(n,)`. Scores of images of the task; larger is more of it.
        outside: `(m,)`. Scores of others.

    Returns:
        A dict of `"auroc"`, the chance that one of the task scores higher than
        another, and `"fpr95"`, the share of others that score no lower than 95
        % of the task's.
    """
    from sklearn.metrics import roc_auc_score

    inside, outside = np.asarray(inside, float), np.asarray(outside, float)
    for scores in (inside, outside):
        if scores.ndim != 1 or not len(scores) or np.isnan(scores).any():
            raise ValueError(
                "Expected scores (n,), none of them NaN. Received shape "
                f"{scores.shape}."
            )
    labels = np.repeat([1, 0], [len(inside), len(outside)])
    scores = np.concatenate([inside, outside])
    # The largest threshold that at least 95 % of the task's reach.
    rank = int(np.ceil(0.95 * len(inside)))
    threshold = np.sort(inside)[::-1][rank - 1]
    return {
        "auroc": float(roc_auc_score(labels, scores)),
        "fpr95": float((outside >= threshold).mean()),
    }


@dataclasses.dataclass(frozen=True)
class Mahalanobis:
    """Distance of features to the nearest class, in one covariance for all.

    Attributes:
        shrinkage: float. Share of the covariance that is replaced by its mean
            variance, so that it has an inverse. Defaults to `1e-4`.

    Reference:
        [Lee et al., 2018](https://arxiv.org/abs/1807.03888).
    """

    shrinkage: float = 1e-4

    def __post_init__(self):
        if not 0 <= self.shrinkage <= 1:
            raise ValueError(
                f"shrinkage must be of 0 to 1. Received: {self.shrinkage!r}."
            )

    def fit(self, features, labels):
        """Estimate means and covariance, in float64, some rows at a time.

        Args:
            features: `(n, d)`: an array, or what gives arrays for slices.
            labels: `(n,)`, integers or strings.

        Returns:
            A function from features `(m, d)` to scores `(m,)`: minus the
            squared distance to the nearest class.
        """
        import scipy.linalg

        from keras_vit22b.probing import rows

        features, labels = rows.check_rows(features, labels)
        classes, indices = rows.check_classes(labels)
        count, dimension = features.shape
        means = np.zeros((len(classes), dimension))
        for start, part in rows.chunks(features, dtype="float64"):
            np.add.at(means, indices[start : start + len(part)], part)
        means /= np.bincount(indices)[:, None]
        covariance = np.zeros((dimension, dimension))
        for start, part in rows.chunks(features, dtype="float64"):
            part = part - means[indices[start : start + len(part)]]
            covariance += part.T @ part / count
        variance = np.trace(covariance) / dimension
        covariance *= 1 - self.shrinkage
        covariance[np.diag_indices(dimension)] += self.shrinkage * variance
        factor = scipy.linalg.cholesky(covariance, lower=True)

        def whiten(values):
            return scipy.linalg.solve_triangular(factor, values.T, lower=True).T

        centers = whiten(means)

        def score(features):
            scores = []
            for _, part in rows.chunks(rows.check_rows(features)):
                white = whiten(part.astype("float64"))
                squares = (white**2).sum(1)[:, None] + (centers**2).sum(1)
                distances = squares - 2 * white @ centers.T
                scores.append(-distances.min(axis=1))
            return np.concatenate(scores)

        return score
