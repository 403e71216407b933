"""Files of tensors: plain safetensors, checked whole before they are used."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from keras import ops

from keras_vit22b.layers import resize_position_embedding
from keras_vit22b.weights import tensor_files


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
    "old, new",
    [
        ((8, 12, 3), (16, 8, 3)),  # 2 x 3 patches to 4 x 2
        ((8, 12, 3), (12, 8, 3)),  # as many patches, another grid
        ((8, 8, 3), (16, 16, 3)),
    ],
)
@pytest.mark.parametrize("keep_metadata", [True, False])
def test_positions_are_resized_at_load(
    make_backbone, path, old, new, keep_metadata
):
    source, target = make_backbone(old, random=True), make_backbone(new)
    source.save_weights(path)
    if not keep_metadata:
        if old != (8, 8, 3):
            pytest.skip("only a square grid can be guessed")
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_floats_are_cast(make_backbone, saved, path, dtype):
    write(path, {k: v.astype(dtype) for k, v in saved.items()})
    target = make_backbone()
    target.load_weights(path)
    for name, variable in target.tensors().items():
        assert variable.dtype == "float32"
        np.testing.assert_array_equal(
            variable.value, saved[name].astype(dtype).astype("float32")
        )


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
        "missing: blocks.1.norm.scale, final_norm.scale",
        "not part of the model: blocks.2.norm.scale",
        "patch_embedding.kernel has shape (8, 48), expected (48, 8)",
        "pooling.probe is I8, expected a float",
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
def test_a_grid_that_is_none_is_not_used(make_backbone, saved, path, grid):
    write(path, saved, grid_size=grid)
    target = make_backbone()
    target.load_weights(path)
    np.testing.assert_array_equal(
        target.patch_embedding.position_embedding.value,
        saved["position_embedding"],
    )


def test_a_grid_that_does_not_fit_its_table_is_refused(
    make_backbone, saved, path
):
    write(path, saved, grid_size="[100000, 100000]")
    assert_refused(make_backbone(), path, "expected (10000000000, 8)")


def test_channels_other_than_the_models_are_refused(make_backbone, path):
    make_backbone((8, 12, 1)).save_weights(path)
    assert_refused(make_backbone(), path, "patch_embedding.kernel has shape")


def test_a_truncated_file_is_refused(make_backbone, saved, path):
    content = path.read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert_refused(make_backbone(), path, "not a readable safetensors file")


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"a": 1}', b"\xff" * 8, b"{}" + b" " * 6]
)
def test_a_corrupt_header_is_refused(make_backbone, path, header):
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert_refused(make_backbone(), path)


def test_something_else_is_refused(make_backbone, path):
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    assert_refused(make_backbone(), path, "not a readable safetensors file")


def test_a_missing_file_is_refused(make_backbone, path):
    assert_refused(make_backbone(), path)


# === Writing ===


def test_a_failing_save_leaves_the_old_file(
    make_backbone, saved, path, monkeypatch
):
    before = path.read_bytes()

    def fail(arrays, filename, metadata):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        make_backbone().save_weights(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failing_first_save_leaves_no_file(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        tensor_files.replacing(tmp_path / "a.json") as temporary,
    ):
        with open(temporary, "w") as file:
            file.write("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_files_are_as_readable_as_others(tmp_path, saved, path):
    (tmp_path / "other").write_text("")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
