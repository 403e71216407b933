"""How well features read out from a few labelled images a class."""

import dataclasses

import numpy as np

from keras_vit22b.probing.linear_probe import LinearProbe
from keras_vit22b.probing.linear_probe import check_features


@dataclasses.dataclass(frozen=True)
class FewShot:
    """Accuracy of a probe fitted on `k` labelled images a class.

    For each seed the images of a class are shuffled; the first `max(shots)`
    are a pool, and every image outside the pools is a test image. `k` shots
    are the first `k` of each pool, so all shots share one test set and a
    larger number of shots contains the smaller.

    Attributes:
        shots: tuple of int. Defaults to `(1, 5, 10, 50)`.
        seeds: tuple of int. Defaults to `(0, 1, 2, 3, 4)`.
        probe: a `LinearProbe`. Defaults to `LinearProbe()`.
    """

    shots: tuple = (1, 5, 10, 50)
    seeds: tuple = (0, 1, 2, 3, 4)
    probe: LinearProbe = dataclasses.field(default_factory=LinearProbe)

    def __post_init__(self):
        for name in ("shots", "seeds"):
            values = getattr(self, name)
            least = 1 if name == "shots" else 0
            if (
                not isinstance(values, (tuple, list))
                or not values
                or any(type(v) is not int or v < least for v in values)
                or len(set(values)) < len(values)
            ):
                raise ValueError(
                    f"{name} must be different ints from {least}. Received: "
                    f"{values!r}."
                )
            object.__setattr__(self, name, tuple(values))

    def evaluate(self, features, labels, class_names=None):
        """Return `{shots: [accuracy of each seed]}`, accuracies of 0 to 1.

        Args:
            features: float array `(n, d)`.
            labels: array `(n,)`.
            class_names: list of strings, for messages, if labels are indices
                into it. Defaults to `None`.

        Raises:
            ValueError: if a class has too few images.
        """
        features, labels = check_features(features, labels)
        self.check_counts(labels, class_names)
        accuracies = {shots: [] for shots in self.shots}
        for seed in self.seeds:
            pools, test = self._split(labels, seed)
            for shots in self.shots:
                train = np.concatenate([pool[:shots] for pool in pools])
                probe = self.probe.fit(features[train], labels[train])
                accuracies[shots].append(
                    float(probe.score(features[test], labels[test]))
                )
        return accuracies

    def check_counts(self, labels, class_names=None):
        """Raise unless every class has images for the shots and a test.

        Args:
            labels: array `(n,)`.
            class_names: list of strings, as in `evaluate`.
        """
        values, counts = np.unique(labels, return_counts=True)
        if len(values) < 2:
            raise ValueError("A probe needs at least two classes.")
        if counts.min() <= max(self.shots):
            value = values[counts.argmin()]
            name = class_names[value] if class_names else value
            raise ValueError(
                f"Class {str(name)!r} has {counts.min()} images; "
                f"{max(self.shots)} shots and one test image need "
                f"{max(self.shots) + 1}. Use at most {counts.min() - 1} shots."
            )

    def _split(self, labels, seed):
        """Return one pool of indices a class, and the test indices."""
        generator = np.random.default_rng(seed)
        pools, test = [], []
        for label in np.unique(labels):
            order = generator.permutation(np.flatnonzero(labels == label))
            pools.append(order[: max(self.shots)])
            test.append(order[max(self.shots) :])
        return pools, np.concatenate(test)


def plot_few_shot(accuracies, path, *, title=None):
    """Save a plot of accuracy against shots, with the range over seeds.

    Args:
        accuracies: dict from a name to what `FewShot.evaluate` returns; the
            first is drawn as the subject, the others as references.
        path: path of the PNG.
        title: string. Defaults to `None`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = ("#1f5fbf", "#8a8a8a", "#c77d1f")
    for color, (name, scores) in zip(colors, accuracies.items()):
        shots = sorted(scores)
        means = [100 * np.mean(scores[k]) for k in shots]
        axes.fill_between(
            shots,
            [100 * min(scores[k]) for k in shots],
            [100 * max(scores[k]) for k in shots],
            color=color,
            alpha=0.2,
            linewidth=0,
        )
        axes.plot(shots, means, marker="o", color=color, label=name)
        above = color == colors[0]
        for k, mean in zip(shots, means):
            axes.annotate(
                f"{mean:.1f}",
                (k, mean),
                xytext=(0, 7 if above else -14),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=color,
            )
    axes.set_xscale("log")
    axes.set_xticks(shots, [str(k) for k in shots])
    axes.minorticks_off()
    axes.set_xlabel("labelled images a class")
    axes.set_ylabel("accuracy (%), mean and range over seeds")
    axes.margins(x=0.08, y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path, format="png")
