"""The names and shapes on disk are the format: they are spelled out here."""

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.weights.tensor_shapes import tensor_shapes

EMBEDDING = {
    "patch_embedding.kernel": (48, 8),
    "patch_embedding.bias": (8,),
    "position_embedding": (6, 8),
}
PARALLEL = {
    "norm.scale": (8,),
    "query_norm.scale": (4,),
    "key_norm.scale": (4,),
    "in_projection.kernel": (8, 2, 3 * 4 + 8),
    "in_projection.mlp_bias": (2, 8),
    "out_projection.kernel": (2, 4 + 8, 8),
    "out_projection.bias": (8,),
}
SEQUENTIAL = {
    "norm.scale": (8,),
    "query_norm.scale": (4,),
    "key_norm.scale": (4,),
    "qkv_projection.kernel": (8, 2, 12),
    "attention_out.kernel": (2, 4, 8),
    "attention_out.bias": (8,),
    "mlp_norm.scale": (8,),
    "mlp_in.kernel": (8, 16),
    "mlp_in.bias": (16,),
    "mlp_out.kernel": (16, 8),
    "mlp_out.bias": (8,),
}
POOLING = {
    "pooling.probe": (1, 8),
    "pooling.query.kernel": (8, 2, 4),
    "pooling.query.bias": (2, 4),
    "pooling.key.kernel": (8, 2, 4),
    "pooling.key.bias": (2, 4),
    "pooling.value.kernel": (8, 2, 4),
    "pooling.value.bias": (2, 4),
    "pooling.out.kernel": (2, 4, 8),
    "pooling.out.bias": (8,),
    "pooling.norm.scale": (8,),
    "pooling.mlp_in.kernel": (8, 16),
    "pooling.mlp_in.bias": (16,),
    "pooling.mlp_out.kernel": (16, 8),
    "pooling.mlp_out.bias": (8,),
}
FINAL_NORM = {"final_norm.scale": (8,)}


def blocks(tensors, count=2):
    return {
        f"blocks.{i}.{name}": shape
        for i in range(count)
        for name, shape in tensors.items()
    }


def norm_biases(tensors):
    """Return the biases that layer norms have and RMS norms lack."""
    return {
        name.removesuffix("scale") + "bias": shape
        for name, shape in tensors.items()
        if "norm." in name
    }


FORMATS = {
    "parallel": (
        {},
        EMBEDDING | blocks(PARALLEL) | FINAL_NORM | POOLING,
    ),
    "parallel, all options": (
        {
            "norm": "layer",
            "qk_norm": "layer",
            "use_qkv_bias": True,
            "layer_scale": 0.1,
            "pre_norm": True,
            "pooling": "cls",
            "num_registers": 3,
        },
        EMBEDDING
        | {
            "class_token": (1, 8),
            "class_position": (1, 8),
            "registers": (3, 8),
            "pre_norm.scale": (8,),
            "pre_norm.bias": (8,),
        }
        | blocks(
            PARALLEL
            | norm_biases(PARALLEL)
            | {"in_projection.qkv_bias": (2, 12), "layer_scale": (8,)}
        )
        | FINAL_NORM
        | norm_biases(FINAL_NORM),
    ),
    "sequential": (
        {"block": "sequential", "pooling": "mean"},
        EMBEDDING | blocks(SEQUENTIAL) | FINAL_NORM,
    ),
    "sequential, all options": (
        {
            "block": "sequential",
            "norm": "layer",
            "qk_norm": "layer",
            "use_qkv_bias": True,
            "layer_scale": 0.1,
        },
        EMBEDDING
        | blocks(
            SEQUENTIAL
            | norm_biases(SEQUENTIAL)
            | {
                "qkv_projection.bias": (2, 12),
                "attention_scale": (8,),
                "mlp_scale": (8,),
            }
        )
        | FINAL_NORM
        | norm_biases(FINAL_NORM)
        | POOLING
        | {"pooling.norm.bias": (8,)},
    ),
    "no norm of queries and keys": (
        {"qk_norm": None, "pooling": "mean", "num_layers": 1},
        EMBEDDING
        | blocks(
            {n: s for n, s in PARALLEL.items() if n[:3] not in ("que", "key")},
            count=1,
        )
        | FINAL_NORM,
    ),
}


@pytest.mark.parametrize("options, expected", FORMATS.values(), ids=FORMATS)
def test_names_and_shapes_are_the_format(make_backbone, options, expected):
    """Of a model, and of its config alone."""
    backbone = make_backbone(**options)
    shapes = {n: tuple(v.shape) for n, v in backbone.tensors().items()}
    assert shapes == expected
    assert tensor_shapes(**backbone.get_config()) == expected


def test_a_classifier_adds_its_head(make_backbone):
    backbone = make_backbone()
    tensors = ViT22BImageClassifier(backbone, 5).tensors()
    added = {n: v for n, v in tensors.items() if n not in backbone.tensors()}
    assert {n: tuple(v.shape) for n, v in added.items()} == {
        "head.kernel": (8, 5),
        "head.bias": (5,),
    }
    config = backbone.get_config()
    assert tensor_shapes(**config, num_classes=5) == {
        name: tuple(v.shape) for name, v in tensors.items()
    }


def test_a_config_says_only_what_is_not_the_default(make_backbone):
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    tensors = make_backbone(**sizes).tensors()
    assert tensor_shapes((8, 12, 3), 4, **sizes) == {
        name: tuple(v.shape) for name, v in tensors.items()
    }


def test_names_do_not_depend_on_the_models_name(make_backbone):
    one, other = make_backbone(name="one"), make_backbone(name="other")
    assert list(one.tensors()) == list(other.tensors())


def test_a_weight_without_a_name_is_refused(make_backbone):
    backbone = make_backbone()
    backbone.quantize("float8")
    with pytest.raises(ValueError, match="no tensor name.*amax_history"):
        backbone.tensors()


def test_int8_kernels_have_scales(make_backbone):
    backbone = make_backbone()
    float_names = set(backbone.tensors())
    backbone.quantize("int8")
    tensors = backbone.tensors()
    scales = {n for n in tensors if n.endswith("kernel_scale")}
    assert set(tensors) - scales == float_names
    assert {n.removesuffix("_scale") for n in scales} == {
        n for n in float_names if n.endswith("kernel") and "patch" not in n
    }
    kernel = tensors["blocks.0.in_projection.kernel"]
    assert kernel.dtype == "int8"
    scale = tensors["blocks.0.in_projection.kernel_scale"]
    assert scale.shape == (1, 1, 2, 3 * 4 + 8)


def test_lora_has_names_and_a_file_but_no_preset(make_backbone, tmp_path):
    saved, loaded = make_backbone(), make_backbone()
    for backbone in (saved, loaded):
        backbone.blocks[0].in_projection.enable_lora(2)
    names = [n for n in saved.tensors() if "lora" in n]
    assert names == [
        "blocks.0.in_projection.lora_a",
        "blocks.0.in_projection.lora_b",
    ]
    value = np.ones(saved.tensors()[names[0]].shape)
    saved.tensors()[names[0]].assign(value)
    saved.save_weights(tmp_path / "tuned.safetensors")
    loaded.load_weights(tmp_path / "tuned.safetensors")
    array = keras.ops.convert_to_numpy(loaded.tensors()[names[0]].value)
    np.testing.assert_array_equal(array, value)
    with pytest.raises(ValueError, match="no LoRA"):
        saved.save_to_preset(tmp_path / "preset")
    assert not (tmp_path / "preset").exists()
