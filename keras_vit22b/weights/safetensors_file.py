"""The safetensors format: a checked header, then bytes, read and streamed.

A file is the header's length (8 bytes, little endian), a JSON header that
gives each tensor's dtype, shape and byte range, and the bytes. Headers of
untrusted files are checked in full before anything is allocated.

Reference: https://github.com/huggingface/safetensors#format
"""

import concurrent.futures
import hashlib
import json
import math
import os
import typing

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
DTYPES = {code: np.dtype(kind) for code, kind in DTYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# What XLA and Eigen ask of a buffer that they use without copying it.
ALIGNMENT = 64
# The Hub reads no larger header.
MAX_HEADER_BYTES = 25_000_000
CHUNK = 64 * 1024 * 1024
SYNC_EVERY = 32 * 1024 * 1024


class TensorSpec(typing.NamedTuple):
    """Where a tensor lies in its file.

    Attributes:
        dtype: NumPy dtype.
        shape: tuple of int.
        start: int. First byte, counted from the start of the file.
        stop: int. Byte after the last.
    """

    dtype: np.dtype
    shape: tuple
    start: int
    stop: int


class SafetensorsFile:
    """One safetensors file, open for reading.

    Args:
        file: binary file object, which this closes.
        name: string. For messages.
        size: int. Bytes of the whole file, where the object holds its header
            alone. Defaults to `None`: the object's own.

    Attributes:
        specs: dict from tensor name to `TensorSpec`.
        metadata: dict of strings.

    Raises:
        ValueError: if the file breaks the format.
    """

    def __init__(self, file, name, size=None):
        self._file = file
        self.name = name
        if size is None:
            size = os.fstat(file.fileno()).st_size
        try:
            self.specs, self.metadata = _read_header(file, size)
        except ValueError as error:
            file.close()
            raise ValueError(f"{name} is not safetensors: {error}") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def read(self, tensor):
        """Return a whole tensor, in an aligned buffer of its own."""
        spec = self.specs[tensor]
        size = spec.stop - spec.start
        padded = np.empty(size + ALIGNMENT, np.uint8)
        first = -padded.ctypes.data % ALIGNMENT
        buffer = padded[first : first + size]
        self._file.seek(spec.start)
        view, done = memoryview(buffer), 0
        while done < size:
            count = self._file.readinto(view[done : done + CHUNK])
            if not count:
                raise ValueError(f"{self.name} ended while it was read.")
            done += count
        return buffer.view(spec.dtype).reshape(spec.shape)

    def read_slice(self, tensor, index):
        """Return a copy of part of a tensor; only its pages are read.

        Args:
            tensor: string.
            index: tuple of slices with step 1, one an axis.
        """
        spec = self.specs[tensor]
        if spec.start == spec.stop or not spec.shape:
            return self.read(tensor)[index]
        mapped = np.memmap(
            self._file,
            np.uint8,
            mode="r",
            offset=spec.start,
            shape=(spec.stop - spec.start,),
        )
        whole = mapped.view(spec.dtype).reshape(spec.shape)
        return np.array(whole[index])


def write_safetensors(file, tensors, metadata):
    """Write a safetensors file, one tensor in memory at a time.

    Args:
        file: binary file object.
        tensors: list of `(name, dtype, shape, read)`; `read()` gives the
            tensor as an array.
        metadata: dict of strings.

    Returns:
        The file's sha256, in hexadecimal.
    """
    reads = {name: read for name, _, _, read in tensors}
    header, specs = plan_file([t[:3] for t in tensors], metadata)
    digest = hashlib.sha256(header)
    file.write(header)
    # Hashing takes longer than writing, and lets other threads run; so does
    # the wait for the disk.
    threads = concurrent.futures.ThreadPoolExecutor
    with threads(1) as hasher, threads(1) as syncer:
        syncing, unsynced = None, 0
        for name, spec in specs.items():
            array = np.ascontiguousarray(reads[name]())
            if array.dtype != spec.dtype or array.size != math.prod(spec.shape):
                raise RuntimeError(
                    f"{name} is {array.dtype} {array.shape}, announced as "
                    f"{spec.dtype} {spec.shape}."
                )
            view = memoryview(array.reshape(-1).view(np.uint8))
            hashing = hasher.submit(digest.update, view)
            file.write(view)
            unsynced += view.nbytes
            if unsynced > SYNC_EVERY and (syncing is None or syncing.done()):
                syncing, unsynced = syncer.submit(os.fsync, file.fileno()), 0
            hashing.result()
            del view, array, hashing
        file.flush()
        syncer.submit(os.fsync, file.fileno())
    return digest.hexdigest()


def plan_file(tensors, metadata):
    """Lay out a file.

    Args:
        tensors: list of `(name, dtype, shape)`.
        metadata: dict of strings.

    Returns:
        The file's first bytes, and a dict from name to `TensorSpec` in the
        order of the bytes.
    """
    # Larger elements first, so that every tensor is aligned to its own.
    tensors = sorted(tensors, key=lambda t: -np.dtype(t[1]).itemsize)
    entries, ranges, offset = {"__metadata__": metadata}, {}, 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        ranges[name] = (np.dtype(dtype), tuple(shape), offset, offset + size)
        entries[name] = {
            "dtype": CODES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    first = len(header)
    return header, {
        name: TensorSpec(dtype, shape, first + start, first + stop)
        for name, (dtype, shape, start, stop) in ranges.items()
    }


def _read_header(file, size):
    """Return `{tensor: TensorSpec}` and the metadata of a file."""
    if size < 8:
        raise ValueError(f"it has {size} bytes, too few for a header.")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"its header claims {length:,} bytes; the limit is "
            f"{MAX_HEADER_BYTES:,}."
        )
    if length > size - 8:
        raise ValueError(
            f"it is cut short: {size - 8:,} bytes follow, the header alone "
            f"claims {length:,}."
        )
    try:
        text = file.read(length).decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON ({error}).") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(v, str) for v in metadata.values()
    ):
        raise ValueError("its __metadata__ must hold strings.")
    first = 8 + length
    specs = {n: _read_spec(n, entry, first) for n, entry in header.items()}
    _check_ranges(specs, first, size)
    return specs, metadata


