"""How sure a number of a set of images is."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Confidence intervals by drawing images again, with replacement.

    Attributes:
        draws: int. Defaults to `2000`.
        level: float. Share of draws within an interval. Defaults to `0.95`.
        seed: int. Defaults to `0`.

    Reference:
        Efron, 1979: intervals are percentiles.
    """

    draws: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.draws, int) or self.draws < 1:
            raise ValueError(
                f"draws must be a positive int. Received: {self.draws!r}."
            )
        if not 0 < self.level < 1:
            raise ValueError(
                f"level must lie between 0 and 1. Received: {self.level!r}."
            )

    def interval(self, values, other=None):
        """Return the interval of a mean, or of a difference of means.

        Args:
            values: `(n,)`. One number an image, such as whether it is right.
            other: `(n,)`. That of another model on the same images, which are
                drawn together; or `None`. Defaults to `None`.

        Returns:
            A dict of `"mean"`, of `values - other`, `"low"` and `"high"`.

        Raises:
            ValueError: if lengths differ or there are no images.
        """
        values = np.asarray(values, float)
        if other is not None:
            other = np.asarray(other, float)
            if other.shape != values.shape:
                raise ValueError(
                    "Expected numbers of the same images. Received shapes "
                    f"{values.shape} and {other.shape}."
                )
            values = values - other
        if values.ndim != 1 or not len(values):
            raise ValueError(
                f"Expected values (n,). Received shape {values.shape}."
            )
        generator = np.random.default_rng(self.seed)
        means = []
        # Counts of each draw are multinomial; a million numbers at a time.
        size = max(1, 1_000_000 // len(values))
        chances = np.full(len(values), 1 / len(values))
        for start in range(0, self.draws, size):
            count = min(size, self.draws - start)
            drawn = generator.multinomial(len(values), chances, count)
            means.append(drawn @ values / len(values))
        tail = 50 * (1 - self.level)
        low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
        return {
            "mean": float(values.mean()),
            "low": float(low),
            "high": float(high),
        }
