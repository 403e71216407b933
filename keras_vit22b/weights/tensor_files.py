"""Read and write a model's tensors as safetensors.

A file carries the patch grid of its position table as metadata, so that the
table can be resized to any other grid.
"""

import contextlib
import json
import logging
import math
import os
import pathlib
import tempfile

import keras
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import safetensors
import safetensors.numpy

from keras_vit22b.layers.patch_embedding import as_pair
from keras_vit22b.layers.patch_embedding import resize_position_embedding
from keras_vit22b.weights.tensor_names import POSITION_EMBEDDING
from keras_vit22b.weights.tensor_names import is_head

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
FORMAT = "keras_vit22b"


def write_tensors(path, tensors, grid_size):
    """Write variables to one safetensors file, all or nothing.

    Args:
        path: path of the file.
        tensors: dict from name to `keras.Variable`.
        grid_size: `(rows, columns)` of the position table.
    """
    arrays = {}
    for name, variable in tensors.items():
        array = keras.ops.convert_to_numpy(variable.value)
        arrays[name] = np.ascontiguousarray(
            array, dtype=np.dtype(variable.dtype)
        )
    metadata = {
        "format": FORMAT,
        "grid_size": json.dumps(list(grid_size)),
    }
    with replacing(path) as temporary:
        safetensors.numpy.save_file(arrays, temporary, metadata=metadata)


@contextlib.contextmanager
def replacing(path):
    """Yield a temporary path that becomes `path` if the body succeeds."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}."
    )
    os.close(handle)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def read_tensors(path, tensors, grid_size):
    """Check a file against a model, then yield its tensors one by one.

    Nothing is yielded unless every tensor is present, expected and of the
    right shape; all faults are named in one error. A classifier's head in the
    file is left alone if `tensors` has none.

    Args:
        path: path of a safetensors file.
        tensors: dict from name to `keras.Variable`: what the model needs.
        grid_size: `(rows, columns)` of the model's position table, to which
            the file's is resized.

    Yields:
        Pairs of a variable and its NumPy value.

    Raises:
        ValueError: if the file is not safetensors, or does not fit.
    """
    try:
        file = safetensors.safe_open(path, framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file: {error}."
        ) from error
    with file:
        stored = _stored_specs(file)
        old_grid = _stored_grid(file, stored, grid_size)
        if not any(map(is_head, tensors)):
            stored = {n: s for n, s in stored.items() if not is_head(n)}
        _check(path, stored, tensors, old_grid)
        for name, variable in tensors.items():
            value = file.get_tensor(name)
            if name == POSITION_EMBEDDING:
                value = _resize(value, old_grid or grid_size, grid_size)
            yield variable, _cast(name, value, variable)


def _stored_specs(file):
    """Return `{name: (shape, dtype)}` from the header alone."""
    specs = {}
    for name in file.keys():
        piece = file.get_slice(name)
        specs[name] = (tuple(piece.get_shape()), piece.get_dtype())
    return specs


def _stored_grid(file, stored, grid_size):
    """Return the grid of the file's positions, or `None` if unknown.

    A file without a grid has the model's if that holds as many tokens, or
    else a square one.
    """
    text = (file.metadata() or {}).get("grid_size")
    if text is not None:
        try:
            return as_pair(json.loads(text))
        except (ValueError, TypeError):
            return None
    shape, _ = stored.get(POSITION_EMBEDDING, ((), None))
    if len(shape) != 2:
        return None
    if shape[0] == grid_size[0] * grid_size[1]:
        return grid_size
    side = math.isqrt(shape[0])
    return (side, side) if side > 0 and side * side == shape[0] else None


def _check(path, stored, wanted, old_grid):
    faults = []
    missing = [n for n in wanted if n not in stored]
    extra = [n for n in stored if n not in wanted]
    if missing:
        faults.append(f"missing: {', '.join(missing)}")
    if extra:
        faults.append(f"not part of the model: {', '.join(extra)}")
    for name, variable in wanted.items():
        if name not in stored:
            continue
        expected, (found, dtype) = tuple(variable.shape), stored[name]
        if name == POSITION_EMBEDDING and old_grid is not None:
            expected = (old_grid[0] * old_grid[1], expected[1])
        if found != expected:
            faults.append(f"{name} has shape {found}, expected {expected}")
        if not _is_float(dtype):
            faults.append(
                f"{name} is {dtype}, expected a float: integers are not cast"
            )
    if faults:
        raise ValueError(
            f"{path} does not fit the model:\n  " + "\n  ".join(faults)
        )


def _resize(table, old_grid, new_grid):
    if tuple(old_grid) == tuple(new_grid):
        return table
    logger.info("Resizing positions from %s to %s.", old_grid, new_grid)
    return keras.ops.convert_to_numpy(
        resize_position_embedding(table.astype("float32"), old_grid, new_grid)
    )


def _is_float(dtype):
    return dtype in ("F64", "F32", "F16", "BF16")


def _cast(name, value, variable):
    target = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    if value.dtype != target:
        logger.info("Casting %s from %s to %s.", name, value.dtype, target)
        value = value.astype(target)
    return value
