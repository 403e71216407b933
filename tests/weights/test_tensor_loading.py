"""Stored tensors become a model's weights: checked as a whole first."""

import gc
import json
import logging
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from keras import ops

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.layers import resize_position_embedding
from keras_vit22b.weights import shards
from keras_vit22b.weights.preset_folder import replacing_file
from keras_vit22b.weights.safetensors_file import SafetensorsFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(make_backbone, path):
    """Save a backbone, and return the arrays in its file."""
    make_backbone(random=True).save_weights(path)
    return safetensors.numpy.load_file(path)


def write(path, arrays, **metadata):
    safetensors.numpy.save_file(arrays, path, metadata=metadata or None)


def test_safetensors_alone_reads_the_file(make_backbone, path):
    backbone = make_backbone(random=True)
    backbone.save_weights(path)
    arrays = safetensors.numpy.load_file(path)
    tensors = backbone.tensors()
    assert set(arrays) == set(tensors)
    for name, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[name].value)
    with safetensors.safe_open(path, "np") as file:
        assert json.loads(file.metadata()["grid_size"]) == [2, 3]


def test_loading_gives_back_every_bit(make_backbone, saved, path):
    target = make_backbone()
    target.load_weights(path)
    for name, variable in target.tensors().items():
        np.testing.assert_array_equal(variable.value, saved[name])


def test_a_file_without_metadata_is_read(make_backbone, saved, path):
    """Other tools drop it. Six tokens are this model's 2 x 3 patches."""
    write(path, saved)
    target = make_backbone()
    target.load_weights(path)
    np.testing.assert_array_equal(
        target.patch_embedding.position_embedding.value,
        saved["position_embedding"],
    )


def test_four_by_two_is_not_taken_for_a_square(make_backbone, path):
    """The model's grid goes before a guess, also where both would fit."""
    source = make_backbone((8, 32, 3), random=True)  # 2 x 8 patches
    source.save_weights(path)
    write(path, safetensors.numpy.load_file(path))
    target = make_backbone((8, 32, 3))
    target.load_weights(path)
    np.testing.assert_array_equal(
        target.patch_embedding.position_embedding.value,
        source.patch_embedding.position_embedding.value,
    )


