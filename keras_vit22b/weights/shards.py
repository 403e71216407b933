"""A model's tensors in one or several safetensors files, and their index."""

import concurrent.futures
import contextlib
import json
import math
import re
import typing

import keras
import numpy as np

from keras_vit22b.weights.preset_folder import hash_file
from keras_vit22b.weights.preset_folder import listed
from keras_vit22b.weights.safetensors_file import DTYPES
from keras_vit22b.weights.safetensors_file import SafetensorsFile
from keras_vit22b.weights.safetensors_file import plan_file
from keras_vit22b.weights.safetensors_file import write_safetensors
from keras_vit22b.weights.tensor_names import POSITION_EMBEDDING

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The same index; keras_hub.models.Backbone.from_preset asks for this name,
# also where there is one file.
KERAS_INDEX_FILE = "model.weights.json"
SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
FORMAT = "keras_vit22b"
# Fewer than the files that any system lets a process open.
MOST_OPEN = 64


def write_shards(folder, tensors, grid_size, max_shard_size="5GB"):
    """Write variables as safetensors files with an index.

    Two files are written at a time, as hashing one takes longer than writing
    it; of each, one tensor is in host memory, and that only if the backend
    cannot share the variable's own. If several processes hold the model, each
    writes what it holds; all must call this, with a folder that all see.

    Args:
        folder: `pathlib.Path` of a folder.
        tensors: dict from name to `keras.Variable`.
        grid_size: `(rows, columns)` of the position table.
        max_shard_size: int of bytes, or string such as `"5GB"` (decimal). A
            larger tensor gets a file of its own. Defaults to `"5GB"`.

    Returns:
        A dict from file name to sha256, in hexadecimal.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    is_size = type(max_shard_size) is int and max_shard_size > 0
    if not is_size and not isinstance(max_shard_size, str):
        raise ValueError(
            "max_shard_size must be a number of bytes, or a string such as "
            f"'5GB'. Received: {max_shard_size!r}."
        )

    plan = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    metadata = file_metadata(grid_size)
    together = num_processes() > 1
    write = _write_together if together else _write_alone

    def write_shard(shard):
        names = plan.filename_to_tensors[shard]
        return write(folder / shard, {n: tensors[n] for n in names}, metadata)

    # Processes that wait for each other must go one by one.
    with concurrent.futures.ThreadPoolExecutor(1 if together else 2) as pool:
        shards = list(plan.filename_to_tensors)
        digests = dict(zip(shards, pool.map(write_shard, shards)))
    index = {
        "metadata": {"total_size": sum(map(num_bytes, tensors.values()))},
        "weight_map": {n: plan.tensor_to_filename[n] for n in tensors},
    }
    names = [KERAS_INDEX_FILE] + [INDEX_FILE] * plan.is_sharded
    if is_first_process():
        text = json.dumps(index, indent=2) + "\n"
        for name in names:
            (folder / name).write_text(text, encoding="utf-8")
    return digests


def write_one_file(path, tensors, grid_size):
    """Write variables to one safetensors file, without index."""
    _write_alone(path, tensors, file_metadata(grid_size))


def num_processes():
    """Return how many processes hold the model between them."""
    if keras.config.backend() != "jax":
        return 1
    from keras_vit22b.weights import jax_arrays

    return jax_arrays.num_processes()


def is_first_process():
    """Return whether this process writes what one process must write."""
    if num_processes() == 1:
        return True
    from keras_vit22b.weights import jax_arrays

    return jax_arrays.is_first_process()


def _write_alone(path, tensors, metadata):
    with open(path, "wb") as file:
        return write_safetensors(
            file, [_announce(n, v) for n, v in tensors.items()], metadata
        )


def _write_together(path, tensors, metadata):
    """Each process writes what it holds into one file that all see."""
    from keras_vit22b.weights import jax_arrays

    announced = [_announce(n, v)[:3] for n, v in tensors.items()]
    header, specs = plan_file(announced, metadata)
    with jax_arrays.all_or_none(), contextlib.ExitStack() as stack:
        if jax_arrays.is_first_process():
            file = stack.enter_context(open(path, "wb"))
            file.write(header)
            file.truncate(max(s.stop for s in specs.values()))
    with jax_arrays.all_or_none():
        jax_arrays.write_own_slices(path, specs, tensors)
    if not jax_arrays.is_first_process():
        return None
    with open(path, "rb") as file:
        return hash_file(file)


def file_metadata(grid_size):
    """Return what each file says of itself."""
    return {"format": FORMAT, "grid_size": json.dumps(list(grid_size))}


def dtype_of(variable):
    """Return a variable's dtype as NumPy's, bfloat16 and float8 included."""
    return np.dtype(keras.backend.standardize_dtype(variable.dtype))


def num_bytes(variable):
    """Return the bytes of a variable's value."""
    return math.prod(variable.shape) * dtype_of(variable).itemsize


