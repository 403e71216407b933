"""The stability laboratory: when does attention collapse, and what cures it?

Small models are trained alike but for query and key norm, kind of block,
learning rate and seed, as large ones are known to fail: at high rates without
the norm.

Source: Wortsman et al., 2023, https://arxiv.org/abs/2309.14322
"""

import collections
import csv
import dataclasses
import io
import json
import math
import pathlib

import keras
import numpy as np

from keras_vit22b.training.stability_bench import Bench
from keras_vit22b.training.stability_bench import load_images

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
QK_NORMS = (None, "rms", "layer")
BLOCKS = ("parallel", "sequential")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What differs between the models of a laboratory."""

    qk_norm: str | None = "rms"
    learning_rate: float = 5e-2
    block: str = "parallel"
    seed: int = 0

    @property
    def variant(self):
        """string. Without rate and seed."""
        norm = f"{self.qk_norm} QK norm" if self.qk_norm else "no QK norm"
        return f"{self.block}, {norm}"


def grid(
    learning_rates=LEARNING_RATES,
    qk_norms=QK_NORMS,
    blocks=BLOCKS,
    seeds=(0, 1, 2),
):
    """Return all settings of a grid, seed by seed, so that few are a picture.

    Args:
        learning_rates: sequence of float.
        qk_norms: sequence of `"rms"`, `"layer"` and `None`.
        blocks: sequence of `"parallel"` and `"sequential"`.
        seeds: sequence of int.
    """
    return [
        Setting(norm, rate, block, seed)
        for seed in seeds
        for block in blocks
        for norm in qk_norms
        for rate in learning_rates
    ]


def sensitivity(runs):
    """Return the learning-rate sensitivity of each variant.

    The mean over learning rates of `min(loss, initial loss) - best loss`, of
    final losses, and then over seeds: how much is lost by a rate that is not
    the best (Wortsman et al., 2023, section 2).

    Args:
        runs: list of dicts, of `Bench.train`.

    Returns:
        A dict from variant to `(mean, standard deviation over seeds)`.
    """
    by_variant = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        by_variant[_setting(run).variant][run["seed"]].append(run)
    result = {}
    for variant, by_seed in by_variant.items():
        values = []
        for group in by_seed.values():
            # A loss that is no number counts as that at the start.
            losses = [
                min(_finite(r["final_loss"]), r["initial_loss"]) for r in group
            ]
            values.append(np.mean(losses) - min(losses))
        result[variant] = float(np.mean(values)), float(np.std(values))
    return result


def _finite(value):
    return value if math.isfinite(value) else math.inf


def _setting(run):
    names = [field.name for field in dataclasses.fields(Setting)]
    return Setting(**{name: run[name] for name in names})


class Laboratory:
    """Runs of one protocol, kept in a folder so that they go on after a kill.

    Args:
        protocol: `StabilityProtocol`.
        folder: path. Gets `runs.jsonl`, and by `report` `stability.csv`,
            `stability.json` and two pictures.

    Raises:
        ValueError: if the folder holds runs of another protocol.
    """

    def __init__(self, protocol, folder):
        self.protocol = protocol
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / "runs.jsonl"
        self._check_protocol()

    def _check_protocol(self):
        path = self.folder / "protocol.json"
        ours = json.loads(json.dumps(dataclasses.asdict(self.protocol)))
        ours["backend"] = keras.config.backend()
        if not path.exists():
            _write(path, json.dumps(ours, indent=2) + "\n")
            return
        theirs = json.loads(path.read_text())
        if theirs != ours:
            differ = [
                f"{name} {theirs.get(name)!r}, not {value!r}"
                for name, value in ours.items()
                if theirs.get(name) != value
            ]
            raise ValueError(
                f"{self.folder} holds runs with {', '.join(differ)}. Take "
                "another folder."
            )

    @property
    def runs(self):
        """list of dicts, of `Bench.train`. Those that are done."""
        if not self._path.exists():
            return []
        runs = []
        for line in self._path.read_text().splitlines():
            try:
                runs.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # A kill cut the line.
        return runs

    def run(self, settings, progress=None):
        """Train what is not done yet.

        Args:
            settings: list of `Setting`.
            progress: function of a run and the numbers done and wanted.
                Defaults to `None`.

        Returns:
            The runs of `settings`, in their order.
        """
        done = {_setting(run): run for run in self.runs}
        data, benches = None, {}
        for number, setting in enumerate(settings, 1):
            if setting not in done:
                data = data or load_images(self.protocol.dataset)
                variant = setting.qk_norm, setting.block
                if variant not in benches:
                    benches[variant] = Bench(*variant, self.protocol, data)
                run = benches[variant].train(
                    setting.learning_rate, setting.seed
                )
                done[setting] = run
                with self._path.open("a") as file:
                    file.write("\n" * bool(file.tell()) + json.dumps(run))
            if progress is not None:
                progress(done[setting], number, len(settings))
        return [done[setting] for setting in settings]

    def report(self, runs):
        """Write table, JSON and pictures; return the JSON as a dict.

        Args:
            runs: list of dicts, of `run`.
        """
        from keras_vit22b.training.stability_plots import plot_by_rate
        from keras_vit22b.training.stability_plots import plot_by_step

        rows = [_row(run) for run in runs]
        table = io.StringIO()
        writer = csv.DictWriter(table, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        _write(self.folder / "stability.csv", table.getvalue())
        result = {
            "protocol": dataclasses.asdict(self.protocol),
            "backend": keras.config.backend(),
            "versions": {"keras": keras.__version__},
            "sensitivity": {
                name: {"mean": mean, "std": std}
                for name, (mean, std) in sensitivity(runs).items()
            },
            "runs": rows,
        }
        _write(
            self.folder / "stability.json", json.dumps(result, indent=2) + "\n"
        )
        plot_by_rate(runs, self.folder / "loss_by_learning_rate.png")
        plot_by_step(runs, self.protocol, self.folder / "attention_by_step.png")
        return result


def _row(run):
    """What a run came to, in one line of a table."""
    watched = run["watched"]
    return {
        **dataclasses.asdict(_setting(run)),
        "initial_loss": run["initial_loss"],
        "final_loss": run["final_loss"],
        "last_training_loss": float(np.mean(run["losses"][-10:])),
        "largest_logit": max(w["largest_logit"] for w in watched),
        "last_largest_logit": watched[-1]["largest_logit"],
        "least_entropy": min(w["entropy"] for w in watched),
        "last_entropy": watched[-1]["entropy"],
        "seconds": run["seconds"],
    }


def _write(path, text):
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
