"""The pictures of a stability laboratory."""

import collections
import math

import numpy as np
from matplotlib.figure import Figure

# Warm without the norm, cool with it.
_COLORS = {None: "tab:red", "rms": "tab:blue", "layer": "tab:cyan"}
_LINES = {"parallel": "-", "sequential": "--"}
_MARKERS = {"parallel": "o", "sequential": "^"}


def _label(run, runs):
    """Name a variant, and its kind of block if there are several."""
    norm = {None: "without QK norm", "rms": "RMS", "layer": "layer norm"}
    name = norm[run["qk_norm"]]
    if run["qk_norm"]:
        name = f"with QK norm ({name})"
    several = len({other["block"] for other in runs}) > 1
    return f"{name}, {run['block']} block" if several else name


def _conditions(runs, protocol):
    """Return what all runs share, as a line of a title."""
    seeds = sorted({run["seed"] for run in runs})
    names = ", ".join(map(str, seeds))
    return (
        f"{protocol.dataset}, {protocol.steps} steps, "
        f"seed{'s' if seeds[1:] else ''} {names}"
    )


def plot_by_rate(runs, protocol, path):
    """Draw the final loss of each variant against the learning rate.

    Args:
        runs: list of dicts, of `stability.Bench.train`.
        protocol: `StabilityProtocol`.
        path: path of a PNG.
    """
    losses = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        key = run["qk_norm"], run["block"]
        losses[key][run["learning_rate"]].append(_final_loss(run))
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
            label=_label({"qk_norm": norm, "block": block}, runs),
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
    start = _mark_untrained(axes, runs)
    axes.set_xscale("log")
    tried = sorted({run["learning_rate"] for run in runs})
    axes.set_xticks(tried, [f"{rate:g}" for rate in tried])
    axes.minorticks_off()
    axes.set(
        xlabel="learning rate (peak)",
        ylabel="final loss, held-out images (nats)",
        ylim=(0, 1.12 * start),
        title="Final loss with and without QK norm, by learning rate\n"
        + _conditions(runs, protocol),
    )
    several = len({run["seed"] for run in runs}) > 1
    axes.legend(
        fontsize="small",
        title="mean, and range over seeds" if several else None,
        title_fontsize="small",
    )
    figure.savefig(path, dpi=150)


def plot_by_logit(runs, protocol, path):
    """Draw the final loss of each run against its largest logit.

    Args:
        runs: list of dicts, of `stability.Bench.train`.
        protocol: `StabilityProtocol`.
        path: path of a PNG.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for norm, block in dict.fromkeys((r["qk_norm"], r["block"]) for r in runs):
        group = [r for r in runs if (r["qk_norm"], r["block"]) == (norm, block)]
        axes.scatter(
            [max(w["largest_logit"] for w in run["watched"]) for run in group],
            [_final_loss(run) for run in group],
            color=_COLORS[norm],
            marker=_MARKERS[block],
            alpha=0.7,
            label=_label(group[0], runs),
        )
    start = _mark_untrained(axes, runs)
    axes.set(
        xscale="log",
        xlabel="largest attention logit of the run",
        ylabel="final loss, held-out images (nats)",
        ylim=(0, 1.12 * start),
        title="Final loss against the largest logit, all learning rates\n"
        + _conditions(runs, protocol),
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _final_loss(run):
    """Return the loss, that at the start where it is more or no number."""
    if not math.isfinite(run["final_loss"]):
        return run["initial_loss"]
    return min(run["final_loss"], run["initial_loss"])


def _mark_untrained(axes, runs):
    """Draw the mean loss at the start; return it."""
    start = np.mean([run["initial_loss"] for run in runs])
    axes.axhline(start, color="gray", linestyle=":")
    axes.text(
        0.01,
        start,
        "untrained",
        transform=axes.get_yaxis_transform(),
        va="bottom",
        color="gray",
    )
    return start


def plot_by_step(runs, protocol, path):
    """Draw loss, largest logit and entropy of runs against the step.

    Args:
        runs: list of dicts, of `stability.Bench.train`. Those of the first
            seed and `most_telling_rate` are drawn.
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
            "label": _label(run, chosen),
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
        ylabel=f"training loss (nats),\nmean of {width} steps",
        ylim=(0, None),
        title="Loss, logits and attention with and without QK norm\n"
        f"{protocol.dataset}, learning rate {rate:g}, seed {seed}",
    )
    loss.legend(fontsize="small")
    logit.set(ylabel="largest attention logit", yscale="log")
    entropy.set(
        ylabel="attention entropy of the worst\nhead, % of log(tokens)",
        xlabel="step",
        ylim=(0, 103),
    )
    looked_at = entropy.secondary_yaxis("right")
    looked_at.set_yticks([0, 100], ["one\ntoken", "all\ntokens"])
    looked_at.set_ylabel("each query looks at")
    figure.savefig(path, dpi=150)


def most_telling_rate(runs):
    """Return the rate at which losses with and without the norm differ most."""
    with_norm, without = (collections.defaultdict(list) for _ in range(2))
    for run in runs:
        group = with_norm if run["qk_norm"] else without
        group[run["learning_rate"]].append(_final_loss(run))
    both = sorted(with_norm.keys() & without.keys())
    if not both:
        return max(run["learning_rate"] for run in runs)
    return max(both, key=lambda r: np.mean(without[r]) - np.mean(with_norm[r]))