def _announce(name, variable):
    dtype = dtype_of(variable)
    if dtype not in DTYPES.values():
        raise ValueError(f"{name} is {dtype}, which safetensors cannot hold.")

    def read():
        return _as_array(variable).astype(dtype, copy=False)

    return name, dtype, tuple(variable.shape), read


def _as_array(variable):
    """Return a variable's value; shared with it where the backend can."""
    # NumPy takes no bfloat16 from torch, and no scalar one from TensorFlow.
    if keras.config.backend() == "torch" or len(variable.shape) == 0:
        return keras.ops.convert_to_numpy(variable.value)
    # On TensorFlow this is a tensor that shares the variable's memory.
    return np.asarray(keras.ops.stop_gradient(variable.value))


class Shards:
    """The tensors of a preset's folder, checked before any is read.

    Args:
        folder: an open `PresetFolder`.
        only: string. Name of one file to take for all tensors, instead of the
            folder's index. Defaults to `None`.

    Attributes:
        path: string. The folder's source, or the one file's path.
        specs: dict from tensor name to `TensorSpec`.
        files: dict from tensor name to file name.

    Raises:
        ValueError: if there are no weights, or files and index disagree; all
            faults are named.
    """

    def __init__(self, folder, *, only=None):
        self._folder = folder
        self.path = self._name_of(only) if only else folder.source
        # The grid that each file says its positions have, as text.
        self.files, self.specs, self._grids = {}, {}, {}
        index = None if only else read_index(folder)
        if index is None:
            only = only or WEIGHTS_FILE
            if not folder.has(only):
                raise ValueError(f"{folder.path / only} does not exist.")
        faults = []
        names = [only] if only else sorted(set(index.weight_map.values()))
        for name in names:
            try:
                self._add(name, faults)
            except FileNotFoundError:
                faults.append(f"{name} is in the index, but does not exist")
            except ValueError as error:
                faults.append(str(error))
        if index is not None and not faults:
            faults += _disagreements(index, self.files, self.specs)
        if index is not None:
            faults += _check_copy(folder, index)
        faults += [
            f"{name} has grid_size {text}, expected such as [16, 16]"
            for name, text in self._grids.items()
            if _read_grid(text) is None
        ]
        if len(set(self._grids.values())) > 1:
            faults.append("the files disagree about grid_size")
        if faults:
            raise ValueError(
                f"The weights in {self.path} are broken:" + listed(faults)
            )

    def _add(self, name, faults):
        file, size = self._folder.open_header(name)
        with SafetensorsFile(file, self._name_of(name), size) as file:
            for tensor, spec in file.specs.items():
                if tensor in self.files:
                    faults.append(
                        f"{tensor} is in {self.files[tensor]} and in {name}"
                    )
                self.files[tensor], self.specs[tensor] = name, spec
            if "grid_size" in file.metadata:
                self._grids[name] = file.metadata["grid_size"]

    def _name_of(self, file):
        return f"{self._folder.source}/{file}"

    def grid_size(self, default):
        """Return `(rows, columns)` of the position table, or `None`.

        Files that do not say have the grid `default` if it holds as many
        tokens, or else a square one.
        """
        for text in self._grids.values():
            return _read_grid(text)
        spec = self.specs.get(POSITION_EMBEDDING)
        if spec is None or len(spec.shape) != 2:
            return None
        tokens = spec.shape[0]
        if tokens == default[0] * default[1]:
            return tuple(default)
        side = math.isqrt(tokens)
        return (side, side) if side > 0 and side * side == tokens else None

    def by_file(self, names):
        """Yield `(open SafetensorsFile, names)`, file by file.

        All files are opened before the first is read, so that a lost
        connection or a replaced folder leaves no model half-loaded; of very
        many files, only one is open at a time.
        """
        wanted = {}
        for name in names:
            wanted.setdefault(self.files[name], []).append(name)
        if len(wanted) > MOST_OPEN:
            for file_name, tensors in wanted.items():
                with self._reopen(file_name, tensors) as file:
                    yield file, tensors
            return
        with contextlib.ExitStack() as stack:
            yield from [
                (stack.enter_context(self._reopen(file_name, tensors)), tensors)
                for file_name, tensors in wanted.items()
            ]

    def _reopen(self, name, tensors):
        file = SafetensorsFile(self._folder.open(name), self._name_of(name))
        if any(file.specs.get(n) != self.specs[n] for n in tensors):
            with file:
                raise ValueError(f"{file.name} changed while it was read.")
        return file


