"""Train a classifier by a recipe, from its start or from where it was."""

import contextlib
import dataclasses
import json
import math
import pathlib
import warnings

import keras

from keras_vit22b.models.size import describe_size
from keras_vit22b.training.checkpoints import Checkpoints
from keras_vit22b.training.checkpoints import steps_taken
from keras_vit22b.training.non_finite import NonFiniteSearch
from keras_vit22b.training.recipe import RECIPE_FILE
from keras_vit22b.training.recipe import Recipe
from keras_vit22b.training.training_log import TrainingLog
from keras_vit22b.training.training_log import check_every
from keras_vit22b.training.workers import Workers
from keras_vit22b.weights.preset_folder import only_writer

# A backward pass does twice what a forward pass does.
PASSES = 3
DATA_FILE = "data.json"


def train(
    model,
    recipe,
    data,
    folder,
    *,
    validation=None,
    every=500,
    keep=3,
    log_every=50,
    peak_flops=None,
    callbacks=(),
    start=None,
):
    """Train a classifier, or go on where a run in `folder` was.

    The folder gets `recipe.json`; `data.json`, by which to tell other data;
    `log.jsonl`, of `TrainingLog`; and `checkpoints/`, every `every` steps. A
    run that is killed at any moment and called again with the same arguments
    ends with the same weights, bit by bit on the same mesh. Works on one
    device, under `keras.distribution` with any number of processes, and under
    `tf.distribute`. With `accumulation_steps`, a
    step of log and checkpoints is one of the batches of which a step of the
    recipe consists.

    Args:
        model: a `ViT22BImageClassifier`, made in the scope of a strategy or
            under a distribution if there is one. Compiled here.
        recipe: `Recipe`.
        data: `TrainingData`.
        folder: path. Of this run, for all processes the same.
        validation: `TrainingData`, or `None`. Its loss chooses the checkpoint
            that is kept beside the last ones. Defaults to `None`.
        every: int. Steps between checkpoints. Defaults to `500`.
        keep: int. Of the last checkpoints. Defaults to `3`.
        log_every: int. Steps. Defaults to `50`.
        peak_flops: float. FLOP/s of all devices, for MFU. Defaults to `None`.
        callbacks: list of `keras.callbacks.Callback`, such as an
            `AttentionMonitor`. Defaults to none.
        start: path. Checkpoints of another run, from whose last one a new run
            begins. Defaults to `None`: from the model's own weights.

    Returns:
        The `TrainingLog`.

    Raises:
        FloatingPointError: if the loss or a variable is not finite. It names
            the first such tensor; the last good checkpoint is kept.
        ValueError: if the folder holds a run of another recipe, model or
            data, or one that still goes on, or the batch does not divide over
            processes.
    """
    check_every(every)
    check_every(log_every)
    _check_labels(data, model)
    folder = pathlib.Path(folder).expanduser()
    workers = Workers(model)
    workers.check_recipe(recipe)
    if workers.first:
        folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder) if workers.first else contextlib.nullcontext():
        return _train(
            model,
            recipe,
            data,
            folder,
            workers,
            validation=validation,
            every=every,
            keep=keep,
            log_every=log_every,
            peak_flops=peak_flops,
            callbacks=callbacks,
            start=start,
        )


