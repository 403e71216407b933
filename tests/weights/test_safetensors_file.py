"""The safetensors format: every bit comes back, and nothing else is read."""

import hashlib
import json
import math
import struct
import tracemalloc

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import settings

from keras_vit22b.weights.safetensors_file import MAX_HEADER_BYTES
from keras_vit22b.weights.safetensors_file import SafetensorsFile
from keras_vit22b.weights.safetensors_file import write_safetensors

pytestmark = pytest.mark.any_backend

DTYPES = [
    "float32",
    "float16",
    "float64",
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    "int8",
    "uint8",
    "int64",
    "bool",
]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def arrays(draw, shapes=SHAPES):
    """An array of any bits: also NaN, infinities and negative zero."""
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    top = 1 if dtype.name == "bool" else 255
    bits = draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
    return np.array(bits, "u1").view(dtype).reshape(shape)


NAMES = st.text("abcXYZ09._/-äé", min_size=1, max_size=12)
TENSORS = st.dictionaries(NAMES, arrays(), max_size=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("file") / "model.safetensors"


def write(path, tensors, **metadata):
    """Write arrays; return the sha256 that the writer gives."""
    rows = [(n, a.dtype, a.shape, lambda a=a: a) for n, a in tensors.items()]
    with open(path, "wb") as file:
        return write_safetensors(file, rows, metadata)


def read(path):
    return SafetensorsFile(open(path, "rb", buffering=0), str(path))


def assert_same_bits(ours, theirs):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.tobytes() == theirs.tobytes()


# === Round trips ===


@settings(deadline=None)
@given(TENSORS, st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
def test_what_is_written_is_read_to_the_bit(path, tensors, metadata):
    digest = write(path, tensors, **metadata)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with read(path) as file:
        assert file.specs.keys() == tensors.keys()
        assert file.metadata == metadata
        for name, array in tensors.items():
            assert_same_bits(file.read(name), array)
            assert file.specs[name].start % array.itemsize == 0
            assert not array.size or file.read(name).ctypes.data % 64 == 0


@settings(deadline=None)
@given(TENSORS)
def test_safetensors_itself_reads_what_we_write(path, tensors):
    write(path, tensors, format="ours")
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "ours"}
        for name, array in tensors.items():
            if "float8" not in array.dtype.name:  # It has no NumPy dtype.
                assert_same_bits(file.get_tensor(name), array)


@settings(deadline=None)
@given(TENSORS)
def test_we_read_what_safetensors_itself_writes(path, tensors):
    safetensors.numpy.save_file(tensors, path)
    with read(path) as file:
        assert file.specs.keys() == tensors.keys()
        for name, array in tensors.items():
            assert_same_bits(file.read(name), array)


@settings(deadline=None)
@given(st.data())
def test_a_slice_is_that_of_numpy(path, data):
    array = data.draw(arrays())
    index = tuple(
        slice(*sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))))
        for size in array.shape
    )
    write(path, {"before": np.zeros(3, "u1"), "x": array})
    with read(path) as file:
        part = file.read_slice("x", index)
        assert_same_bits(part, array[index])
    part.fill(0)  # A copy: neither read-only nor tied to the closed file.


def test_arrays_of_any_layout_are_written_in_order(path):
    table = np.arange(24, dtype="int32").reshape(4, 6)
    layouts = {
        "transposed": table.T,
        "strided": table[::2, ::-3],
        "fortran": np.asfortranarray(table),
        "scalar": table[1, 1],
    }
    write(path, layouts)
    with read(path) as file:
        for name, array in layouts.items():
            np.testing.assert_array_equal(file.read(name), array)


def test_one_tensor_is_in_memory_at_a_time(path):
    alive, most = 0, 0

    class Watched(np.ndarray):
        def __del__(self):
            nonlocal alive
            alive -= self.base is None

    def make():
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return np.ndarray.__new__(Watched, (1000,), "float32")

    rows = [(str(i), np.dtype("float32"), (1000,), make) for i in range(5)]
    with open(path, "wb") as file:
        write_safetensors(file, rows, {})
    assert (alive, most) == (0, 1)


