"""A linear classifier on frozen features."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """Multinomial logistic regression on standardized features.

    The protocol alone; `fit` returns the fitted model. Mean and variance are
    those of the training features, and the solver is L-BFGS.

    Attributes:
        c: float. Inverse strength of the L2 penalty. Defaults to `1.0`.
        max_iter: int. Defaults to `1000`.
    """

    c: float = 1.0
    max_iter: int = 1000

    def fit(self, features, labels):
        """Fit the probe.

        Args:
            features: float array `(n, d)`.
            labels: int array `(n,)`.

        Returns:
            A scikit-learn pipeline with `predict`, `predict_proba`, `score`.

        Raises:
            ValueError: if shapes disagree, a feature is not finite, or there
                are fewer than two classes.
        """
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        features, labels = check_features(features, labels)
        probe = make_pipeline(
            StandardScaler(),
            LogisticRegression(C=self.c, max_iter=self.max_iter),
        )
        return probe.fit(features, labels)


def check_features(features, labels):
    """Return features and labels as arrays, or raise if they are unusable."""
    features, labels = np.asarray(features), np.asarray(labels)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            "Expected features (n, d) and labels (n,). Received shapes "
            f"{features.shape} and {labels.shape}."
        )
    if not np.isfinite(features).all():
        raise ValueError("Features hold NaN or infinite values.")
    if len(np.unique(labels)) < 2:
        raise ValueError("A probe needs at least two classes.")
    return features, labels
