"""The fused projections keep what Keras' EinsumDense can do."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_vit22b.layers import InProjection
from keras_vit22b.layers import OutProjection
from keras_vit22b.layers.projections import FusedGlorotUniform

CASES = {
    "in": (lambda **k: InProjection(8, 2, 16, **k), (3, 5, 8)),
    "in, attention alone": (lambda **k: InProjection(8, 2, **k), (3, 5, 8)),
    "out": (lambda **k: OutProjection(8, 2, 16, **k), (3, 5, 2, 12)),
    "out, attention alone": (
        lambda **k: OutProjection(8, 2, **k),
        (3, 5, 2, 4),
    ),
}
EACH = pytest.mark.parametrize("make, shape", CASES.values(), ids=CASES)


def random_inputs(shape):
    return np.random.default_rng(6).normal(size=shape).astype("float32")


@EACH
def test_config_gives_the_same_layer(make, shape):
    layer = make(use_bias=True)
    copy = type(layer).from_config(layer.get_config())
    inputs = random_inputs(shape)
    layer(inputs), copy(inputs)
    for ours, theirs in zip(copy.weights, layer.weights, strict=True):
        ours.assign(theirs)
    np.testing.assert_array_equal(copy(inputs), layer(inputs))


@EACH
def test_lora_starts_as_the_layer_and_trains_little(make, shape):
    layer = make()
    inputs = random_inputs(shape)
    before = layer(inputs)
    layer.enable_lora(2)
    np.testing.assert_allclose(layer(inputs), before, atol=1e-6)
    assert sum(w.shape[-1] == 2 for w in layer.trainable_weights) == 1
    assert len(layer.trainable_weights) == 2


@pytest.mark.parametrize("name", ["in", "out"])
def test_int8_is_close(name):
    make, shape = CASES[name]
    layer = make()
    inputs = random_inputs(shape)
    before = ops.convert_to_numpy(layer(inputs))
    layer.quantize("int8")
    np.testing.assert_allclose(layer(inputs), before, atol=0.1)


def test_initializer_survives_its_config():
    initializer = FusedGlorotUniform([(2, 4, 4), (3, 4, 20)], axis=1, seed=7)
    copy = keras.initializers.deserialize(
        keras.initializers.serialize(initializer)
    )
    np.testing.assert_array_equal(copy((6, 5)), initializer((6, 5)))


def test_initializer_gives_each_branch_its_own_limit():
    initializer = FusedGlorotUniform([(2, 4, 4), (3, 1, 599)], axis=1)
    values = np.abs(ops.convert_to_numpy(initializer((1000, 5))))
    np.testing.assert_allclose(
        values.max(0), np.sqrt(6 / np.array([8, 8, 600, 600, 600])), rtol=0.02
    )
