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
import time

import keras
import numpy as np

from keras_vit22b.training.attention_monitor import AttentionMonitor

DATASETS = ("digits", "fashion_mnist")
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
QK_NORMS = (None, "rms", "layer")
BLOCKS = ("parallel", "sequential")


@dataclasses.dataclass(frozen=True)
class StabilityProtocol:
    """How every model of a laboratory is made and trained.

    AdamW (betas 0.9 and 0.95, no decay), gradients clipped to norm 1, linear
    warm-up, then cosine to zero.

    Attributes:
        dataset: `"digits"` (scikit-learn's, 8 x 8 pixels, 64 tokens) or
            `"fashion_mnist"` (28 x 28, 49 tokens). Defaults to `"digits"`.
        steps: int. Defaults to `200`.
        batch_size: int. Defaults to `64`.
        warmup_steps: int. Defaults to `10`.
        num_layers: int. Defaults to `4`.
        hidden_dim: int. Defaults to `64`; the MLP has 4 times as many.
        num_heads: int. Defaults to `2`.
        validation_images: int. Held out, for the final loss. Defaults to
            `256`.
        every: int. Steps between two looks at attention. Defaults to `10`.
        monitor_images: int. Looked at. Defaults to `32`.
    """

    dataset: str = "digits"
    steps: int = 200
    batch_size: int = 64
    warmup_steps: int = 10
    num_layers: int = 4
    hidden_dim: int = 64
    num_heads: int = 2
    validation_images: int = 256
    every: int = 10
    monitor_images: int = 32

    def __post_init__(self):
        if self.dataset not in DATASETS:
            raise ValueError(
                f"dataset must be {' or '.join(map(repr, DATASETS))}. "
                f"Received: {self.dataset!r}."
            )
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{field.name} must be an integer of at least 1. "
                    f"Received: {value!r}."
                )


@dataclasses.dataclass(frozen=True)
class Setting:
    """What differs between the models of a laboratory."""

    qk_norm: str | None = "rms"
    learning_rate: float = 3e-2
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


class _Losses(keras.callbacks.Callback):
    """The loss of every step; Keras would give the mean of an epoch so far."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(float(logs["loss"]))
        if not math.isfinite(self.values[-1]):
            self.model.stop_training = True


def load_images(dataset):
    """Return images `(n, height, width, 1)` in [-1, 1], labels, patch size.

    Raises:
        OSError: if Fashion-MNIST is not in Keras' cache and cannot be loaded.
    """
    if dataset == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels, patch = digits.images / 8.0 - 1.0, digits.target, 1
    else:
        try:
            (images, labels), _ = keras.datasets.fashion_mnist.load_data()
        except Exception as error:  # Keras raises a bare Exception.
            raise OSError(
                f"Fashion-MNIST could not be loaded: {error} "
                "tools/fashion_mnist.sh fills Keras' cache from Debian's "
                "package."
            ) from error
        images, patch = images / 127.5 - 1.0, 4
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order, ..., None].astype("float32")
    return images, labels[order].astype("int32"), patch


def train(setting, protocol, data=None):
    """Train one model.

    Args:
        setting: `Setting`.
        protocol: `StabilityProtocol`.
        data: of `load_images`. Defaults to `None`: loaded.

    Returns:
        A dict: the setting; `"losses"`, one a step; `"initial_loss"` and
        `"final_loss"`, on held-out images; `"watched"`, a list of dicts with
        `"step"`, `"largest_logit"` and `"entropy"` (the least mean entropy of
        any head, as a share of `log T`); and `"seconds"`.
    """
    from keras_vit22b.models import ViT22BBackbone
    from keras_vit22b.models import ViT22BImageClassifier

    start = time.perf_counter()
    images, labels, patch = data or load_images(protocol.dataset)
    held = protocol.validation_images
    # Not of the model's seed: all see the same images in the same order.
    order = np.random.default_rng(setting.seed).integers(
        held, len(images), protocol.steps * protocol.batch_size
    )
    keras.utils.set_random_seed(setting.seed)
    backbone = ViT22BBackbone(
        images.shape[1:],
        patch,
        num_layers=protocol.num_layers,
        num_heads=protocol.num_heads,
        hidden_dim=protocol.hidden_dim,
        mlp_dim=4 * protocol.hidden_dim,
        block=setting.block,
        qk_norm=setting.qk_norm,
        pooling="mean",
    )
    model = ViT22BImageClassifier(backbone, 10, compile=False)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(protocol.steps - protocol.warmup_steps, 1),
        warmup_target=setting.learning_rate,
        warmup_steps=protocol.warmup_steps,
    )
    model.compile(
        keras.optimizers.Adam(schedule, beta_2=0.95, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    losses = _Losses()
    monitor = AttentionMonitor(
        images[: protocol.monitor_images],
        every=protocol.every,
        max_logit=math.inf,
        min_entropy=0.0,
    )
    validation = {
        "x": images[:held],
        "y": labels[:held],
        "batch_size": held,
        "verbose": 0,
    }
    initial = float(model.evaluate(**validation))
    model.fit(
        images[order],
        labels[order],
        batch_size=protocol.batch_size,
        shuffle=False,
        verbose=0,
        callbacks=[losses, monitor],
    )
    final = float(model.evaluate(**validation))
    return {
        **dataclasses.asdict(setting),
        "initial_loss": initial,
        "final_loss": final,
        "losses": losses.values,
        "watched": [
            {
                "step": record["step"],
                "largest_logit": float(record["largest_logit"].max()),
                "entropy": float(
                    record["mean_entropy"].min() / math.log(monitor.tokens)
                ),
            }
            for record in monitor.records
        ],
        "seconds": time.perf_counter() - start,
    }


def sensitivity(runs):
    """Return the learning-rate sensitivity of each variant.

    The mean over learning rates of `min(loss, initial loss) - best loss`, of
    final losses, and then over seeds: how much is lost by a rate that is not
    the best (Wortsman et al., 2023, section 2).

    Args:
        runs: list of dicts, of `train`.

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
        """list of dicts, of `train`. Those that are done."""
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
        data = None
        for number, setting in enumerate(settings, 1):
            if setting not in done:
                data = data or load_images(self.protocol.dataset)
                done[setting] = run = train(setting, self.protocol, data)
                with self._path.open("a") as file:
                    file.write("\n" * bool(file.tell()) + json.dumps(run))
                keras.backend.clear_session()
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