def _read_grid(text):
    """Return `(rows, columns)`, or `None` if a text is no grid."""
    try:
        grid = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_pair = isinstance(grid, list) and len(grid) == 2
    if not is_pair or any(type(n) is not int or n < 1 for n in grid):
        return None
    return tuple(grid)


class Index(typing.NamedTuple):
    """What an index says.

    Attributes:
        name: string. Of its file.
        weight_map: dict from tensor name to file name.
        total_size: int. Bytes of all tensors, or `None` if it does not say.
    """

    name: str
    weight_map: dict
    total_size: int | None


def read_index(folder):
    """Return the `Index` of a folder, or `None`."""
    for name in (INDEX_FILE, KERAS_INDEX_FILE):
        if folder.has(name):
            return _parse_index(folder, name)
    return None


def _check_copy(folder, index):
    """Return faults of the index that stock keras-hub reads."""
    if index.name == KERAS_INDEX_FILE or not folder.has(KERAS_INDEX_FILE):
        return []
    try:
        copy = _parse_index(folder, KERAS_INDEX_FILE)
    except ValueError as error:
        return [str(error)]
    if copy.weight_map == index.weight_map:
        return []
    return [f"{INDEX_FILE} and {KERAS_INDEX_FILE} differ"]


def _parse_index(folder, name):
    content, path = folder.read_json(name), folder.path / name
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map.")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not SHARD_NAME.fullmatch(file):
            raise ValueError(
                f"{path} puts {tensor!r} in {file!r}; expected the plain name "
                "of a .safetensors file."
            )
    metadata = content.get("metadata")
    if not isinstance(metadata, dict) or "total_size" not in metadata:
        return Index(name, weight_map, None)
    if type(metadata["total_size"]) is not int:
        raise ValueError(f"{path}: total_size must be a whole number.")
    return Index(name, weight_map, metadata["total_size"])


def _disagreements(index, files, specs):
    faults = []
    for tensor, file in index.weight_map.items():
        found = files.get(tensor)
        if found is None:
            faults.append(f"{tensor} is not in {file}, as the index says")
        elif found != file:
            faults.append(f"{tensor} is in {found}, the index says {file}")
    for tensor in files.keys() - index.weight_map.keys():
        faults.append(f"{tensor} is in {files[tensor]}, but not in the index")
    stored = sum(spec.stop - spec.start for spec in specs.values())
    if index.total_size not in (None, stored):
        faults.append(
            f"{index.name} has total_size {index.total_size:,}, but the "
            f"tensors have {stored:,} bytes"
        )
    return faults
