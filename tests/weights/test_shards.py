"""Tensors in one or several files: the index names them all, or it is refused.

Reference: https://huggingface.co/docs/huggingface_hub/package_reference/serialization
"""

import hashlib
import json
import math
import os
import re

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import settings
from safetensors import safe_open
from safetensors.numpy import save_file

from keras_vit22b.weights import shards
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.shards import INDEX_FILE
from keras_vit22b.weights.shards import KERAS_INDEX_FILE
from keras_vit22b.weights.shards import Shards
from keras_vit22b.weights.shards import dtype_of
from keras_vit22b.weights.shards import write_shards

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "bool",
]
if keras.backend.backend() == "torch":
    # Torch cannot turn its float8 into an array.
    DTYPES = [dtype for dtype in DTYPES if "float8" not in dtype]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
VARIABLES = st.dictionaries(
    st.text("abc.0", min_size=1, max_size=4),
    st.tuples(st.sampled_from(DTYPES), SHAPES, st.integers(0, 2**32 - 1)),
    min_size=1,
    max_size=6,
)


def make_variable(dtype, shape, seed):
    """A variable of random numbers that the dtype holds exactly."""
    values = np.random.default_rng(seed).integers(-4, 5, shape)
    return keras.Variable(
        np.asarray(values, "float32"), dtype=dtype, trainable=False
    )


def bits_of(variable):
    array = keras.ops.convert_to_numpy(variable.value)
    return array.astype(dtype_of(variable), copy=False).tobytes()


def read_all(path):
    """Return every tensor's dtype, shape and bytes, as `Shards` reads them."""
    with PresetFolder(path) as folder:
        shards = Shards(folder)
        return {
            name: (file.read(name).dtype, *shape_and_bits(file.read(name)))
            for file, names in shards.by_file(shards.specs)
            for name in names
        }


def shape_and_bits(array):
    return array.shape, array.tobytes()


# === Round trips ===


@settings(deadline=None, max_examples=60)
@given(rows=VARIABLES, size=st.integers(1, 400))
def test_shards_of_any_size_give_back_every_bit(tmp_path_factory, rows, size):
    folder = tmp_path_factory.mktemp("shards")
    variables = {name: make_variable(*row) for name, row in rows.items()}
    digests = write_shards(folder, variables, (2, 3), size)
    assert read_all(folder) == {
        name: (dtype_of(v), tuple(v.shape), bits_of(v))
        for name, v in variables.items()
    }
    assert digests == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }
    index = json.loads((folder / KERAS_INDEX_FILE).read_text())
    total = sum(len(bits_of(v)) for v in variables.values())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == variables.keys()
    # No file is larger than asked, but for one of a single tensor.
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            names = list(file.keys())
        held = sum(len(bits_of(variables[name])) for name in names)
        assert held <= size or len(names) == 1
        assert {index["weight_map"][name] for name in names} == {path.name}


def test_one_file_has_one_index_and_several_have_two(tmp_path):
    variables = {n: make_variable("float32", (4,), 0) for n in "abc"}
    write_shards(tmp_path, variables, (2, 3))
    assert {p.name for p in tmp_path.iterdir()} == {
        "model.safetensors",
        KERAS_INDEX_FILE,
    }
    several = tmp_path / "several"
    several.mkdir()
    write_shards(several, variables, (2, 3), 20)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert {p.name for p in several.iterdir()} == {
        *shards,
        KERAS_INDEX_FILE,
        INDEX_FILE,
    }
    index = several / INDEX_FILE
    assert index.read_bytes() == (several / KERAS_INDEX_FILE).read_bytes()
    weight_map = json.loads(index.read_text())["weight_map"]
    assert list(weight_map.items()) == list(zip("abc", shards))


def test_sizes_are_decimal(tmp_path):
    variables = {n: make_variable("int8", (600,), 0) for n in "ab"}
    write_shards(tmp_path, variables, (2, 3), "1KB")
    assert len(list(tmp_path.glob("model-*"))) == 2


def test_safetensors_alone_reads_a_shard(tmp_path):
    variables = {
        n: make_variable("bfloat16", (2, 2), i) for i, n in (enumerate("ab"))
    }
    write_shards(tmp_path, variables, (2, 3), 8)
    name = "model-00002-of-00002.safetensors"
    arrays = safetensors.numpy.load_file(tmp_path / name)
    assert {n: a.tobytes() for n, a in arrays.items()} == {
        "b": bits_of(variables["b"])
    }


