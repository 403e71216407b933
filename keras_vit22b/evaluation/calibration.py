"""Whether a classifier is as often right as it says.

Every function takes plain arrays: probabilities or logits `(n, c)` and labels
`(n,)`, integers from 0. Of any model.
"""

import dataclasses

import numpy as np

BINNINGS = ("width", "mass")


@dataclasses.dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error: mean gap of confidence and accuracy.

    Images are put into bins by their confidence, the largest probability.

    Attributes:
        bins: int. Defaults to `15`.
        binning: `"width"`, bins of equal width in `(0, 1]`, or `"mass"`, of
            equally many images. Defaults to `"width"`.
        order: `1`, mean absolute gap (ECE), or `2`, root of the mean square.
            Defaults to `1`.
        debias: bool. Whether to take off what the noise of accuracies adds to
            squared gaps; of order 2. Defaults to `False`.

    Reference:
        [Guo et al., 2017](https://arxiv.org/abs/1706.04599), and, for
        `"mass"`, order 2 and `debias`, [Kumar et al.,
        2019](https://arxiv.org/abs/1909.10155).
    """

    bins: int = 15
    binning: str = "width"
    order: int = 1
    debias: bool = False

    def __post_init__(self):
        if not isinstance(self.bins, int) or self.bins < 1:
            raise ValueError(
                f"bins must be a positive int. Received: {self.bins!r}."
            )
        if self.binning not in BINNINGS:
            raise ValueError(
                f"binning must be 'width' or 'mass'. Received: "
                f"{self.binning!r}."
            )
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2. Received: {self.order!r}.")
        if self.debias and self.order == 1:
            raise ValueError("debias is of order 2. Received: order 1.")

    def __call__(self, probabilities, labels):
        """Return the error, 0 to 1.

        Args:
            probabilities: `(n, c)`.
            labels: int array `(n,)`.

        Raises:
            ValueError: if these are no probabilities and labels.
        """
        rows = self.table(probabilities, labels)
        total = sum(row["images"] for row in rows)
        if self.order == 1:
            return float(
                sum(
                    row["images"] * abs(row["confidence"] - row["accuracy"])
                    for row in rows
                )
                / total
            )
        squares = 0.0
        for row in rows:
            square = (row["confidence"] - row["accuracy"]) ** 2
            if self.debias and row["images"] > 1:
                accuracy = row["accuracy"]
                square -= accuracy * (1 - accuracy) / (row["images"] - 1)
            squares += row["images"] * square
        return float(np.sqrt(max(squares / total, 0.0)))

    def table(self, probabilities, labels):
        """Return each bin that holds images, as a reliability diagram does.

        Returns:
            A list of dict: `"low"` and `"high"`, between which confidences
            lie; `"images"`; and their mean `"confidence"` and `"accuracy"`.
        """
        probabilities, labels = check_probabilities(probabilities, labels)
        confidence = probabilities.max(axis=1)
        correct = probabilities.argmax(axis=1) == labels
        order = np.argsort(confidence, kind="stable")
        if self.binning == "mass":
            parts = np.array_split(order, self.bins)
        else:
            # Bins are open on the left, so that 1 is in the last.
            edges = np.arange(1, self.bins) / self.bins
            cuts = np.searchsorted(confidence[order], edges, side="right")
            parts = np.split(order, cuts)
        rows = []
        for number, part in enumerate(parts):
            if not len(part):
                continue
            low, high = confidence[part[0]], confidence[part[-1]]
            if self.binning == "width":
                low, high = number / self.bins, (number + 1) / self.bins
            rows.append(
                {
                    "low": float(low),
                    "high": float(high),
                    "images": len(part),
                    "confidence": float(confidence[part].mean()),
                    "accuracy": float(correct[part].mean()),
                }
            )
        return rows


def negative_log_likelihood(probabilities, labels):
    """Return the mean of `-log p(label)`, in nats; infinite if one is 0.

    Args:
        probabilities: `(n, c)`.
        labels: int array `(n,)`.
    """
    probabilities, labels = check_probabilities(probabilities, labels)
    with np.errstate(divide="ignore"):
        logs = np.log(probabilities[np.arange(len(labels)), labels])
    return float(-logs.mean())


def brier_score(probabilities, labels):
    """Return the mean squared distance to one-hot labels, 0 to 2.

    Args:
        probabilities: `(n, c)`.
        labels: int array `(n,)`.

    Reference:
        Brier, 1950: the sum over classes, not half of it.
    """
    probabilities, labels = check_probabilities(probabilities, labels)
    gaps = probabilities.copy()
    gaps[np.arange(len(labels)), labels] -= 1
    return float((gaps**2).sum(axis=1).mean())


@dataclasses.dataclass(frozen=True)
class TemperatureScaling:
    """Divide logits by one number, that of least loss on held-out images.

    Attributes:
        least: float. Of temperatures. Defaults to `0.01`.
        most: float. Defaults to `100.0`.

    Reference:
        [Guo et al., 2017](https://arxiv.org/abs/1706.04599).
    """

    least: float = 0.01
    most: float = 100.0

    def __post_init__(self):
        if not 0 < self.least < self.most < np.inf:
            raise ValueError(
                "Temperatures must be positive, least below most. Received: "
                f"{self.least!r} and {self.most!r}."
            )

    def fit(self, logits, labels):
        """Return the temperature of least negative log-likelihood.

        Args:
            logits: `(n, c)`; logs of probabilities will do.
            labels: int array `(n,)`. Of images that are not reported on.
        """
        import scipy.optimize
        import scipy.special

        logits, labels = _check_scores(logits, labels)
        own = logits[np.arange(len(labels)), labels]

        def loss(log_temperature):
            scale = np.exp(-log_temperature)
            sums = scipy.special.logsumexp(scale * logits, axis=1)
            return (sums - scale * own).mean()

        # The loss has one minimum in 1 / T, so in log T.
        found = scipy.optimize.minimize_scalar(
            loss,
            bounds=np.log([self.least, self.most]),
            method="bounded",
            options={"xatol": 1e-8},
        )
        return float(np.exp(found.x))


def scale_logits(logits, temperature=1.0):
    """Return the softmax of `logits / temperature`, `(n, c)`, in float64."""
    import scipy.special

    scaled = np.asarray(logits, "float64") / temperature
    return scipy.special.softmax(scaled, axis=1)


def check_probabilities(probabilities, labels):
    """Return float64 probabilities and labels, or raise if they are not.

    Raises:
        ValueError: if shapes disagree, labels are no classes, or rows do not
            sum to 1.
    """
    probabilities, labels = _check_scores(probabilities, labels)
    sums = probabilities.sum(axis=1)
    if probabilities.min() < 0 or np.abs(sums - 1).max() > 1e-3:
        worst = int(np.abs(sums - 1).argmax())
        raise ValueError(
            "Probabilities must be at least 0 and sum to 1. Received a least "
            f"of {probabilities.min():.4g}, and a sum of {sums[worst]:.4g} in "
            f"row {worst}; of logits, take scale_logits first."
        )
    return probabilities, labels


def _check_scores(scores, labels):
    scores, labels = np.asarray(scores, "float64"), np.asarray(labels)
    if (
        scores.ndim != 2
        or 0 in scores.shape
        or labels.shape != scores.shape[:1]
    ):
        raise ValueError(
            "Expected (n, c) and labels (n,). Received shapes "
            f"{scores.shape} and {labels.shape}."
        )
    if labels.dtype.kind not in "iub":
        raise ValueError(
            f"Labels must be integers from 0. Received dtype {labels.dtype}."
        )
    if labels.min() < 0 or labels.max() >= scores.shape[1]:
        raise ValueError(
            f"Labels must be of 0 to {scores.shape[1] - 1}. Received "
            f"{labels.min()} to {labels.max()}."
        )
    if not np.isfinite(scores).all():
        bad = int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])
        raise ValueError(f"Row {bad} holds NaN or infinite values.")
    return scores, labels.astype(int)
