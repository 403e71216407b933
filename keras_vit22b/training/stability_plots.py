"""The two pictures of a stability laboratory."""

import collections
import math

import numpy as np
from matplotlib.figure import Figure

# Warm without the norm, cool with it.
_COLORS = {None: "tab:red", "rms": "tab:blue", "layer": "tab:cyan"}
_LINES = {"parallel": "-", "sequential": "--"}


def _label(run):
    norm = {None: "without QK norm", "rms": "RMS", "layer": "layer norm"}
    name = norm[run["qk_norm"]]
    if run["qk_norm"]:
        name = f"with QK norm ({name})"
    return f"{name}, {run['block']}"


def plot_by_rate(runs, path):
    """Draw the final loss of each variant against the learning rate.

    Args:
        runs: list of dicts, of `stability.train`.
        path: path of a PNG.
    """
    losses = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        loss = run["final_loss"]
        # A loss that is no number counts as that at the start.
        loss = loss if math.isfinite(loss) else run["initial_loss"]
        key = run["qk_norm"], run["block"]
        losses[key][run["learning_rate"]].append(min(loss, run["initial_loss"]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (norm, block), by_rate in losses.items():
        rates = sorted(by_rate)
        values = [by_rate[rate] for rate in rates]
        style = {"color": _COLORS[norm], "linestyle": _LINES[block]}
        axes.plot(
            rates,
            [np.mean(v) for v in values],
            marker="o",
            label=_label({"qk_norm": norm, "block": block}),
            **style,
        )
        axes.fill_between(
            rates,
            [min(v) for v in values],
            [max(v) for v in values],
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )
    start = np.mean([run["initial_loss"] for run in runs])
    axes.axhline(start, color="gray", linestyle=":")
    axes.text(
        1.0,
        start,
        "untrained ",
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        color="gray",
    )
    axes.set(
        xscale="log",
        xlabel="learning rate (peak)",
        ylabel="final loss, held-out images (nats)",
        ylim=(0, 1.12 * start),
        title="Without QK norm a high learning rate stops the learning",
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def plot_by_step(runs, protocol, path):
    """Draw loss, largest logit and entropy of runs against the step.

    Args:
        runs: list of dicts, of `stability.train`. Those of one learning rate
            are drawn, the highest at which a run with the norm learns.
        protocol: `StabilityProtocol`.
        path: path of a PNG.
    """
    rate = most_telling_rate(runs)
    seed = min(run["seed"] for run in runs)
    chosen = [
        run
        for run in runs
        if run["learning_rate"] == rate and run["seed"] == seed
    ]
    figure = Figure(figsize=(7, 8), layout="constrained")
    loss, logit, entropy = figure.subplots(3, 1, sharex=True)
    for run in chosen:
        style = {
            "color": _COLORS[run["qk_norm"]],
            "linestyle": _LINES[run["block"]],
            "label": _label(run),
        }
        values = np.array(run["losses"])
        width = max(1, len(values) // 20)
        smooth = [
            values[max(0, i - width + 1) : i + 1].mean()
            for i in range(len(values))
        ]
        loss.plot(range(1, len(values) + 1), smooth, **style)
        steps = [w["step"] for w in run["watched"]]
        logit.plot(steps, [w["largest_logit"] for w in run["watched"]], **style)
        entropy.plot(
            steps, [100 * w["entropy"] for w in run["watched"]], **style
        )
    loss.set(
        ylabel="training loss (nats)",
        ylim=(0, None),
        title=f"{protocol.dataset}, learning rate {rate:g}, seed {seed}",
    )
    loss.legend(fontsize="small")
    logit.set(ylabel="largest attention logit", yscale="log")
    entropy.set(
        ylabel="attention entropy of the\nworst head, % of log T",
        xlabel="step",
        ylim=(0, 103),
    )
    for height, words in ((93, "all tokens"), (5, "one token")):
        entropy.annotate(
            f"each query looks at {words}",
            (0.99, height),
            xycoords=("axes fraction", "data"),
            ha="right",
            color="gray",
            fontsize="small",
        )
    figure.savefig(path, dpi=150)


def most_telling_rate(runs):
    """Return the rate at which losses with and without the norm differ most."""
    with_norm, without = (collections.defaultdict(list) for _ in range(2))
    for run in runs:
        group = with_norm if run["qk_norm"] else without
        group[run["learning_rate"]].append(
            min(run["initial_loss"], np.nan_to_num(run["final_loss"], nan=1e9))
        )
    both = sorted(with_norm.keys() & without.keys())
    if not both:
        return max(run["learning_rate"] for run in runs)
    return max(both, key=lambda r: np.mean(without[r]) - np.mean(with_norm[r]))
