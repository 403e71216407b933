"""What each layer of the room keeps: config, saving, shapes and policies."""

import keras
import numpy as np
import pytest

from keras_vit22b import layers

LAYERS = {
    "attention pooling": lambda **k: layers.AttentionPooling(
        8, 2, 16, norm="layer", activation="gelu", epsilon=1e-5, **k
    ),
    "in projection": lambda **k: layers.InProjection(
        8, 2, 16, use_bias=True, **k
    ),
    "parallel block": lambda **k: layers.ParallelBlock(
        8,
        2,
        16,
        norm="layer",
        qk_norm="layer",
        use_qkv_bias=True,
        activation="gelu",
        epsilon=1e-5,
        layer_scale=0.1,
        dropout_rate=0.1,
        drop_path_rate=0.2,
        remat=True,
        **k,
    ),
    "sequential block": lambda **k: layers.SequentialBlock(
        8, 2, 16, qk_norm=None, layer_scale=0.1, **k
    ),
    "cls": lambda **k: layers.TokenPooling("cls", num_prefix_tokens=2, **k),
    "mean": lambda **k: layers.TokenPooling("mean", num_prefix_tokens=2, **k),
    "patch embedding": lambda **k: layers.PatchEmbedding(
        8, (2, 4), grid_size=(3, 3), class_token=True, num_registers=2, **k
    ),
    "attention": lambda **k: layers.QKNormAttention("layer", epsilon=1e-5, **k),
    "out projection": lambda **k: layers.OutProjection(8, 2, 16, **k),
}
EACH = pytest.mark.parametrize("name", LAYERS)


def inputs_of(name):
    """Return the shapes of a layer's inputs, without their batch."""
    return {
        "patch embedding": [(4, 8, 1)],
        "attention": [(5, 2, 4)] * 3,
        "out projection": [(5, 2, 12)],
    }.get(name, [(5, 8)])


def random_inputs(name):
    generator = np.random.default_rng(7)
    return [
        generator.normal(size=(3, *s)).astype("float32")
        for s in inputs_of(name)
    ]


def test_every_public_layer_is_covered():
    public = {
        v
        for v in vars(layers).values()
        if isinstance(v, type) and issubclass(v, keras.layers.Layer)
    }
    assert {type(make()) for make in LAYERS.values()} == public


@EACH
def test_config_holds_every_argument(name):
    layer = LAYERS[name](name="mine", dtype="mixed_bfloat16")
    config = layer.get_config()
    copy = type(layer).from_config(config)
    assert copy.get_config() == config
    assert copy.name == "mine"
    assert copy.dtype_policy.name == "mixed_bfloat16"
    for key, value in vars(layer).items():
        if isinstance(value, (int, float, str, tuple)):
            assert getattr(copy, key) == value, key


@EACH
def test_saved_layer_equals_loaded(name, tmp_path, randomize):
    inputs = [keras.Input(s) for s in inputs_of(name)]
    model = keras.Model(inputs, LAYERS[name]()(*inputs))
    randomize(model)
    model.save(tmp_path / "model.keras")
    # No custom_objects: importing the room registers its layers.
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    arrays = random_inputs(name)
    np.testing.assert_array_equal(loaded(arrays), model(arrays))


@EACH
@pytest.mark.parametrize(
    "policy", ["float32", "mixed_bfloat16", "mixed_float16"]
)
def test_policy_gives_the_output_its_dtype(name, policy):
    layer = LAYERS[name](dtype=policy)
    arrays = random_inputs(name)
    output = layer(*arrays)
    compute = keras.DTypePolicy(policy).compute_dtype
    assert keras.backend.standardize_dtype(output.dtype) == compute
    assert {w.dtype for w in layer.weights} <= {"float32"}
    symbolic = layer(*(keras.KerasTensor(a.shape) for a in arrays))
    assert symbolic.dtype == compute
    # A projection alone does not tell its number of tokens.
    for known, real in zip(symbolic.shape, output.shape, strict=True):
        assert known in (None, real)
