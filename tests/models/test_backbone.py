"""The backbone: outputs, config, saving, blocks by index, bad options."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageConverter

# No value is its default.
EVERY_OPTION = {
    "patch_size": (4, 2),
    "num_layers": 3,
    "num_heads": 4,
    "pooling": "cls",
    "norm": "layer",
    "qk_norm": "layer",
    "block": "sequential",
    "activation": "gelu",
    "use_qkv_bias": True,
    "epsilon": 1e-5,
    "num_registers": 2,
    "layer_scale": 0.1,
    "pre_norm": True,
    "final_norm": "pooled",
    "dropout_rate": 0.1,
    "drop_path_rate": 0.2,
    "remat": True,
    "dtype": "mixed_bfloat16",
    "name": "mine",
    "trainable": False,
}


@pytest.mark.parametrize(
    "options, tokens",
    [
        ({}, 6),
        ({"pooling": "mean"}, 6),
        ({"pooling": "cls"}, 7),
        ({"pooling": "cls", "num_registers": 2}, 9),
        ({"image_shape": (16, 4, 1)}, 4),
    ],
)
def test_outputs_are_tokens_and_one_vector(make_backbone, options, tokens):
    backbone = make_backbone(**options)
    shape = backbone.image_shape
    outputs = backbone.predict(np.zeros((2, *shape)), verbose=0)
    assert outputs["sequence_output"].shape == (2, tokens, 8)
    assert outputs["pooled_output"].shape == (2, 8)
    assert backbone.num_prefix_tokens == tokens - 6 + (tokens == 4) * 2


def test_config_round_trip(make_backbone):
    backbone = make_backbone(**EVERY_OPTION)
    config = backbone.get_config()
    assert {k: config[k] for k in EVERY_OPTION if k != "dtype"} == {
        k: v for k, v in EVERY_OPTION.items() if k != "dtype"
    }
    for copy in (
        ViT22BBackbone.from_config(config),
        keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(backbone)
        ),
    ):
        assert type(copy) is ViT22BBackbone
        assert copy.get_config() == config
        assert copy.dtype_policy.name == "mixed_bfloat16"
        assert copy.blocks[0].dtype_policy.name == "mixed_bfloat16"
        assert not copy.trainable_weights


def test_defaults_are_the_papers(make_backbone):
    config = make_backbone().get_config()
    assert (config["norm"], config["qk_norm"], config["block"]) == (
        "rms",
        "rms",
        "parallel",
    )
    assert config["pooling"] == "map"
    assert config["use_qkv_bias"] is False
    assert config["activation"] == "gelu_tanh"


@pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["few", "all"])
def test_whole_model_saved_equals_loaded(
    make_backbone, images, options, tmp_path
):
    backbone = make_backbone(**options, random=True)
    backbone.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is ViT22BBackbone
    for key, output in backbone.predict(images, verbose=0).items():
        np.testing.assert_array_equal(
            loaded.predict(images, verbose=0)[key], output
        )


@pytest.mark.parametrize("file", ["a.weights.h5", "a.safetensors"])
def test_weights_saved_equal_loaded(make_backbone, file, tmp_path, arrays):
    source = make_backbone(random=True)
    target = make_backbone()
    source.save_weights(tmp_path / file)
    target.load_weights(tmp_path / file)
    for ours, theirs in zip(arrays(target), arrays(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_overwriting_weights_can_be_forbidden(make_backbone, tmp_path):
    backbone = make_backbone()
    backbone.save_weights(tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists and overwrite is False"):
        backbone.save_weights(tmp_path / "a.safetensors", overwrite=False)
    assert (tmp_path / "a.safetensors").read_bytes() == before


def test_image_data_format_of_keras_changes_nothing(make_backbone, images):
    backbone = make_backbone(random=True)
    expected = backbone(images)["pooled_output"]
    keras.config.set_image_data_format("channels_first")
    copy = ViT22BBackbone.from_config(backbone.get_config())
    copy.set_weights(backbone.get_weights())
    np.testing.assert_array_equal(copy(images)["pooled_output"], expected)
    converter = ViT22BImageConverter((8, 12))
    pixels = np.zeros((2, 9, 14, 3), "uint8")
    assert tuple(converter(pixels).shape) == (2, 8, 12, 3)


def test_drop_path_grows_from_zero_to_the_last_block(make_backbone):
    backbone = make_backbone(num_layers=3, drop_path_rate=0.2)
    assert [b.drop_path_rate for b in backbone.blocks] == [0, 0.1, 0.2]


def test_image_converter_is_no_part_of_the_model(make_backbone):
    backbone = make_backbone()
    assert backbone.image_converter is None
    backbone.image_converter = converter = ViT22BImageConverter((8, 12))
    assert backbone.image_converter is converter
    assert converter not in list(backbone._flatten_layers())


# === Blocks by index ===


def test_blocks_are_asked_for_by_index(make_backbone, images):
    backbone = make_backbone(num_layers=3, random=True)
    outputs = backbone.block_model([0, -1, -2], normed=False)(images)
    assert sorted(outputs) == ["block_0", "block_1", "block_2"]
    tokens = backbone.patch_embedding(images)
    for index, block in enumerate(backbone.blocks):
        tokens = block(tokens)
        np.testing.assert_allclose(
            outputs[f"block_{index}"], tokens, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("final_norm", ["tokens", "pooled"])
def test_normed_applies_the_last_norm(make_backbone, images, final_norm):
    backbone = make_backbone(final_norm=final_norm, random=True)
    raw = backbone.block_model([-1], normed=False)(images)["block_1"]
    normed = backbone.block_model([-1], normed=True)(images)["block_1"]
    np.testing.assert_allclose(
        normed, backbone.final_norm_layer(raw), rtol=1e-5, atol=1e-6
    )
    output = backbone(images)["sequence_output"]
    same = normed if final_norm == "tokens" else raw
    np.testing.assert_allclose(output, same, rtol=1e-5, atol=1e-6)
    assert np.abs(ops.convert_to_numpy(normed - raw)).max() > 0.1


def test_asking_for_blocks_leaves_the_backbone_as_it_was(make_backbone, images):
    backbone = make_backbone(random=True)
    config, outputs = backbone.get_config(), backbone(images)["pooled_output"]
    model = backbone.block_model([0, 1], normed=True)
    assert {id(w) for w in model.weights} <= {id(w) for w in backbone.weights}
    assert backbone.get_config() == config
    np.testing.assert_array_equal(backbone(images)["pooled_output"], outputs)


@pytest.mark.parametrize("index", [2, -3, 100])
def test_a_block_out_of_range_is_named(make_backbone, index):
    message = f"Block {index} does not exist; .* 0 to 1, or -2 to -1"
    with pytest.raises(ValueError, match=message):
        make_backbone().block_model([0, index], normed=False)


def test_whether_blocks_are_normed_must_be_said(make_backbone):
    with pytest.raises(TypeError, match="normed"):
        make_backbone().block_model([0])


# === Bad options ===


@pytest.mark.parametrize(
    "options, message",
    [
        ({"image_shape": (9, 12, 3)}, r"\(12, 12, 3\) and \(8, 12, 3\)"),
        ({"image_shape": (8, 12)}, "fixed shape"),
        ({"num_heads": 3}, "hidden_dim 8 does not divide by num_heads 3"),
        ({"mlp_dim": 17}, "mlp_dim 17 does not .* 16 and 18"),
        ({"pooling": "max"}, "pooling must be 'map' or 'cls' or 'mean'.*'max'"),
        ({"norm": "batch"}, "norm must be 'rms' or 'layer'. Received: 'batch'"),
        ({"qk_norm": "batch"}, "qk_norm must be"),
        ({"block": "serial"}, "block must be 'parallel' or 'sequential'"),
        ({"final_norm": "none"}, "final_norm must be 'tokens' or 'pooled'"),
        ({"activation": "relu"}, "activation must be"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be"),
    ],
)
def test_bad_options_are_named(make_backbone, options, message):
    with pytest.raises(ValueError, match=message):
        make_backbone(**options)
