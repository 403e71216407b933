"""Handles, and JSON that is data: known fields of known types."""

import json
import os

import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b import from_preset
from keras_vit22b.models import abstract
from keras_vit22b.weights import preset_files
from keras_vit22b.weights.hub import parse_handle


@pytest.fixture
def folder(make_backbone, tmp_path):
    """A preset with preprocessing and a head."""
    from keras_vit22b import ViT22BImageClassifier
    from keras_vit22b import ViT22BImageConverter

    backbone = make_backbone()
    backbone.image_converter = ViT22BImageConverter((8, 12))
    ViT22BImageClassifier(backbone, 2).save_to_preset(tmp_path)
    return tmp_path


def edit(path, **changes):
    """Change a JSON file's top level."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def edit_config(path, **changes):
    """Change fields of the config in a JSON file."""
    config = json.loads(path.read_text())["config"]
    edit(path, config=config | changes)


# === Handles ===


@pytest.mark.parametrize(
    "handle, near",
    [
        ("vit22b_patch14_448", "vit22b_patch14_224"),
        ("vit_22b", "vit"),
        ("vit250k_patch7_28x", "vit250k_patch7_28"),
        ("ViT250k_patch7_28", "vit250k_patch7_28"),
    ],
)
def test_an_unknown_preset_offers_near_names(handle, near):
    with pytest.raises(ValueError, match=f"Unknown preset.*{near}"):
        from_preset(handle)


@pytest.mark.parametrize(
    "handle", ["kaggle://a/b/c", "https://huggingface.co/org/m", "HF://org/m"]
)
def test_other_schemes_are_refused(handle):
    with pytest.raises(ValueError, match="Cannot load '.*://"):
        from_preset(handle)


@pytest.mark.parametrize(
    "handle",
    [
        "hf://",
        "hf://vit",
        "hf://org/m/sub",
        "hf://org/",
        "hf:///m",
        "hf://org/m@",
        "hf://user:password@org/m",
        "hf://org/m?revision=v1",
        "hf://org/m#v1",
        "hf://org/m\n",
        "hf://org m/x",
    ],
)
def test_a_handle_of_another_form_is_refused_without_a_request(handle):
    with pytest.raises(ValueError, match="hf://org/name@revision"):
        from_preset(handle)


def test_a_handle_may_name_its_revision():
    assert parse_handle("hf://org/m") == ("org/m", None)
    assert parse_handle("hf://org/m@v1.0") == ("org/m", "v1.0")
    assert parse_handle("hf://org/m@refs/pr/1") == ("org/m", "refs/pr/1")
    assert parse_handle("hf://org/m", "v2") == ("org/m", "v2")
    assert parse_handle("hf://org/m@v2", "v2") == ("org/m", "v2")


def test_a_handle_and_an_argument_may_not_name_two_revisions():
    with pytest.raises(ValueError, match="'v1', but revision='v2' was passed"):
        from_preset("hf://org/m@v1", revision="v2")


@pytest.mark.parametrize(
    "option",
    [
        {"revision": "main"},
        {"token": "hf_secret"},
        {"cache_dir": "cache"},
        {"local_files_only": True},
    ],
)
def test_options_of_the_hub_are_refused_elsewhere(folder, option):
    with pytest.raises(ValueError, match=f"{[*option][0]} is for handles of"):
        from_preset(folder, **option)
    assert from_preset(folder, **dict.fromkeys(option)).built


@pytest.mark.parametrize("handle", ["", ".", "..", "/", "../presets"])
def test_a_folder_that_is_no_preset_is_refused(handle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not a preset|Unknown preset"):
        from_preset(handle)


def test_a_built_in_name_is_its_folder():
    name = "vit22b_patch14_224"
    with preset_files.open_preset(name) as folder:
        assert folder.path == preset_files.builtin_folder() / name


def test_22b_says_its_weights_were_never_released():
    with pytest.raises(ValueError) as error:
        from_preset("vit22b_patch14_224")
    for words in ("never released", "load_weights=False", "folder"):
        assert words in str(error.value)


def test_a_folder_without_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors nor"):
        from_preset(folder)
    assert from_preset(folder, load_weights=False).built


@pytest.mark.parametrize(
    "name", ["model.bin", "model.weights.h5", "model.keras", "weights.pkl"]
)
def test_other_formats_are_not_even_opened(folder, name):
    os.replace(folder / "model.safetensors", folder / name)
    with pytest.raises(ValueError, match="has neither model.safetensors nor"):
        from_preset(folder)


# === JSON ===


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="is not a preset: it has no config"):
        from_preset(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '{"config": ', "\x00", "[" * 100_000],
    ids=lambda text: text[:11],
)
@pytest.mark.parametrize("file", ["config.json", "image_converter.json"])
def test_json_that_is_none_is_refused(folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=file):
        from_preset(folder)


def test_json_in_another_encoding_is_refused(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="Cannot read .*config.json"):
        from_preset(folder)


@pytest.mark.parametrize("section", [None, [], "x", 3])
@pytest.mark.parametrize("file", ["config.json", "image_converter.json"])
def test_a_config_that_is_no_object_is_refused(folder, file, section):
    edit(folder / file, config=section)
    with pytest.raises(ValueError, match=f"{file}.*'config' must be an object"):
        from_preset(folder)


@pytest.mark.parametrize(
    "field, value",
    [
        ("image_shape", [8, 12]),
        ("image_shape", [8, 12, "3"]),
        ("image_shape", [8, -12, 3]),
        ("image_shape", "8x12"),
        ("patch_size", 0),
        ("patch_size", 4.0),
        ("patch_size", [4, 4, 4]),
        ("num_layers", 10**9),
        ("num_layers", True),
        ("num_heads", 0),
        ("hidden_dim", None),
        ("hidden_dim", {"class_name": "Lambda"}),
        ("pooling", 3),
        ("qk_norm", ["rms"]),
        ("use_qkv_bias", 1),
        ("epsilon", -1e-6),
        ("epsilon", float("nan")),
        ("layer_scale", float("inf")),
        ("layer_scale", "0.1"),
        ("dropout_rate", 1.0),
        ("dropout_rate", False),
        ("name", "x" * 1000),
        ("no_such_field", 1),
        ("kernel_initializer", "zeros"),
    ],
)
def test_a_field_that_is_wrong_or_unknown_is_named(folder, field, value):
    edit_config(folder / "config.json", **{field: value})
    with pytest.raises(
        ValueError, match=f"config.json is not valid: .*{field}"
    ):
        from_preset(folder)


@pytest.mark.parametrize(
    "field, value",
    [
        ("image_size", [8]),
        ("image_size", [8, 0]),
        ("channels", True),
        ("channels", 4),
        ("convert_channels", "yes"),
        ("scale", [1, 2]),
        ("scale", float("nan")),
        ("offset", {"class_name": "Lambda"}),
        ("interpolation", "eval"),
        ("data_format", "channels_first"),
    ],
)
def test_preprocessing_that_is_wrong_is_named(folder, field, value):
    edit_config(folder / "image_converter.json", **{field: value})
    message = f"image_converter.json is not valid: .*{field}"
    with pytest.raises(ValueError, match=message):
        from_preset(folder)


def test_all_faults_are_named_at_once(folder):
    edit_config(folder / "config.json", num_heads=-1, colour="red")
    config = json.loads((folder / "config.json").read_text())["config"]
    del config["mlp_dim"]
    edit(folder / "config.json", config=config)
    with pytest.raises(ValueError) as error:
        from_preset(folder)
    for fault in (
        "num_heads = -1",
        "field 'colour'",
        "missing field 'mlp_dim'",
    ):
        assert fault in str(error.value)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("pooling", "max", "'max', expected 'map' or 'cls' or 'mean'"),
        ("norm", "batch", "'batch', expected 'rms' or 'layer'"),
        ("qk_norm", "batch", "'batch', expected 'rms' or 'layer' or None"),
        ("block", "serial", "'serial', expected 'parallel' or 'sequential'"),
        ("activation", "relu", "'relu', expected 'gelu_tanh' or 'gelu'"),
        ("final_norm", "both", "'both', expected 'tokens' or 'pooled'"),
        ("num_heads", 3, "does not divide by num_heads 3"),
        ("image_shape", [9, 12, 3], "does not divide into 4 x 4 patches"),
    ],
)
def test_an_option_that_cannot_be_says_what_can(folder, field, value, message):
    edit_config(folder / "config.json", **{field: value})
    with pytest.raises(ValueError, match=message):
        from_preset(folder)


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"num_classes": 0},
        {"num_classes": 2, "activation": {"class_name": "Lambda"}},
        {"num_classes": 2, "class_names": ["a", 1]},
        {"num_classes": 2, "class_names": ["a"]},
        {"num_classes": 2, "activation": "no_such_activation"},
        [],
    ],
)
def test_a_head_that_is_wrong_is_refused(folder, head):
    from keras_vit22b import ViT22BImageClassifier

    edit(folder / "config.json", head=head)
    with pytest.raises(ValueError):
        ViT22BImageClassifier.from_preset(folder)
    # The backbone does not need it.
    assert from_preset(folder).built


@pytest.mark.parametrize(
    "registered_name",
    ["keras_hub>ViTBackbone", "ViT22BBackbone", None, "builtins>eval"],
)
def test_another_class_is_refused(folder, registered_name):
    edit(folder / "config.json", registered_name=registered_name)
    with pytest.raises(ValueError, match="expected 'keras_vit22b>ViT22BBackb"):
        from_preset(folder)


BOMBS = pytest.mark.parametrize(
    "bomb",
    [
        {"num_layers": 1024},
        {"hidden_dim": 6144, "mlp_dim": 24576, "num_layers": 48},
        {"mlp_dim": 1_048_576},
        # Positions are resized to the image: 2**28 tokens of 8 numbers.
        {"image_shape": [65536, 65536, 3]},
    ],
    ids=lambda bomb: next(iter(bomb)),
)


@BOMBS
def test_a_config_larger_than_the_weights_is_refused_before_a_layer_is_made(
    folder, bomb, monkeypatch
):
    monkeypatch.setattr(ViT22BBackbone, "__init__", None)
    edit_config(folder / "config.json", **bomb)
    message = r"config.json describes at least [\d,]+ numbers, but the weights"
    with pytest.raises(ValueError, match=message):
        from_preset(folder)


@pytest.mark.parametrize(
    "bomb",
    [
        {"mlp_dim": 1_048_576, "hidden_dim": 131_072, "num_layers": 2},
        # 2**32 tokens of 8 numbers: 137 GB.
        {"image_shape": [65536, 65536, 3], "patch_size": 1},
    ],
    ids=lambda bomb: next(iter(bomb)),
)
def test_random_weights_larger_than_the_memory_are_refused(
    folder, bomb, monkeypatch
):
    monkeypatch.setattr(abstract, "_memory", lambda: 64 * 10**9)
    edit_config(folder / "config.json", **bomb)
    message = r"needs [\d,.]+ GB for its weights, but this machine has 64.0 GB"
    with pytest.raises(ValueError, match=message):
        from_preset(folder, load_weights=False)
    assert from_preset(folder, abstract=True).count_params() > 16 * 10**9


def test_random_weights_as_large_as_the_memory_are_made(folder, monkeypatch):
    needed = 4 * from_preset(folder).count_params()
    monkeypatch.setattr(abstract, "_memory", lambda: needed)
    assert from_preset(folder, load_weights=False).built
    monkeypatch.setattr(abstract, "_memory", lambda: needed - 1)
    with pytest.raises(ValueError, match="abstract=True.*dtype='bfloat16'"):
        from_preset(folder, load_weights=False)
    assert from_preset(folder, load_weights=False, dtype="bfloat16").built
    monkeypatch.setattr(abstract, "_memory", lambda: None)
    assert from_preset(folder, load_weights=False).built


def test_a_config_with_a_larger_image_resizes_positions(folder):
    edit_config(folder / "config.json", image_shape=[16, 24, 3])
    assert from_preset(folder).image_shape == (16, 24, 3)


def test_a_config_of_another_small_model_is_refused(folder):
    """It passes the bound, and then its tensors do not fit."""
    edit_config(folder / "config.json", num_layers=1)
    with pytest.raises(ValueError, match="not part of the model: blocks.1"):
        from_preset(folder)


def test_nothing_in_a_preset_names_code_to_run(folder, tmp_path, monkeypatch):
    """`module`, `class_name` and stray sections are refused, not run."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    evil = {"module": "evil", "class_name": "Evil", "config": {}}
    evil_build = evil | {"build_config": evil, "compile_config": evil}
    edit_config(folder / "config.json", dtype=evil)
    assert from_preset(folder).built
    for file in ("config.json", "image_converter.json"):
        before = (folder / file).read_text()
        for change in (
            {"module": "evil"},
            {"class_name": "Evil"},
            {"extra": evil_build},
        ):
            edit(folder / file, **change)
            with pytest.raises(ValueError, match=file):
                from_preset(folder)
            (folder / file).write_text(before)
    assert not (tmp_path / "ran").exists()
