"""The backbone equals a NumPy forward pass written from the equations."""

import keras
import numpy as np
import pytest
from reference import forward

# One option at a time, and then together where they could disturb each other.
OPTIONS = {
    "defaults": {},
    "layer norm": {"norm": "layer"},
    "layer norm of queries and keys": {"qk_norm": "layer"},
    "no norm of queries and keys": {"qk_norm": None},
    "qkv biases": {"use_qkv_bias": True},
    "erf gelu": {"activation": "gelu"},
    "large epsilon": {"epsilon": 0.1, "norm": "layer", "qk_norm": "layer"},
    "class token": {"pooling": "cls"},
    "mean": {"pooling": "mean"},
    "registers": {"num_registers": 3},
    "class token and registers": {"pooling": "cls", "num_registers": 2},
    "mean past registers": {"pooling": "mean", "num_registers": 2},
    "layer scale": {"layer_scale": 0.1},
    "norm before the blocks": {"pre_norm": True},
    "pooled, then normed": {"final_norm": "pooled"},
    "sequential": {"block": "sequential"},
    "sequential, layer norms": {
        "block": "sequential",
        "norm": "layer",
        "qk_norm": None,
        "use_qkv_bias": True,
        "activation": "gelu",
        "layer_scale": 0.1,
    },
    "the lesson's": {"norm": "layer", "qk_norm": "layer", "pooling": "cls"},
    "everything": {
        "norm": "layer",
        "qk_norm": "layer",
        "use_qkv_bias": True,
        "activation": "gelu",
        "num_registers": 2,
        "layer_scale": 0.1,
        "pre_norm": True,
        "final_norm": "pooled",
        "pooling": "cls",
    },
    "oblong patches": {"patch_size": (2, 6)},
    "four heads, one block": {"num_heads": 4, "num_layers": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_backbone_equals_the_equations(make_backbone, images, options):
    backbone = make_backbone(**options, random=True)
    tensors = {
        name: keras.ops.convert_to_numpy(variable.value)
        for name, variable in backbone.tensors().items()
    }
    expected = forward(tensors, images, backbone.get_config())
    blocks = backbone.block_model(range(backbone.num_layers), normed=False)
    model = keras.Model(
        backbone.input,
        [
            backbone.output["sequence_output"],
            backbone.output["pooled_output"],
            *(blocks.output[f"block_{i}"] for i in range(len(blocks.output))),
        ],
    )
    outputs = model.predict(images, verbose=0)
    wanted = [
        expected["sequence_output"],
        expected["pooled_output"],
        *expected["blocks"],
    ]
    assert len(outputs) == len(wanted)
    for output, value in zip(outputs, wanted):
        np.testing.assert_allclose(output, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_half_precision_is_close(make_backbone, images, policy, block):
    backbone = make_backbone(block=block, dtype=policy)
    tensors = {
        name: keras.ops.convert_to_numpy(variable.value)
        for name, variable in backbone.tensors().items()
    }
    outputs = backbone.predict(images, verbose=0)
    expected = forward(tensors, images, backbone.get_config())
    assert all(v.dtype == "float32" for v in backbone.weights)
    # bfloat16 keeps 8 bits of a number, float16 11. One number may be far
    # off, where a norm divides by little.
    tolerance = {"mixed_bfloat16": 0.05, "mixed_float16": 0.005}[policy]
    for key, output in outputs.items():
        error = output.astype("float32") - expected[key]
        assert np.linalg.norm(error) < tolerance * np.linalg.norm(expected[key])
