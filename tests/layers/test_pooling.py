"""Attention pooling and pooling without weights."""

import numpy as np
import pytest
from keras import ops

from keras_vit22b.layers import AttentionPooling
from keras_vit22b.layers import TokenPooling


def random_tokens(count=5):
    generator = np.random.default_rng(count)
    return generator.normal(size=(3, count, 8)).astype("float32")


def test_attention_pooling_ignores_the_order_of_tokens(randomize):
    layer = AttentionPooling(8, num_heads=2, mlp_dim=16)
    tokens = random_tokens()
    layer.build(tokens.shape)
    randomize(layer)
    np.testing.assert_allclose(
        layer(tokens[:, ::-1]), layer(tokens), rtol=1e-4, atol=1e-5
    )


def test_attention_pooling_takes_any_number_of_tokens():
    layer = AttentionPooling(8, num_heads=2, mlp_dim=16)
    for count in (5, 7):
        assert tuple(layer(random_tokens(count)).shape) == (3, 8)


def test_projections_of_attention_pooling_start_as_square_matrices():
    layer = AttentionPooling(64, num_heads=4, mlp_dim=128)
    layer.build((None, 5, 64))
    for dense in (layer.query, layer.key, layer.value, layer.out):
        kernel = ops.convert_to_numpy(dense.kernel)
        assert kernel.var() == pytest.approx(2 / 128, rel=0.1)
        assert not ops.convert_to_numpy(dense.bias).any()


def test_class_pooling_takes_the_first_token():
    tokens = random_tokens()
    pooled = TokenPooling("cls", num_prefix_tokens=3)(tokens)
    np.testing.assert_array_equal(pooled, tokens[:, 0])


def test_mean_pooling_leaves_the_prefix_out():
    tokens = random_tokens()
    pooled = TokenPooling("mean", num_prefix_tokens=2)(tokens)
    np.testing.assert_allclose(pooled, tokens[:, 2:].mean(1), rtol=1e-5)


def test_an_unknown_pooling_is_named():
    with pytest.raises(ValueError, match="'cls' or 'mean'. Received: 'max'"):
        TokenPooling("max")


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="hidden_dim 8 does not divide"):
        AttentionPooling(8, num_heads=3, mlp_dim=16)