def _unique(pairs):
    values = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} stands twice")
        values[name] = value
    return values


def _read_spec(name, entry, first):
    if not name.isprintable():
        raise ValueError(f"the tensor name {name!r} is not printable.")
    if not isinstance(entry, dict) or set(entry) != {
        "dtype",
        "shape",
        "data_offsets",
    }:
        raise ValueError(f"tensor {name!r} needs dtype, shape, data_offsets.")
    dtype = DTYPES.get(entry["dtype"]) if _is_text(entry["dtype"]) else None
    if dtype is None:
        raise ValueError(
            f"tensor {name!r} has dtype {entry['dtype']!r}; known are "
            f"{', '.join(DTYPES)}."
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(
            type(n) is not int or n < 0 for n in numbers
        ):
            raise ValueError(f"tensor {name!r} has {numbers!r} for numbers.")
    if len(offsets) != 2 or len(shape) > 32:
        raise ValueError(f"tensor {name!r} has too many or too few numbers.")
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        raise ValueError(
            f"tensor {name!r} of shape {tuple(shape)} takes {expected:,} "
            f"bytes, but has {offsets[1] - offsets[0]:,}."
        )
    start, stop = (first + offset for offset in offsets)
    return TensorSpec(dtype, tuple(shape), start, stop)


def _is_text(value):
    return isinstance(value, str)


def _check_ranges(specs, first, size):
    """Raise unless the tensors fill the file without hole or overlap."""
    position = first
    for name, spec in sorted(specs.items(), key=lambda s: s[1][2:]):
        if spec.start != position:
            kind = "overlaps" if spec.start < position else "leaves a hole to"
            raise ValueError(f"tensor {name!r} {kind} the one before it.")
        position = spec.stop
    if position != size:
        raise ValueError(
            f"its tensors end at byte {position:,}, the file at {size:,}."
        )