def test_one_tensor_of_a_file_is_on_the_host_at_a_time(tmp_path):
    """Each is fetched once, in the order of the file."""
    events = []

    class Watched:
        def __init__(self, name):
            self.name, self.shape, self.dtype = name, (2,), "float32"

        @property
        def value(self):
            events.append(self.name)
            return np.zeros(2, "float32")

    write_shards(tmp_path, {n: Watched(n) for n in "abc"}, (2, 3), 1000)
    assert events == ["a", "b", "c"]


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path):
    variable = make_variable("complex64", (2,), 0)
    with pytest.raises(ValueError, match="x is complex64, which safetensors"):
        write_shards(tmp_path, {"x": variable}, (2, 3))


# === Files and index that disagree ===


@pytest.fixture
def folder(tmp_path):
    """Three shards: `a` in the first, `b` in the second, `c` in the third."""
    rows = {n: make_variable("float32", (4,), i) for i, n in enumerate("abc")}
    (tmp_path / "preset").mkdir()
    write_shards(tmp_path / "preset", rows, (2, 3), 16)
    return tmp_path / "preset"


FIRST, SECOND, THIRD = (
    f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX_FILE).read_text())
    edit(index)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def assert_refused(path, *messages):
    with PresetFolder(path) as folder, pytest.raises(ValueError) as error:
        Shards(folder)
    for message in (str(path), *messages):
        assert message in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "../../etc/passwd",
        "/tmp/model.safetensors",
        "//server/share/model.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        "..\\model.safetensors",
        "\\\\server\\share\\model.safetensors",
        "sub/model.safetensors",
        "./model.safetensors",
        "model.safetensors/",
        "model.safetensors\n",
        "model.safetensors\0",
        "model.bin",
        "model.safetensors.bin",
        "model.SAFETENSORS",
        ".",
        "..",
        "",
        "~/model.safetensors",
        "file:model.safetensors",
        "модель.safetensors",
    ],
)
def test_an_index_names_plain_files_alone(folder, name):
    """Even if the file is there, and is what the index says it is."""
    try:
        (folder / name).write_bytes((folder / FIRST).read_bytes())
    except (OSError, ValueError):
        pass
    edit_index(folder, lambda i: i["weight_map"].update(a=name))
    assert_refused(folder, INDEX_FILE, repr(name), "the plain name of a")


@pytest.mark.parametrize(
    "file", [None, 3, True, [FIRST], [[FIRST]], {"file": FIRST}]
)
def test_an_index_names_one_file_a_tensor(folder, file):
    """Keras' own index has a list of H5 files there."""
    edit_index(folder, lambda i: i["weight_map"].update(a=file))
    assert_refused(folder, INDEX_FILE, repr(file))


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, "model.safetensors", 3, [["a", FIRST]]]
)
def test_an_index_without_a_map_is_refused(folder, weight_map):
    edit_index(folder, lambda i: i.update(weight_map=weight_map))
    assert_refused(folder, INDEX_FILE, "has no weight_map")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"weight_map":'])
def test_an_index_that_is_no_json_object_is_refused(folder, text):
    (folder / INDEX_FILE).write_text(text)
    assert_refused(folder, INDEX_FILE)


def test_an_index_that_is_too_large_is_not_read(folder):
    with open(folder / INDEX_FILE, "w") as file:
        file.truncate(10**12)  # Sparse: it takes no space.
    assert_refused(folder, INDEX_FILE, "1,000,000,000,000 bytes exceed")


def test_every_file_of_the_index_must_be_there(folder):
    (folder / SECOND).unlink()
    edit_index(folder, lambda i: i["weight_map"].update(d="gone.safetensors"))
    assert_refused(
        folder,
        f"{SECOND} is in the index, but does not exist",
        "gone.safetensors is in the index, but does not exist",
    )


def test_a_tensor_that_its_file_lacks_is_named(folder):
    edit_index(folder, lambda i: i["weight_map"].update(d=FIRST))
    assert_refused(folder, f"d is not in {FIRST}, as the index says")


def test_a_tensor_that_the_index_lacks_is_named(folder):
    write_one(folder / SECOND, "b", "extra")
    assert_refused(folder, f"extra is in {SECOND}, but not in the index")


def test_a_tensor_in_another_file_than_the_index_says_is_named(folder):
    edit_index(folder, lambda i: i["weight_map"].update(a=SECOND, b=FIRST))
    assert_refused(
        folder,
        f"a is in {FIRST}, the index says {SECOND}",
        f"b is in {SECOND}, the index says {FIRST}",
    )


def test_a_tensor_in_two_files_is_named(folder):
    write_one(folder / SECOND, "b", "a")
    assert_refused(folder, f"a is in {FIRST} and in {SECOND}")


def test_all_broken_files_are_named_at_once(folder):
    (folder / FIRST).write_bytes(b"short")
    (folder / THIRD).write_bytes((folder / THIRD).read_bytes()[:-1])
    (folder / SECOND).unlink()
    assert_refused(
        folder,
        f"{FIRST} is not safetensors: it has 5 bytes",
        f"{SECOND} is in the index, but does not exist",
        f"{THIRD} is not safetensors: its tensors end",
    )