@pytest.mark.parametrize(
    "old, new, keep_metadata",
    [
        ((8, 12, 3), (16, 8, 3), True),  # 2 x 3 patches to 4 x 2
        ((8, 12, 3), (12, 8, 3), True),  # as many patches, another grid
        ((8, 8, 3), (16, 16, 3), True),
        ((8, 8, 3), (16, 16, 3), False),  # a square grid can be guessed
    ],
)
def test_positions_are_resized_at_load(
    make_backbone, path, old, new, keep_metadata
):
    source, target = make_backbone(old, random=True), make_backbone(new)
    source.save_weights(path)
    if not keep_metadata:
        write(path, safetensors.numpy.load_file(path))
    target.load_weights(path)
    expected = resize_position_embedding(
        source.patch_embedding.position_embedding,
        (old[0] // 4, old[1] // 4),
        (new[0] // 4, new[1] // 4),
    )
    table = target.patch_embedding.position_embedding
    assert tuple(table.shape) == tuple(expected.shape)
    np.testing.assert_allclose(table.value, expected, atol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"],
)
def test_other_floats_are_cast_and_the_log_says_so(
    make_backbone, saved, path, dtype, caplog
):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    write(path, {k: v.astype(dtype) for k, v in saved.items()})
    target = make_backbone()
    with caplog.at_level(logging.INFO, "keras_vit22b"):
        target.load_weights(path)
    for name, variable in target.tensors().items():
        assert variable.dtype == "float32"
        np.testing.assert_array_equal(
            variable.value, saved[name].astype(dtype).astype("float32")
        )
    assert caplog.messages == [
        f"Casting {len(saved)} tensors from {dtype} to float32."
    ]


def test_a_log_of_casts_counts_each_kind(make_backbone, saved, path, caplog):
    saved["final_norm.scale"] = saved["final_norm.scale"].astype("float16")
    saved["pooling.probe"] = saved["pooling.probe"].astype("float64")
    write(path, saved)
    with caplog.at_level(logging.INFO, "keras_vit22b"):
        make_backbone().load_weights(path)
    assert sorted(caplog.messages) == [
        "Casting 1 tensors from float16 to float32.",
        "Casting 1 tensors from float64 to float32.",
    ]


def test_what_needs_no_cast_is_not_logged(make_backbone, saved, path, caplog):
    with caplog.at_level(logging.INFO, "keras_vit22b"):
        make_backbone().load_weights(path)
    assert not caplog.messages


def test_bfloat16_weights_are_kept_as_such(make_backbone, path):
    source = make_backbone(dtype="bfloat16", random=True)
    source.save_weights(path)
    arrays = safetensors.numpy.load_file(path)
    assert {a.dtype for a in arrays.values()} == {np.dtype(ml_dtypes.bfloat16)}
    target = make_backbone(dtype="bfloat16")
    target.load_weights(path)
    for name, variable in target.tensors().items():
        assert variable.dtype == "bfloat16"
        np.testing.assert_array_equal(
            ops.convert_to_numpy(variable.value).astype("float32"),
            arrays[name].astype("float32"),
        )


# === Bad files ===


def assert_refused(backbone, path, *messages):
    """Loading names every fault and changes nothing."""
    before = [ops.convert_to_numpy(w.value) for w in backbone.weights]
    with pytest.raises(ValueError) as error:
        backbone.load_weights(path)
    for message in (str(path), *messages):
        assert message in str(error.value)
    for weight, value in zip(backbone.weights, before, strict=True):
        np.testing.assert_array_equal(weight.value, value)


def test_all_faults_are_named_at_once(make_backbone, saved, path):
    del saved["final_norm.scale"], saved["blocks.1.norm.scale"]
    saved["blocks.2.norm.scale"] = np.zeros(8, "float32")
    saved["patch_embedding.kernel"] = saved["patch_embedding.kernel"].T.copy()
    saved["pooling.probe"] = saved["pooling.probe"].astype("int8")
    write(path, saved)
    assert_refused(
        make_backbone(),
        path,
        "missing: blocks.1.norm.scale",
        "missing: final_norm.scale",
        "not part of the model: blocks.2.norm.scale",
        "patch_embedding.kernel has shape (8, 48), expected (48, 8)",
        "pooling.probe is int8, expected float32; only floats are cast",
    )


@pytest.mark.parametrize(
    "shape", [(), (6,), (5, 8), (6, 4), (7, 8), (2, 3, 8), (0, 8)]
)
@pytest.mark.parametrize("keep_metadata", [True, False])
def test_positions_of_a_wrong_shape_are_refused(
    make_backbone, saved, path, shape, keep_metadata
):
    saved["position_embedding"] = np.zeros(shape, "float32")
    metadata = {"grid_size": "[2, 3]"} if keep_metadata else {}
    write(path, saved, **metadata)
    fault = f"position_embedding has shape {shape}, expected (6, 8)"
    assert_refused(make_backbone(), path, fault)


@pytest.mark.parametrize(
    "grid",
    ["[-2, -3]", "[0, 6]", "[1e999, 1]", "null", "[]", "[2.0, 3.0]", "x"],
)
def test_a_grid_that_is_none_is_refused(make_backbone, saved, path, grid):
    """Else a square might be guessed where the table is none."""
    write(path, saved, grid_size=grid)
    assert_refused(make_backbone(), path, f"has grid_size {grid}, expected")


def test_a_grid_that_does_not_fit_its_table_is_refused(
    make_backbone, saved, path
):
    write(path, saved, grid_size="[100000, 100000]")
    assert_refused(make_backbone(), path, "expected (10000000000, 8)")


def test_channels_other_than_the_models_are_refused(make_backbone, path):
    make_backbone((8, 12, 1)).save_weights(path)
    assert_refused(make_backbone(), path, "patch_embedding.kernel has shape")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool"])
def test_whole_numbers_are_not_taken_for_floats(
    make_backbone, saved, path, dtype
):
    name = "final_norm.scale"
    saved[name] = saved[name].astype(dtype)
    write(path, saved)
    assert_refused(make_backbone(), path, f"{name} is {dtype}, expected float")


def test_a_truncated_file_is_refused(make_backbone, saved, path):
    content = path.read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert_refused(make_backbone(), path, "is not safetensors")


def test_something_else_is_refused(make_backbone, path):
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    assert_refused(make_backbone(), path, "is not safetensors")


def test_a_missing_file_is_refused(make_backbone, path):
    assert_refused(make_backbone(), path, "does not exist")


def test_a_missing_folder_is_refused(make_backbone, tmp_path):
    path = tmp_path / "none" / "model.safetensors"
    assert_refused(make_backbone(), path.parent)


def test_a_link_out_of_the_folder_is_refused(make_backbone, saved, tmp_path):
    """Of files that a repository may bring; the user's own path is a path."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors").symlink_to("../model.safetensors")
    assert_refused(
        make_backbone(), inside / "model.safetensors", "leads out of its folder"
    )


def test_a_tensor_that_cannot_be_read_leaves_the_file_closed(
    make_backbone, saved, path, monkeypatch
):
    """A loop that stops half-way keeps no file open."""
    held = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(
        "keras_vit22b.models.preset_model.set_value",
        lambda *_: (_ for _ in ()).throw(OSError("Input/output error")),
    )
    with pytest.raises(OSError, match="Input/output"):
        make_backbone().load_weights(path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == held


# === Several files ===


def test_the_index_is_loaded_as_one_file_is(make_backbone, tmp_path, arrays):
    source = make_backbone(random=True)
    source.save_to_preset(tmp_path, max_shard_size=300)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    target = make_backbone()
    target.load_weights(tmp_path / "model.weights.json")
    for ours, theirs in zip(arrays(target), arrays(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_faults_of_several_files_are_named_at_once(make_backbone, tmp_path):
    make_backbone().save_to_preset(tmp_path, max_shard_size=300)
    other = make_backbone(hidden_dim=16, num_layers=1)
    before = [ops.convert_to_numpy(w.value) for w in other.weights]
    with pytest.raises(ValueError) as error:
        other.load_weights(tmp_path / "model.weights.json")
    for fault in (
        "final_norm.scale has shape (8,), expected (16,)",
        "not part of the model: blocks.1.norm.scale",
    ):
        assert fault in str(error.value)
    for weight, value in zip(other.weights, before, strict=True):
        np.testing.assert_array_equal(weight.value, value)


def test_each_tensor_is_read_once_and_all_files_are_closed(
    make_backbone, tmp_path, monkeypatch
):
    source = make_backbone()
    source.save_to_preset(tmp_path, max_shard_size=600)
    reads, opened = [], []
    read, start, stop = (
        getattr(SafetensorsFile, name)
        for name in ("read", "__enter__", "__exit__")
    )

    def count(file, name):
        assert file in opened
        reads.append(name)
        return read(file, name)

    def enter(file):
        opened.append(file)
        return start(file)

    def leave(file, *error):
        opened.remove(file)
        return stop(file, *error)

    monkeypatch.setattr(SafetensorsFile, "read", count)
    monkeypatch.setattr(SafetensorsFile, "__enter__", enter)
    monkeypatch.setattr(SafetensorsFile, "__exit__", leave)
    loaded = ViT22BBackbone.from_preset(tmp_path)
    assert sorted(reads) == sorted(loaded.tensors())
    assert not opened


# === Writing ===


def test_a_failing_save_leaves_the_old_file(
    make_backbone, saved, path, monkeypatch
):
    before = path.read_bytes()

    def fail(file, tensors, metadata):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(shards, "write_safetensors", fail)
    with pytest.raises(OSError, match="No space left"):
        make_backbone().save_weights(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failing_first_save_leaves_no_file(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        replacing_file(tmp_path / "a.json") as temporary,
    ):
        with open(temporary, "w") as file:
            file.write("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_files_are_as_readable_as_others(tmp_path, saved, path):
    (tmp_path / "other").write_text("")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_model_that_is_half_loaded_says_so(
    make_backbone, images, tmp_path, monkeypatch
):
    make_backbone(random=True).save_weights(tmp_path / "new.safetensors")
    classifier = ViT22BImageClassifier(make_backbone(), num_classes=3)
    backbone = classifier.backbone
    backbone.predict(images, verbose=0)
    read, reads = SafetensorsFile.read, []

    def fail(file, name):
        reads.append(name)
        if len(reads) == 5:
            raise ValueError("The file ended.")
        return read(file, name)

    monkeypatch.setattr(SafetensorsFile, "read", fail)
    with pytest.raises(ValueError, match="The file ended"):
        backbone.load_weights(tmp_path / "new.safetensors")
    for use in (
        lambda: backbone.predict(images, verbose=0),
        lambda: backbone(images),
        lambda: backbone.save_to_preset(tmp_path / "mixed"),
    ):
        with pytest.raises(ValueError, match="old and new ones are mixed"):
            use()
    monkeypatch.undo()
    backbone.load_weights(tmp_path / "new.safetensors")
    backbone.predict(images, verbose=0)
