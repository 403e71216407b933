"""The state of a training run, kept so that a killed run goes on."""

import errno
import itertools
import logging
import pathlib
import re
import warnings

import keras
import numpy as np

from keras_vit22b.weights.shards import is_first_process
from keras_vit22b.weights.state_check import check_state

logger = logging.getLogger(__name__)


class Checkpoints(keras.callbacks.Callback):
    """Keep weights, optimizer, step and seeds, by orbax.

    Writes `folder/<step>` after each epoch, in the background; a folder gets
    its name when it is complete. Every device writes what it holds, and
    `restore` may be on another mesh. orbax does not notice changed bytes, so a
    sum of each variable's bits is kept too. A state that is not finite is not
    written, and ends training. Needs orbax-checkpoint.

    Where several processes train one model, all must use this, with a folder
    that all see.

    Args:
        folder: path.
        keep: int. How many of the last checkpoints to keep. Defaults to `3`.
        monitor: string, such as `"val_loss"`. Of the logs; the checkpoint with
            the least is kept as well. Defaults to `None`: the last alone.
        writes: bool. Whether this process writes. `False` where processes
            hold the same, as on TensorFlow, and another writes. Defaults to
            `True`.

    Raises:
        ImportError: without orbax-checkpoint.
        FloatingPointError: in `fit`, if a variable or a log is not finite.

    Example:
    ```python
    checkpoints = keras_vit22b.training.Checkpoints("run/checkpoints")
    step = checkpoints.restore(classifier)
    classifier.fit(images, labels, callbacks=[checkpoints])
    ```
    """

    def __init__(self, folder, *, keep=3, monitor=None, writes=True):
        super().__init__()
        if keep < 1:
            raise ValueError(f"keep must be at least 1. Received: {keep}.")
        self.folder = pathlib.Path(folder).expanduser().absolute()
        self.monitor = monitor
        self._manager = _make_manager(self.folder, keep, monitor, writes)
        self._writes = writes

    def on_epoch_end(self, epoch, logs=None):
        # `self.model` also brings JAX's weights up to date.
        self.save(self.model, logs)

    def on_train_end(self, logs=None):
        self.wait()

    @property
    def steps(self):
        """list of int. Of the complete checkpoints, sorted."""
        self.wait()
        return sorted(self._manager.all_steps())

    def wait(self):
        """Wait until what was saved is on disk."""
        self._manager.wait_until_finished()

    def save(self, model, logs=None):
        """Write a checkpoint of a compiled model.

        Args:
            model: a compiled `keras.Model`.
            logs: dict of floats, for `monitor`. Defaults to `None`.

        Raises:
            FloatingPointError: if a variable or a log is not finite.
        """
        import orbax.checkpoint as ocp

        variables = _variables(model)
        records, bad = check_state(variables)
        step = steps_taken(model.optimizer)
        if not np.isfinite(float((logs or {}).get("loss", 0.0))):
            bad.append("the loss")
        if bad:
            others = f", nor are {len(bad) - 1} others" if bad[1:] else ""
            raise FloatingPointError(
                f"At step {step} {bad[0]} is not finite{others}."
            )
        if not self._writes or step in self._manager.all_steps():
            return
        metrics = None
        if self.monitor is not None:
            value = float((logs or {}).get(self.monitor, np.inf))
            metrics = {"value": value if np.isfinite(value) else np.inf}
        written = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(
                    {name: _value(v) for name, v in variables.items()}
                ),
                records=ocp.args.JsonSave(records),
            ),
            metrics=metrics,
        )
        if not written:
            raise RuntimeError(
                f"orbax did not write step {step} into {self.folder}, which "
                f"holds {self.steps}."
            )
        logger.info("step %d: checkpoint in %s", step, self.folder / str(step))

    def restore(self, model):
        """Give a compiled model the state of the last good checkpoint.

        Args:
            model: a compiled `keras.Model`, as it was when it was saved, but
                for its layout.

        Returns:
            The step, or `None` if there is no checkpoint. Checkpoints that
            are damaged are passed over with a warning and renamed to
            `<step>.broken`.

        Raises:
            OSError: if a disk or network fails, and nothing is renamed.
            ValueError: if the checkpoint is of another model or optimizer, or
                all there are were damaged.
        """
        optimizer = model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables = _variables(model)
        steps = self.steps
        for step in reversed(steps):
            if self._read(step, variables):
                logger.info("step %d: restored from %s", step, self.folder)
                return step
            self._set_aside(step)
        if steps:
            raise ValueError(
                f"All checkpoints in {self.folder} were damaged, of steps "
                f"{', '.join(map(str, steps))}. They are kept as "
                "<step>.broken; the same call now starts anew."
            )
        return None

    def _set_aside(self, step):
        """Rename a broken checkpoint, so that its step can be written anew."""
        if not self._writes:
            return
        if is_first_process():
            names = (f"{step}.broken{n or ''}" for n in itertools.count())
            paths = (self.folder / name for name in names)
            free = next(path for path in paths if not path.exists())
            (self.folder / str(step)).rename(free)
        _all_agree(True)  # Waits for the first.
        self._manager.reload()

    def _read(self, step, variables):
        """Restore one checkpoint; return whether it could be."""
        import orbax.checkpoint as ocp

        path = self.folder / str(step)
        fault, values = None, None
        try:
            records = self._manager.restore(
                step, args=ocp.args.Composite(records=ocp.args.JsonRestore())
            )["records"]
            _check_kinds(path, records, variables)
            values = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(
                        {n: _template(v) for n, v in variables.items()}
                    )
                ),
            )["state"]
            found, _ = check_state(values)
            changed = [n for n in records if records[n] != found[n]]
            if changed:
                fault = f"{changed[0]} is not what was written"
        except (_OtherModel, MemoryError):
            raise
        except Exception as error:  # orbax raises many kinds.
            if _is_of_system(error):
                raise
            # Their messages may be long specifications.
            first = str(error).strip().partition("\n")[0]
            fault = f"{type(error).__name__}: {first[:200]}"
        if not _all_agree(fault is None):
            warnings.warn(
                f"Checkpoint {path} is broken and passed over: "
                f"{fault or 'it is in another process'}.",
                stacklevel=3,
            )
            return False
        for name, variable in variables.items():
            variable.assign(values[name])
        return True


