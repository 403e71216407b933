"""How a training run goes, line by line."""

import itertools
import json
import logging
import math
import pathlib
import time

import keras

from keras_vit22b.training.checkpoints import steps_taken

logger = logging.getLogger(__name__)


def check_every(every):
    """Raise unless a number of steps is an int of at least 1."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"every must be an int of at least 1. Received: {every!r}."
        )


class TrainingLog(keras.callbacks.Callback):
    """Write loss, learning rate and speed every few steps, and each epoch.

    Means are of the steps since the line before or the epoch's start. So are
    Keras' own while this is in use, those of its history too; without it they
    are of the epoch so far. Lines also go to this module's logger, at level
    INFO.

    Args:
        path: path of a file, which gets a line of JSON each time, or `None`.
            A run that goes on from a checkpoint first drops what lies after
            it; one that starts anew renames the file. Defaults to `None`.
        every: int. Steps. Defaults to `50`.
        images_per_step: int. Of all devices; for images per second. Defaults
            to `None`.
        flops_per_image: float. Of a training step; for MFU. Defaults to
            `None`.
        peak_flops: float. FLOP/s of all devices; for MFU. Defaults to `None`.

    Attributes:
        records: list of dicts: `"step"`, the logs' values, `"learning_rate"`,
            `"seconds_per_step"`, `"images_per_second"`, and `"mfu"`.

    Raises:
        ValueError: in `fit`, if the file has lines that are no records.

    The first line of a run has no speed: its time is that of compiling.
    """

    def __init__(
        self,
        path=None,
        *,
        every=50,
        images_per_step=None,
        flops_per_image=None,
        peak_flops=None,
    ):
        super().__init__()
        check_every(every)
        self.path = None if path is None else pathlib.Path(path)
        self.every = every
        self.images_per_step = images_per_step
        self.flops_per_image = flops_per_image
        self.peak_flops = peak_flops
        self.records = []

    def on_train_begin(self, logs=None):
        self._step = self._last = steps_taken(self.model.optimizer)
        self._since = None
        if self.path is not None:
            self.records = kept_records(self.path, self._step)

    def on_epoch_begin(self, epoch, logs=None):
        self._before = self._last = self._step
        self._new = True  # Keras has forgotten the means.
        if self._since is not None:
            self._since = time.perf_counter()  # Without the validation.

    def on_train_batch_begin(self, batch, logs=None):
        if self._new:
            self.model.reset_metrics()
            self._new = False

    def on_train_batch_end(self, batch, logs=None):
        # Several at once, with steps_per_execution.
        before, self._step = self._step, self._before + batch + 1
        if self._step // self.every > before // self.every:
            self._write(logs or {})

    def on_epoch_end(self, epoch, logs=None):
        logs = dict(logs or {})
        validation = {
            name: _number(logs.pop(name))
            for name in list(logs)
            if name.startswith("val_")
        }
        if self._step > self._last:
            self._write(logs)
        if validation:
            self._append({"step": self._step, **validation})

    def _write(self, logs):
        # Reading a number waits for the step.
        record = {"step": self._step}
        record |= {name: _number(value) for name, value in logs.items()}
        now = time.perf_counter()
        optimizer = self.model.optimizer
        record["learning_rate"] = float(
            keras.ops.convert_to_numpy(optimizer.learning_rate)
        )
        if self._since is not None:
            seconds = (now - self._since) / (self._step - self._last)
            record["seconds_per_step"] = seconds
            if self.images_per_step is not None:
                rate = self.images_per_step / seconds
                record["images_per_second"] = rate
                if self.flops_per_image and self.peak_flops:
                    used = rate * self.flops_per_image
                    record["mfu"] = used / self.peak_flops
        self._append(record)
        self._since, self._last = time.perf_counter(), self._step
        self._new = True
        if not math.isfinite(record.get("loss", 0.0)):
            self.model.stop_training = True

    def _append(self, record):
        self.records.append(record)
        logger.info("%s", _in_words(record))
        if self.path is not None:
            append_record(self.path, record)


def _number(value):
    """Return a float, or a list of them for a metric that is an array."""
    return keras.ops.convert_to_numpy(value).astype(float).tolist()


def append_record(path, record):
    """Write a line of JSON at the end of a file."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def kept_records(path, step):
    """Drop the lines after a step, and one that a kill cut; return the rest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    if path.exists():
        lines = path.read_text(errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kept = record["step"] <= step
        except (ValueError, TypeError, KeyError):
            if number == len(lines) and number > 1:
                continue  # A kill cut it.
            raise ValueError(
                f"{path} is no log of training; line {number} is "
                f"{line[:50]!r}. Take another path."
            ) from None
        if kept:
            records.append(record)
    if lines and not records:
        # Of a run whose checkpoints are gone.
        names = (f"{path.stem}.{n}{path.suffix}" for n in itertools.count(1))
        paths = (path.with_name(name) for name in names)
        path.rename(next(p for p in paths if not p.exists()))
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(r) + "\n" for r in records))
    partial.replace(path)
    return records


_FORMS = {
    "learning_rate": "rate {:.3g}",
    "seconds_per_step": "{:.3g} s a step",
    "images_per_second": "{:.4g} images/s",
    "mfu": "MFU {:.1%}",
}


def _in_words(record):
    words = [f"step {record['step']}"]
    for name, value in record.items():
        if name != "step":
            form = name + (" {}" if isinstance(value, list) else " {:.4g}")
            words.append(_FORMS.get(name, form).format(value))
    return ", ".join(words)
