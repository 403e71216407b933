"""What is particular to JAX: arrays over devices and over processes."""

import contextlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from keras_vit22b.weights.preset_folder import replacing_folder
from keras_vit22b.weights.preset_folder import staging_path


def sharded_array(shape, sharding, read_slice):
    """Return an array of which each device holds its slice.

    Args:
        shape: tuple of int.
        sharding: a `jax.sharding.Sharding`.
        read_slice: a function from a tuple of slices, with start and stop, to
            the NumPy array there. Each slice is read once, however many
            devices hold it.
    """
    parts = {}

    def part(index):
        index = tuple(
            slice(*s.indices(size)[:2]) for s, size in zip(index, shape)
        )
        key = tuple((s.start, s.stop) for s in index)
        if key not in parts:
            parts[key] = read_slice(index)
        return parts[key]

    return jax.make_array_from_callback(tuple(shape), sharding, part)


@contextlib.contextmanager
def all_or_none():
    """Wait for every process at the end of the body; if one fails, all raise.

    Raises:
        RuntimeError: if the body failed in another process.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = multihost_utils.process_allgather(np.array([error is not None]))
    if error is not None:
        raise error
    if failed.any():
        numbers = ", ".join(map(str, np.flatnonzero(failed.ravel())))
        raise RuntimeError(
            f"It failed in process {numbers}; see the error there. Nothing was "
            "saved."
        )


@contextlib.contextmanager
def replacing_folder_together(path):
    """As `replacing_folder`, for a folder that all processes write into.

    Args:
        path: path of the folder, which all processes see.
    """
    if is_first_process():
        replacing = replacing_folder(path, owner="together")
    else:
        replacing = contextlib.nullcontext(staging_path(path, "together"))
    stack = contextlib.ExitStack()
    with all_or_none():
        folder = stack.enter_context(replacing)
    with all_or_none(), stack, all_or_none():
        yield folder


def write_own_slices(path, specs, tensors):
    """Write the slices that this process holds into a file of all processes.

    Each slice is written by one process only. No process holds a whole tensor
    that is sharded over several.

    Args:
        path: path of a file of its full size, which all processes see.
        specs: dict from tensor name to `TensorSpec`.
        tensors: dict from tensor name to `keras.Variable`.
    """
    for name, spec in specs.items():
        for shard in tensors[name].value.addressable_shards:
            if shard.replica_id != 0 or spec.start == spec.stop:
                continue
            mapped = np.memmap(
                path,
                np.uint8,
                mode="r+",
                offset=spec.start,
                shape=(spec.stop - spec.start,),
            )
            whole = mapped.view(spec.dtype).reshape(spec.shape)
            whole[shard.index] = np.asarray(shard.data)
            mapped.flush()


def num_processes():
    """Return the number of processes."""
    return jax.process_count()


def is_first_process():
    """Return whether this process is the first."""
    return jax.process_index() == 0