class _OtherModel(ValueError):
    pass


def _is_of_system(error):
    """Whether a read failed for a reason that may pass."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    )


def unwrapped(optimizer):
    """Return the optimizer within one that scales the loss, of float16."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def steps_taken(optimizer):
    """Return how many batches an optimizer was given.

    `iterations` leaves out those whose gradients are only accumulated so far.
    """
    variables = unwrapped(optimizer).variables
    count = next(v for v in variables if v.name == "iteration")
    return int(keras.ops.convert_to_numpy(count.value))


def _make_manager(folder, keep, monitor, writes):
    try:
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as managers
    except ImportError:
        raise ImportError(
            "Checkpoints are written by orbax: pip install orbax-checkpoint"
        ) from None
    policy, tracking = managers.LatestN(keep), {}
    if monitor is not None:
        # Without these, orbax writes no metrics, and forgets them with the
        # process.
        tracking = {
            "best_fn": lambda metrics: metrics["value"],
            "best_mode": "min",
            "keep_checkpoints_without_metrics": True,
        }
        best = managers.BestN(
            get_metric_fn=lambda metrics: metrics["value"], reverse=True, n=1
        )
        policy = managers.AnyPreservationPolicy([policy, best])
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policy,
        read_only=not writes,
        create=writes,
        **tracking,
    )
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    return ocp.CheckpointManager(folder, options=options)


def _variables(model):
    """Return `{name: variable}` of all that training changes."""
    found, seeds = {}, 0
    for kind, variables in (
        ("model", model.trainable_variables),
        ("model", model.non_trainable_variables),
        ("optimizer", model.optimizer.variables),
    ):
        for variable in variables:
            # Keras counts optimizers and seeds over all models of a process.
            path = variable.path.removeprefix(f"{model.optimizer.name}/")
            inner = f"{unwrapped(model.optimizer).name}/"
            if path.startswith(inner):  # Of one that scales the loss.
                path = f"inner/{path.removeprefix(inner)}"
            if re.match(r"seed_generator(_\d+)?/", path):
                path, seeds = f"seed_generator/{seeds}", seeds + 1
            name = f"{kind}.{path.replace('/', '.')}"
            if name in found:
                raise ValueError(f"Two variables are called {variable.path}.")
            found[name] = variable
    return found


def _value(variable):
    """Return what orbax writes: an array over devices on JAX, else NumPy's."""
    if keras.config.backend() == "jax":
        return variable.value
    return keras.ops.convert_to_numpy(variable.value)


def _template(variable):
    shape, dtype = tuple(variable.shape), variable.dtype
    if keras.config.backend() == "jax":
        import jax

        sharding = variable.value.sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    import ml_dtypes  # noqa: F401  Gives NumPy the small float types.

    return np.broadcast_to(np.zeros((), dtype), shape)  # Takes no memory.


def _check_kinds(path, records, variables):
    held = {n: (r["dtype"], tuple(r["shape"])) for n, r in records.items()}
    wanted = {n: (v.dtype, tuple(v.shape)) for n, v in variables.items()}
    names = [n for n in {**wanted, **held} if wanted.get(n) != held.get(n)]
    if names:
        name = names[0]
        raise _OtherModel(
            f"{path} is of another model, optimizer or backend. {len(names)} "
            f"variables differ, such as {name}: it holds {held.get(name)}, and "
            f"the model has {wanted.get(name)}."
        )


def _all_agree(good):
    if keras.config.backend() != "jax":
        return good
    import jax

    if jax.process_count() == 1:
        return good
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array(good)).all())
