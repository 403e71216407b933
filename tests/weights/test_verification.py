"""`verify` finds every fault of a folder, and `inspect` reads headers alone."""

import json
import os
import shutil

import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter
from keras_vit22b.cli import DEFAULT_PRESET
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.safetensors_file import SafetensorsFile
from keras_vit22b.weights.verification import list_tensors
from keras_vit22b.weights.verification import verify_folder
from keras_vit22b.weights.verification import verify_preset

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(make_backbone, tmp_path):
    backbone = make_backbone()
    backbone.image_converter = ViT22BImageConverter((8, 12))
    backbone.save_to_preset(tmp_path / "preset", max_shard_size=4000)
    assert (tmp_path / "preset" / SHARD).exists()
    return tmp_path / "preset"


def assert_refused(folder, *messages):
    with pytest.raises(ValueError) as error:
        verify_folder(folder)
    for message in (f"{folder} is not a sound preset:\n", *messages):
        assert message in str(error.value)


def test_what_a_save_makes_is_sound(folder, make_backbone):
    report = verify_folder(folder)
    tensors = make_backbone().tensors()
    shards = list(folder.glob("*.safetensors"))
    assert report == {
        "tensors": len(tensors),
        "files": len(shards),
        "bytes": sum(p.stat().st_size for p in shards),
    }


def test_one_wrong_bit_of_any_shard_is_found(folder):
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert_refused(folder, f"{path.name} has sha256 ", "expected ")
        path.write_bytes(content)
    verify_folder(folder)


def test_all_faults_are_named_at_once(folder):
    config = json.loads((folder / "config.json").read_text())
    config["config"]["colour"] = "red"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "image_converter.json").write_text("[]")
    (folder / SHARD).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert_refused(
        folder,
        "field 'colour'",
        "image_converter.json must hold a JSON object",
        f"{SHARD} is in the index, but does not exist",
        "pytorch_model.bin may run code when it is loaded",
    )


def edit_config(folder, section="config", **changes):
    config = json.loads((folder / "config.json").read_text())
    config[section] = config.get(section, {}) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes, faults",
    [
        ({"num_layers": 3}, ["missing: blocks.2.norm.scale"]),
        ({"num_layers": 1}, ["not part of the model: blocks.1.norm.scale"]),
        (
            {"mlp_dim": 18},
            [
                "pooling.mlp_in.bias has shape (16,), expected (18,)",
                "blocks.1.in_projection.mlp_bias has shape (2, 8), expected",
            ],
        ),
        ({"pooling": "mean"}, ["not part of the model: pooling.probe"]),
        ({"norm": "layer"}, ["missing: final_norm.bias"]),
        ({"num_heads": 3}, ["hidden_dim 8 does not divide by num_heads 3"]),
        ({"num_layers": 1024}, ["missing: blocks.2.norm.scale", "and 7,"]),
    ],
    ids=lambda changes: str(changes)[:20],
)
def test_tensors_are_those_of_the_config(folder, changes, faults):
    edit_config(folder, **changes)
    assert_refused(folder, *faults)


def test_a_head_is_as_large_as_the_config_says(make_backbone, tmp_path):
    folder = tmp_path / "preset"
    ViT22BImageClassifier(make_backbone(), 5).save_to_preset(folder)
    assert verify_folder(folder)["tensors"] > len(make_backbone().tensors())
    edit_config(folder, "head", num_classes=4)
    assert_refused(folder, "head.kernel has shape (8, 5), expected (8, 4)")
    edit_config(folder, "head", num_classes=0)
    assert_refused(folder, "num_classes = 0")


def test_a_head_without_tensors_is_missing(folder):
    edit_config(folder, "head", num_classes=4)
    assert_refused(folder, "missing: head.kernel", "missing: head.bias")


def test_a_built_in_preset_is_sound_or_has_no_weights():
    assert verify_preset(DEFAULT_PRESET)["files"] == 1
    with pytest.raises(ValueError, match="were never released"):
        verify_preset("vit22b_patch14_224")


