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

    def evaluate(self, features, labels, class_names=None):
        """Return `{shots: [accuracy of each seed]}`, accuracies of 0 to 1.

        Args:
            features: float array `(n, d)`.
            labels: int array `(n,)`.
            class_names: list of strings, for messages. Defaults to `None`.

        Raises:
            ValueError: if a class has too few images.
        """
        features, labels = check_features(features, labels)
        self._check_counts(labels, class_names)
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

    def _split(self, labels, seed):
        """Return one pool of indices a class, and the test indices."""
        generator = np.random.default_rng(seed)
        pools, test = [], []
        for label in np.unique(labels):
            order = generator.permutation(np.flatnonzero(labels == label))
            pools.append(order[: max(self.shots)])
            test.append(order[max(self.shots) :])
        return pools, np.concatenate(test)

    def _check_counts(self, labels, class_names):
        if not self.shots or min(self.shots) < 1 or not self.seeds:
            raise ValueError(
                "shots must be positive and seeds not empty. Received: "
                f"shots={self.shots}, seeds={self.seeds}."
            )
        values, counts = np.unique(labels, return_counts=True)
        if counts.min() <= max(self.shots):
            value = values[counts.argmin()]
            name = class_names[value] if class_names else value
            raise ValueError(
                f"Class {name!r} has {counts.min()} images; {max(self.shots)} "
                "shots and one test image need "
                f"{max(self.shots) + 1}. Use at most {counts.min() - 1} shots."
            )


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
    axes.set_ylabel("accuracy (%)")
    axes.margins(x=0.08, y=0.12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)