@pytest.mark.parametrize(
    "array", [np.zeros(3, "float64"), np.zeros(4, "float32")]
)
def test_a_tensor_other_than_announced_is_not_written(path, array):
    row = ("x", np.dtype("float32"), (3,), lambda: array)
    with (
        open(path, "wb") as file,
        pytest.raises(RuntimeError, match="x is .* announced as float32"),
    ):
        write_safetensors(file, [row], {})


# === Hostile files ===


def entry(start, stop, dtype="U8", shape=None):
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def encode(header, data=b"", length=None):
    """Bytes of a file with this header, as text or JSON, and these bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return struct.pack("<Q", length) + text + data


FOUR = encode({"x": entry(0, 4)}, b"1234")
HOSTILE = {
    "empty": (b"", "has 0 bytes"),
    "no whole length": (b"\0" * 7, "has 7 bytes"),
    "no header": (encode(b""), "not JSON"),
    "header of 8 EiB": (encode({}, length=2**63), "claims 9,223,372,"),
    "header of 2**64 - 1": (encode({}, length=2**64 - 1), "the limit is"),
    "header over the limit": (
        encode({}, length=MAX_HEADER_BYTES + 1),
        "claims 25,000,001 bytes; the limit is 25,000,000",
    ),
    "header longer than the file": (encode({}, length=3), "is cut short"),
    "not JSON": (encode(b"{"), "not JSON"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "not JSON"),
    "UTF-16": (encode("{}".encode("utf-16")), "not JSON"),
    "too deep": (encode(b'{"x":' + b"[" * 100_000), "not JSON"),
    "number of 5,000 digits": (encode(b'{"x":' + b"1" * 5000), "not JSON"),
    "a list": (encode([]), "not a JSON object"),
    "pickle": (b"\x80\x04}q\0." + b"\0" * 20, "limit is"),
    "zip": (b"PK\x03\x04" + b"\0" * 100, "limit is"),
    "truncated": (FOUR[:-1], "end at byte .* the file at"),
    "trailing bytes": (FOUR + b"5", "end at byte .* the file at"),
    "hole at the start": (
        encode({"x": entry(1, 4)}, b"1234"),
        "'x' leaves a hole",
    ),
    "hole in the middle": (
        encode({"a": entry(0, 1), "x": entry(2, 4)}, b"1234"),
        "'x' leaves a hole",
    ),
    "overlap": (
        encode({"a": entry(0, 3), "x": entry(2, 4)}, b"1234"),
        "'x' overlaps",
    ),
    "the same bytes twice": (
        encode({"a": entry(0, 4), "x": entry(0, 4)}, b"1234"),
        "'x' overlaps",
    ),
    "an empty tensor inside another": (
        encode({"a": entry(0, 4), "x": entry(2, 2)}, b"1234"),
        "'x' overlaps",
    ),
    "the same name twice": (
        encode(
            b'{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
            b'"x":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
            b"1234",
        ),
        "'x' stands twice",
    ),
    "the same key twice in a tensor": (
        encode(
            b'{"x":{"dtype":"U8","shape":[9],"shape":[4],'
            b'"data_offsets":[0,4]}}',
            b"1234",
        ),
        "'shape' stands twice",
    ),
    "metadata of numbers": (
        encode({"__metadata__": {"a": 1}}),
        "__metadata__ must hold strings",
    ),
    "metadata that is no object": (
        encode({"__metadata__": "a"}),
        "__metadata__ must hold strings",
    ),
    "a tensor that is no object": (encode({"x": 3}), "'x' needs dtype"),
    "a tensor without shape": (
        encode({"x": {"dtype": "U8", "data_offsets": [0, 0]}}),
        "'x' needs dtype, shape, data_offsets",
    ),
    "a tensor with more": (
        encode({"x": entry(0, 0) | {"module": "os"}}),
        "'x' needs dtype, shape, data_offsets",
    ),
    "a name that is no text to print": (
        encode({"\x1b[2J": entry(0, 0)}),
        r"'\\x1b\[2J' is not printable",
    ),
    "unknown dtype": (encode({"x": entry(0, 0, "F4")}), "'x' has dtype 'F4'"),
    "dtype that is no text": (encode({"x": entry(0, 0, ["U8"])}), "has dtype"),
    "negative shape": (
        encode({"x": entry(0, 4, shape=[-2, -2])}, b"1234"),
        r"'x' has \[-2, -2\]",
    ),
    "shape of floats": (
        encode({"x": entry(0, 4, shape=[4.0])}, b"1234"),
        r"'x' has \[4.0\]",
    ),
    "shape of booleans": (
        encode({"x": entry(0, 1, shape=[True])}, b"1"),
        r"'x' has \[True\]",
    ),
    "shape that is no list": (
        encode({"x": entry(0, 4, shape="4")}, b"1234"),
        "'x' has '4'",
    ),
    "shape larger than its bytes": (
        encode({"x": entry(0, 4, shape=[5])}, b"1234"),
        r"'x' of shape \(5,\) takes 5 bytes, but has 4",
    ),
    "shape whose bytes overflow 64 bits": (
        encode({"x": entry(0, 4, shape=[2**32, 2**32, 2**32])}, b"1234"),
        "takes 79,228,162,514,264,337,593,543,950,336 bytes, but has 4",
    ),
    "shape that overflows to its bytes": (
        encode({"x": entry(0, 4, "U8", [2**62 + 1, 4])}, b"1234"),
        "but has 4",
    ),
    "40 axes": (
        encode({"x": entry(0, 1, shape=[1] * 40)}, b"1"),
        "too many or too few numbers",
    ),
    "one offset": (
        encode({"x": entry(0, 0) | {"data_offsets": [0]}}),
        "too many or too few numbers",
    ),
    "negative offsets": (
        encode({"x": entry(-4, 0)}, b"1234"),
        r"'x' has \[-4, 0\]",
    ),
    "offsets the wrong way round": (
        encode({"x": entry(4, 0, shape=[4])}, b"1234"),
        "but has -4",
    ),
    "offsets past the end": (
        encode({"x": entry(0, 2**60)}, b"1234"),
        "end at byte .* the file at",
    ),
}


@pytest.mark.parametrize("content, message", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_has_its_own_error(tmp_path, content, message):
    file = tmp_path / "evil.safetensors"
    file.write_bytes(content)
    opened = open(file, "rb", buffering=0)
    with pytest.raises(ValueError, match=message) as error:
        SafetensorsFile(opened, str(file))
    assert str(error.value).startswith(f"{file} is not safetensors: ")
    assert opened.closed


def test_a_header_of_101_megabytes_is_not_read(path):
    """It is there, all of it, but sparse: zeros that take no space."""
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 101_000_000))
        file.truncate(8 + 101_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="claims 101,000,000 bytes"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_many_names_that_stand_twice_take_no_time(path):
    """Comparing all pairs would take hours."""
    names = b",".join(b'"%d":0' % i for i in range(300_000))
    path.write_bytes(encode(b"{" + names + b"," + names + b"}"))
    with pytest.raises(ValueError, match="'0' stands twice"):
        read(path)


@settings(deadline=None)
@given(st.data())
def test_a_header_of_any_bytes_is_read_or_refused(path, data):
    """Whatever is changed, each tensor that is listed lies in the file."""
    write(path, {"a": np.ones((2, 3), "float32"), "b": np.ones(2, "int8")})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        file = read(path)
    except ValueError:
        return
    with file:
        for name, spec in file.specs.items():
            assert 8 <= spec.start <= spec.stop <= len(content)
            assert file.read(name).shape == spec.shape


def test_a_file_that_shrinks_while_it_is_read_is_an_error(path):
    write(path, {"x": np.zeros(1000, "u1")})
    with read(path) as file:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match="ended while it was read"):
            file.read("x")


def test_what_only_a_sparse_file_holds_is_not_allocated(path):
    """A header that is right about a terabyte: its reading costs nothing."""
    size = 2**40
    header = encode({"x": entry(0, size)})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    with read(path) as file:
        assert file.specs["x"].shape == (size,)
        assert file.read_slice("x", (slice(size - 2, size),)).tolist() == [0, 0]
    path.unlink()