@pytest.mark.parametrize(
    "size", [0, 47, 49, 10**18, -48, "48", 48.0, True, None]
)
def test_a_wrong_total_size_is_refused(folder, size):
    edit_index(folder, lambda i: i["metadata"].update(total_size=size))
    assert_refused(folder, INDEX_FILE, "total_size")


def test_an_index_without_metadata_is_read(folder):
    """Not every tool writes it."""
    edit_index(folder, lambda i: i.pop("metadata"))
    assert read_all(folder).keys() == set("abc")


def test_a_file_beside_those_of_the_index_is_not_read(folder):
    """Left from another save, it holds newer or older tensors."""
    write_one(folder / "model-00004-of-00004.safetensors", "a", "b", "c")
    (folder / "model.safetensors").write_bytes(b"broken")
    assert read_all(folder)["a"][1] == (4,)


def write_one(path, *names):
    arrays = {name: np.ones(1, "float32") for name in names}
    safetensors.numpy.save_file(arrays, path)


# === Files that are none ===


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    os.replace(folder / SECOND, outside)
    (folder / SECOND).symlink_to(outside)
    assert_refused(folder, f"{SECOND} is a link that leads out of its folder")


def test_a_link_to_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    os.replace(folder / SECOND, outside)
    (folder / "inside").symlink_to(outside)
    (folder / SECOND).symlink_to("inside")
    assert_refused(folder, f"{SECOND} is a link that leads out of its folder")


def test_a_link_within_the_folder_is_followed(folder):
    os.replace(folder / SECOND, folder / "data")
    (folder / SECOND).symlink_to("data")
    assert read_all(folder).keys() == set("abc")


@pytest.mark.parametrize("name", [SECOND, INDEX_FILE])
def test_a_folder_in_the_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    assert_refused(folder, f"{name} is not a file")


@pytest.mark.parametrize("name", [SECOND, INDEX_FILE])
def test_a_pipe_in_the_place_of_a_file_is_refused(folder, name):
    """Opening it would wait for ever for someone to write."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert_refused(folder, f"{name} is not a file")


def test_a_link_to_itself_is_refused(folder):
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(SECOND)
    assert_refused(folder, SECOND)


# === The grid of the position table ===


@pytest.mark.parametrize("tokens, default", [(6, (2, 3)), (9, (3, 3))])
def test_a_grid_is_guessed_only_where_it_can_be(tmp_path, tokens, default):
    table = np.zeros((tokens, 4), "float32")
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"position_embedding": table}, path)
    with PresetFolder(tmp_path) as folder:
        shards = Shards(folder)
        assert shards.grid_size(default) == default
        side = math.isqrt(tokens)
        square = (side, side) if side * side == tokens else None
        assert shards.grid_size((5, 5)) == square


# === Grids ===


def rewrite(path, metadata):
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    "grid, message",
    [
        ("[1, 4]", "the files disagree about grid_size"),
        ("{}", "has grid_size {}, expected such as"),
        ("[0, 0]", "has grid_size"),
        ("[2, 2, 2]", "has grid_size"),
        ("[" * 100_000, "has grid_size"),
    ],
)
def test_a_grid_that_is_none_or_another_is_a_fault(folder, grid, message):
    rewrite(folder / SECOND, {"grid_size": grid})
    with PresetFolder(folder) as opened:
        with pytest.raises(ValueError, match=re.escape(message)):
            Shards(opened)


def test_two_indexes_that_differ_are_a_fault(folder):
    index = json.loads((folder / KERAS_INDEX_FILE).read_text())
    index["weight_map"]["a"] = SECOND
    (folder / KERAS_INDEX_FILE).write_text(json.dumps(index))
    with PresetFolder(folder) as opened:
        with pytest.raises(ValueError, match="differ"):
            Shards(opened)


@pytest.mark.parametrize("size", [0, -1, True, None, 2.5])
def test_a_shard_size_that_is_none_is_refused(tmp_path, size):
    rows = {"a": make_variable("float32", (4,), 0)}
    with pytest.raises(ValueError, match="max_shard_size must be"):
        write_shards(tmp_path, rows, (2, 3), size)


def test_very_many_files_are_read_one_by_one(tmp_path, monkeypatch):
    rows = {f"t{i}": make_variable("float32", (4,), i) for i in range(5)}
    write_shards(tmp_path, rows, (2, 3), 16)
    monkeypatch.setattr(shards, "MOST_OPEN", 4)
    with PresetFolder(tmp_path) as opened:
        found = [
            (name, file.read(name).tobytes())
            for file, names in Shards(opened).by_file(rows)
            for name in names
        ]
    assert found == [
        (name, keras.ops.convert_to_numpy(v.value).tobytes())
        for name, v in rows.items()
    ]
