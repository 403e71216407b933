"""From stored tensors to a model's variables, checked as a whole first."""

import logging

import keras
import numpy as np

from keras_vit22b.layers.patch_embedding import resize_position_embedding
from keras_vit22b.weights.preset_folder import listed
from keras_vit22b.weights.shards import dtype_of
from keras_vit22b.weights.tensor_names import POSITION_EMBEDDING
from keras_vit22b.weights.tensor_names import is_head

logger = logging.getLogger(__name__)


class StoredTensor:
    """One tensor of an open file, as a variable wants it.

    Args:
        file: an open `SafetensorsFile`.
        name: string.
        dtype: NumPy dtype to cast to.
        resize: a function of the whole tensor. Defaults to `None`.
    """

    def __init__(self, file, name, dtype, resize=None):
        self._file, self._name, self._dtype = file, name, dtype
        self._resize = resize

    def read(self):
        """Return the whole tensor."""
        value = self._file.read(self._name)
        if self._resize is not None:
            value = self._resize(value)
        return value.astype(self._dtype, copy=False)

    def read_slice(self, index):
        """Return the part that `index`, a tuple of slices, selects."""
        if self._resize is not None:
            return self.read()[index]
        part = self._file.read_slice(self._name, index)
        return part.astype(self._dtype, copy=False)


def stored_tensors(shards, variables, grid_size):
    """Check stored tensors against a model, then yield them one by one.

    Nothing is yielded unless every tensor is present, expected, of the right
    shape and of a dtype that may be cast; all faults are named in one error. A
    stored head is left alone if `variables` has none.

    Args:
        shards: a `Shards`.
        variables: dict from tensor name to `keras.Variable`.
        grid_size: `(rows, columns)` of the model's position table, to which
            the stored one is resized.

    Yields:
        Pairs of a variable and its `StoredTensor`, to be read before the next.

    Raises:
        ValueError: if the tensors do not fit.
    """
    old_grid = shards.grid_size(grid_size)
    _check(shards, variables, old_grid)
    _log_casts(shards, variables)
    resize = None
    if old_grid is not None and tuple(old_grid) != tuple(grid_size):
        logger.info("Resizing positions from %s to %s.", old_grid, grid_size)

        def resize(table):
            table = table.astype("float32")
            return keras.ops.convert_to_numpy(
                resize_position_embedding(table, old_grid, grid_size)
            )

    for file, names in shards.by_file(variables):
        for name in names:
            yield (
                variables[name],
                StoredTensor(
                    file,
                    name,
                    dtype_of(variables[name]),
                    resize if name == POSITION_EMBEDDING else None,
                ),
            )


def _check(shards, variables, old_grid):
    stored = shards.specs
    if not any(map(is_head, variables)):
        stored = {n: s for n, s in stored.items() if not is_head(n)}
    shapes = {name: tuple(v.shape) for name, v in variables.items()}
    faults = shape_faults(stored, shapes, old_grid)
    for name, variable in variables.items():
        if name not in stored:
            continue
        dtype, wanted = stored[name].dtype, dtype_of(variable)
        if dtype != wanted and not (is_float(dtype) and is_float(wanted)):
            faults.append(
                f"{name} is {dtype}, expected {wanted}; only floats are cast"
            )
    if faults:
        raise ValueError(
            f"The weights in {shards.path} do not fit the model:"
            + listed(faults)
        )


def shape_faults(stored, shapes, old_grid):
    """Return what is wrong with the names and shapes of stored tensors.

    Args:
        stored: dict from tensor name to `TensorSpec`.
        shapes: dict from tensor name to the shape that the model has.
        old_grid: `(rows, columns)` of the stored position table, or `None`
            for that of the model.

    Returns:
        A list of strings.
    """
    faults = [f"missing: {n}" for n in shapes if n not in stored]
    faults += [f"not part of the model: {n}" for n in stored if n not in shapes]
    for name, expected in shapes.items():
        if name == POSITION_EMBEDDING and old_grid is not None:
            expected = (old_grid[0] * old_grid[1], expected[1])
        if name in stored and stored[name].shape != expected:
            faults.append(
                f"{name} has shape {stored[name].shape}, expected {expected}"
            )
    return faults


def _log_casts(shards, variables):
    casts = {}
    for name, variable in variables.items():
        pair = (shards.specs[name].dtype, dtype_of(variable))
        if pair[0] != pair[1]:
            casts[pair] = casts.get(pair, 0) + 1
    for (source, target), count in casts.items():
        logger.info("Casting %d tensors from %s to %s.", count, source, target)


def is_float(dtype):
    """Return whether a NumPy dtype is a float, bfloat16 and float8 included."""
    # NumPy's own floats and those of ml_dtypes, whose kind is "V" or "f".
    return np.issubdtype(dtype, np.floating) or "float" in dtype.name
