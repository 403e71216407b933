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

from keras_vit22b import __version__
from keras_vit22b.training.stability_bench import Bench
from keras_vit22b.training.stability_bench import load_images
from keras_vit22b.weights.preset_folder import only_writer

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

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                "learning_rate must be positive. Received: "
                f"{self.learning_rate!r}."
            )
        if self.seed < 0:
            raise ValueError(
                f"seed must be at least 0. Received: {self.seed!r}."
            )

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
        self._path = self.folder / "runs.jsonl"
        self._protocol_path = self.folder / "protocol.json"
        ours = json.loads(json.dumps(dataclasses.asdict(self.protocol)))
        self._ours = ours | {
            "backend": keras.config.backend(),
            "keras": keras.__version__,
            "keras_vit22b": __version__,
        }
        self._check_protocol()

    def _check_protocol(self):
        if not self._path.exists():
            return
        try:
            theirs = json.loads(self._protocol_path.read_text())
            differ = [
                f"{name} {theirs.get(name)!r}, not {self._ours.get(name)!r}"
                for name in sorted(theirs.keys() | self._ours.keys())
                if theirs.get(name) != self._ours.get(name)
            ]
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.folder} has runs, but their protocol cannot be read: "
                f"{error}. Take another folder."
            ) from None
        if differ:
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
        for line in filter(None, self._path.read_text().splitlines()):
            try:
                run = json.loads(line)
            except json.JSONDecodeError:
                continue  # A kill cut the line.
            try:
                _setting(run)
            except (TypeError, KeyError, ValueError):
                raise ValueError(
                    f"{self._path} has a line that is no run: {line[:50]!r}. "
                    "Take another folder."
                ) from None
            qk_norm = run.pop("qk_norm")
            runs.append({"qk_norm": qk_norm, **_with_nan(run)})
        return runs

    @property
    def done(self):
        """dict from `Setting` to its run."""
        return {_setting(run): run for run in self.runs}

    def run(self, settings, progress=None):
        """Train what is not done yet.

        Args:
            settings: list of `Setting`.
            progress: function of a run and the numbers done and wanted.
                Defaults to `None`.

        Returns:
            The runs of `settings`, in their order.

        Raises:
            ValueError: if another process runs in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with only_writer(self.folder):
            return self._run(settings, progress)

    def _run(self, settings, progress):
        done = self.done
        data, benches = None, {}
        for number, setting in enumerate(settings, 1):
            if setting not in done:
                data = data or load_images(self.protocol.dataset)
                if not self._path.exists():
                    text = json.dumps(self._ours, indent=2) + "\n"
                    _write(self._protocol_path, text)
                variant = setting.qk_norm, setting.block
                if variant not in benches:
                    benches[variant] = Bench(*variant, self.protocol, data)
                run = benches[variant].train(
                    setting.learning_rate, setting.seed
                )
                done[setting] = run
                with self._path.open("a") as file:
                    file.write("\n" * bool(file.tell()) + as_json(run))
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

        rows = [summary(run) for run in runs]
        table = io.StringIO()
        writer = csv.DictWriter(table, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        _write(self.folder / "stability.csv", table.getvalue())
        result = {
            "protocol": dataclasses.asdict(self.protocol),
            "backend": self._ours["backend"],
            "versions": {k: self._ours[k] for k in ("keras", "keras_vit22b")},
            "sensitivity": {
                name: {"mean": mean, "std": std}
                for name, (mean, std) in sensitivity(runs).items()
            },
            "runs": rows,
        }
        _write(self.folder / "stability.json", as_json(result, indent=2) + "\n")
        plot_by_rate(
            runs, self.protocol, self.folder / "loss_by_learning_rate.png"
        )
        plot_by_step(runs, self.protocol, self.folder / "attention_by_step.png")
        return result


def summary(run):
    """Return what a run came to, one line of a table."""
    watched = run["watched"]
    return {
        **dataclasses.asdict(_setting(run)),
        "initial_loss": run["initial_loss"],
        "final_loss": run["final_loss"],
        "last_training_loss": float(np.mean(run["losses"][-10:])),
        # NaN, if there is any.
        "largest_logit": float(np.max([w["largest_logit"] for w in watched])),
        "last_largest_logit": watched[-1]["largest_logit"],
        "least_entropy": float(np.min([w["entropy"] for w in watched])),
        "last_entropy": watched[-1]["entropy"],
        "seconds": run["seconds"],
    }


def _with_nan(value):
    """Return what was read from JSON, with NaN for `null`."""
    if isinstance(value, dict):
        return {key: _with_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_nan(part) for part in value]
    return math.nan if value is None else value


def as_json(value, **options):
    """Return JSON, in which numbers that are not finite are `null`."""

    def finite(value):
        if isinstance(value, dict):
            return {key: finite(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(finite(value), allow_nan=False, **options)


def _write(path, text):
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