@pytest.mark.parametrize(
    "name",
    ["x.bin", "x.h5", "x.keras", "x.npz", "x.PKL", "x.pt", "x.ckpt", "x.hdf5"],
)
def test_formats_that_can_run_code_are_named(folder, name):
    (folder / name).write_bytes(b"")
    assert_refused(folder, f"{name} may run code when it is loaded")


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda h: h.pop(SHARD), f"{SHARD} has no sha256"),
        (lambda h: h.update({SHARD: "0" * 64}), f"expected {'0' * 64}"),
        (lambda h: h.update({SHARD: None}), "expected None"),
        (lambda h: h.update({"gone.json": "0"}), "gone.json has a sha256, but"),
        (lambda h: h.update({"../x": "0"}), "'../x' is not the plain name"),
    ],
    ids=["lacking", "other", "none", "gone", "outside"],
)
def test_hashes_are_those_of_the_shards(folder, edit, message):
    metadata = json.loads((folder / "metadata.json").read_text())
    edit(metadata["sha256"])
    (folder / "metadata.json").write_text(json.dumps(metadata))
    assert_refused(folder, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parameter_count": "many"}, "parameter_count = 'many'"),
        ({"dtype": None}, "dtype = None"),
        ({"card": {"licence": "mit"}}, "unknown field 'licence'"),
        ({"module": "os"}, "unknown field 'module'"),
    ],
    ids=str,
)
def test_metadata_has_known_fields(folder, changes, message):
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(metadata | changes))
    assert_refused(folder, "metadata.json is not valid: ", message)


@pytest.mark.parametrize("value", [None, [], "x"])
def test_metadata_without_hashes_is_no_proof(folder, value):
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(
        json.dumps(metadata | {"sha256": value})
    )
    assert_refused(folder, "metadata.json has no sha256 of files")


@pytest.mark.parametrize(
    "name", ["config.json", "metadata.json", "model.weights.json"]
)
def test_a_file_that_is_missing_is_named(folder, name):
    os.remove(folder / name)
    if name == "model.weights.json":  # The other index says the same.
        verify_folder(folder)
        name = "model.safetensors.index.json"
        os.remove(folder / name)
    assert_refused(folder, name)


def test_an_inspection_reads_headers_alone(folder, make_backbone, monkeypatch):
    monkeypatch.setattr(SafetensorsFile, "read", None)
    monkeypatch.setattr(SafetensorsFile, "read_slice", None)
    with PresetFolder(folder) as opened:
        rows = list_tensors(opened)
    index = json.loads((folder / "model.weights.json").read_text())
    assert {row["name"]: row["file"] for row in rows} == index["weight_map"]
    assert {row["name"]: row["shape"] for row in rows} == {
        name: list(v.shape) for name, v in make_backbone().tensors().items()
    }
    assert {row["dtype"] for row in rows} == {"float32"}
    total = index["metadata"]["total_size"]
    assert sum(row["bytes"] for row in rows) == total


@pytest.mark.parametrize("block", ["parallel", "sequential"])
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
def test_int8_kernels_need_their_scales(make_backbone, tmp_path, block):
    backbone = make_backbone(block=block)
    backbone.quantize("int8")
    backbone.save_to_preset(tmp_path)
    assert verify_folder(tmp_path)["tensors"] == len(backbone.tensors())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "pooling.out.kernel_scale"
    assert tensors[name].shape == (1, 1, 8)
    tensors[name] = tensors[name].reshape(8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} has shape"):
        verify_folder(tmp_path)


def test_a_link_out_of_the_folder_is_found(make_backbone, tmp_path):
    """Also of a file that no check reads; a push would publish it."""
    make_backbone().save_to_preset(tmp_path / "preset")
    (tmp_path / "secret").write_text("hf_secret")
    for name in ("README.md", "preprocessor.json", "model.weights.json"):
        folder = tmp_path / name.replace(".", "_")
        shutil.copytree(tmp_path / "preset", folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ValueError, match=f"{name} is a link that leads"):
            verify_folder(folder)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("config.json", {"auto_map": {}}, "unknown field 'auto_map'"),
        ("config.json", {"module": "os"}, "names module 'os'"),
        ("config.json", {"class_name": "Lambda"}, "names class 'Lambda'"),
        ("preprocessor.json", {"registered_name": "x"}, "describes 'x'"),
        ("preprocessor.json", {"module": "os"}, "names module 'os'"),
    ],
)
def test_a_file_that_names_other_code_is_refused(
    make_backbone, tmp_path, name, changes, message
):
    backbone = make_backbone()
    backbone.image_converter = ViT22BImageConverter((8, 12))
    backbone.save_to_preset(tmp_path)
    content = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(content | changes))
    with pytest.raises(ValueError, match=message):
        verify_folder(tmp_path)


def test_integers_and_stray_files_are_found(make_backbone, tmp_path):
    make_backbone().save_to_preset(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "other.safetensors")
    tensors["final_norm.scale"] = tensors["final_norm.scale"].astype("int32")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        verify_folder(tmp_path)
    assert "final_norm.scale is int32, expected floats" in str(error.value)
    assert "other.safetensors is not among the files" in str(error.value)