def _train(
    model,
    recipe,
    data,
    folder,
    workers,
    *,
    validation,
    every,
    keep,
    log_every,
    peak_flops,
    callbacks,
    start,
):
    # With accumulation, steps are those of batches from here on.
    batch_size = recipe.batch_size // recipe.accumulation_steps
    total = recipe.total_steps * recipe.accumulation_steps
    log = TrainingLog(
        folder / "log.jsonl" if workers.first else None,
        every=log_every,
        images_per_step=batch_size,
        flops_per_image=PASSES
        * describe_size(model.backbone)["flops_per_image"]["total"],
        peak_flops=peak_flops,
    )
    strategy = workers.strategy
    with strategy.scope() if strategy else contextlib.nullcontext():
        recipe.compile(model, sparse=data.labels.ndim == 1)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=keep,
            monitor=None if validation is None else "val_loss",
            writes=workers.writes_state,
        )
        known = {
            "data": data.describe(),
            "validation": validation and validation.describe(),
        }
        if checkpoints.steps:
            _check_same(recipe, known, folder)
        step = checkpoints.restore(model)
    if step is None:
        step = _first_step(model, start)
        checkpoints.save(model)
    if workers.first:
        recipe.save(folder)
        _write_json(folder / DATA_FILE, known)
    left = total - step
    if left <= 0:
        log.set_model(model)
        log.on_train_begin()  # Reads what there is.
        model.optimizer.finalize_variable_values(model.trainable_variables)
        return log
    every = min(every, left)
    epochs = math.ceil(left / every)

    def load(start, stop):
        return workers.load(
            lambda share: data.batches(
                batch_size, start=start, stop=stop, share=share
            )
        )

    options = {}
    if validation is not None:
        whole = workers.whole_batches
        options["validation_data"] = workers.load(
            lambda share: validation.in_order(
                batch_size, share=share, drop_remainder=whole
            )
        )
    try:
        with _without_preprocessor(model), _quiet_validation():
            model.fit(
                load(step, step + epochs * every),
                steps_per_epoch=every,
                epochs=epochs,
                shuffle=False,
                verbose=0,
                # The log has what the callbacks put into it.
                callbacks=[_Stop(left), *callbacks, log, checkpoints],
                **options,
            )
    except FloatingPointError as error:

        def read(step):
            return data.batches(
                batch_size, start=step, stop=step + 1, share=workers.share
            )

        raise FloatingPointError(
            _diagnose(model, checkpoints, read, lambda s: load(s, s + 1))
        ) from error
    finally:
        checkpoints.wait()
    return log


def _check_labels(data, model):
    """Raise unless labels are classes of the model's head."""
    classes = model.head.bias.shape[0]
    labels = data.labels
    found = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    if found > classes or (labels.ndim == 2 and found != classes):
        raise ValueError(
            f"The head has {classes} classes. Received labels of {found}."
        )


def _first_step(model, start):
    if start is None:
        return 0
    step = Checkpoints(start, writes=False).restore(model)
    if step is None:
        raise ValueError(f"{start} holds no checkpoint to start from.")
    return step


def _check_same(recipe, known, folder):
    """Raise if the folder holds a run of another recipe or other data."""
    ours = dataclasses.asdict(recipe)
    theirs = {}
    if (folder / RECIPE_FILE).exists():
        theirs |= dataclasses.asdict(Recipe.load(folder))
    if (folder / DATA_FILE).exists():
        theirs |= json.loads((folder / DATA_FILE).read_text())
    differ = [
        f"{name}={theirs[name]!r}, not {value!r}"
        for name, value in {**ours, **known}.items()
        if name in theirs and name != "name" and theirs[name] != value
    ]
    if differ:
        raise ValueError(
            f"{folder} holds a run with {', '.join(differ)}. Take the same "
            "recipe, data and seed to go on, or another folder."
        )


def _write_json(path, content):
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content) + "\n")
    partial.replace(path)


@contextlib.contextmanager
def _without_preprocessor(model):
    """Let `fit` take what `TrainingData` has converted already."""
    preprocessor, model.preprocessor = model.preprocessor, None
    try:
        yield
    finally:
        model.preprocessor = preprocessor


@contextlib.contextmanager
def _quiet_validation():
    """Silence Keras on data that end, since grain's have no length.

    `validation_steps` would not do: Keras 3.15 then reads past their end.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


class _Stop(keras.callbacks.Callback):
    """End training within an epoch.

    Data that end there would do it, too, but on TensorFlow the step that finds
    none still counts as a step of the optimizer.
    """

    def __init__(self, steps):
        super().__init__()
        self._left = steps

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            self.model.stop_training = True


def _diagnose(model, checkpoints, read, load):
    """Train again from the last good checkpoint, looking at each step.

    Args:
        model: a compiled `ViT22BImageClassifier`.
        checkpoints: `Checkpoints`.
        read: a function from a step to its batch, as the only element.
        load: a function from a step to what `fit` takes.

    Returns:
        A string. What went wrong.
    """
    failed = steps_taken(model.optimizer)
    start = checkpoints.restore(model)
    if start is None:
        return (
            f"A value was not finite at step {failed}; no checkpoint is good."
        )
    kept = f"The last good checkpoint is {checkpoints.folder / str(start)}."
    search = NonFiniteSearch(model)
    model.optimizer.use_ema = False  # Else `fit` would end with the average.
    one = {"steps_per_epoch": 1, "shuffle": False, "verbose": 0}
    for step in range(start, failed + 1):
        name = search(*next(iter(read(step))))
        if name is not None:
            return f"Step {step + 1}: {name} is the first not finite. {kept}"
        with _without_preprocessor(model):
            model.fit(load(step), **one)
    return f"A value was not finite, but it did not happen again. {kept}"
