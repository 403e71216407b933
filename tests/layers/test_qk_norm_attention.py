"""Query and key norms bound logits; without them attention can collapse."""

import keras
import numpy as np
import pytest
from keras import ops
from reference import attention
from reference import entropy
from reference import layer_norm
from reference import rms_norm
from reference import softmax

from keras_vit22b.layers import QKNormAttention
from keras_vit22b.layers import qk_norm_attention


def random_heads(tokens=5, heads=2, head_dim=4, scale=1.0):
    generator = np.random.default_rng(tokens)
    shape = (2, tokens, heads, head_dim)
    return (generator.normal(size=shape) * scale).astype("float32")


def maps_of(logits):
    """Attend with one query whose logits over three keys are these."""
    head_dim = 4
    query = np.zeros((1, 1, 1, head_dim), "float32")
    query[..., 0] = np.sqrt(head_dim)
    key = np.zeros((1, len(logits), 1, head_dim), "float32")
    key[0, :, 0, 0] = logits
    return QKNormAttention(None)(query, key, key, return_attention=True)[1]


@pytest.mark.parametrize(
    "logits, expected",
    [((1, 0, 0), 0.975), ((4, 0, 0), 0.177), ((12, 0, 0), 0.0002)],
)
def test_entropy_collapses_as_logits_grow(logits, expected):
    maps = maps_of(logits)
    digits = 4 if expected < 0.001 else 3
    assert round(float(maps.entropy[0, 0, 0]), digits) == expected
    assert float(maps.largest_logit[0, 0]) == pytest.approx(logits[0])


def test_equal_keys_have_the_largest_entropy():
    maps = maps_of((7.0,) * 6)
    np.testing.assert_allclose(maps.entropy, np.log(6), rtol=1e-6)
    np.testing.assert_allclose(maps.weights, 1 / 6, rtol=1e-6)


@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize(
    "qk_norm, expected",
    [
        ("layer", (1.569, 0, -1.177, -0.392)),
        ("rms", (1.826, 0.365, -0.730, 0)),
    ],
)
def test_norm_divides_the_scale_out(qk_norm, expected, scale):
    layer = QKNormAttention(qk_norm)
    layer.build(*[(1, 1, 1, 4)] * 3)
    query = np.array((10, 2, -4, 0), "float32") * scale
    for norm in (layer.query_norm, layer.key_norm):
        normed = ops.convert_to_numpy(norm(query[None, None, None]))
        np.testing.assert_allclose(normed[0, 0, 0], expected, atol=5e-4)


@pytest.mark.parametrize("qk_norm", ["rms", "layer", None])
def test_output_and_maps_follow_the_equations(qk_norm, randomize):
    layer = QKNormAttention(qk_norm, epsilon=1e-3)
    query, key = random_heads(5), random_heads(7, scale=3.0)
    value = random_heads(7)
    layer.build(query.shape, key.shape, value.shape)
    randomize(layer)
    normed = []
    for norm, x in ((layer.query_norm, query), (layer.key_norm, key)):
        if norm is not None:
            weights = [ops.convert_to_numpy(w) for w in norm.weights]
            equation = {"rms": rms_norm, "layer": layer_norm}[qk_norm]
            x = equation(x.astype("float64"), *weights, 1e-3)
        normed.append(x)
    output, maps = layer(query, key, value, return_attention=True)
    np.testing.assert_allclose(output, attention(*normed, value), atol=1e-5)
    logits = np.einsum("bthd,bshd->bhts", *normed) / 2
    np.testing.assert_allclose(maps.weights, softmax(logits), atol=1e-5)
    np.testing.assert_allclose(
        maps.entropy, entropy(softmax(logits)), atol=1e-5
    )
    np.testing.assert_allclose(
        maps.largest_logit, logits.max((-2, -1)), atol=1e-5
    )


@pytest.mark.parametrize("qk_norm", ["rms", "layer", None])
def test_asking_for_maps_does_not_change_the_output(qk_norm):
    layer = QKNormAttention(qk_norm)
    heads = random_heads()
    output, _ = layer(heads, heads, heads, return_attention=True)
    np.testing.assert_allclose(layer(heads, heads, heads), output, atol=1e-6)


def test_values_are_not_normalized():
    layer = QKNormAttention()
    heads = random_heads()
    once, tenfold = layer(heads, heads, heads), layer(heads, heads, 10 * heads)
    np.testing.assert_allclose(tenfold, 10 * once, rtol=1e-4, atol=1e-5)


def test_one_scale_serves_all_heads():
    layer = QKNormAttention("rms")
    layer.build(*[(None, 5, 6, 4)] * 3)
    assert [tuple(w.shape) for w in layer.weights] == [(4,), (4,)]


def test_no_logit_passes_the_bound(randomize):
    layer = QKNormAttention("rms")
    heads = random_heads(tokens=40, head_dim=4, scale=1e4)
    layer.build(heads.shape, heads.shape, heads.shape)
    randomize(layer)
    scales = [ops.convert_to_numpy(w) for w in layer.weights]
    bound = np.sqrt(4) * np.abs(scales[0] * scales[1]).max()
    largest = layer(heads, heads, heads, return_attention=True)[1].largest_logit
    assert (ops.convert_to_numpy(largest) <= bound).all()
    # A query and a key along the dimension with the largest scales reach it.
    along = np.zeros((1, 1, 1, 4), "float32")
    best = np.abs(scales[0] * scales[1]).argmax()
    along[..., best] = 1e3 * np.sign(scales[0][best])
    key = np.abs(along) * np.sign(scales[1][best])
    maps = layer(along, key, key, return_attention=True)[1]
    assert float(maps.largest_logit[0, 0]) == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("return_attention", [False, True])
def test_huge_logits_stay_finite_in_half_precision(policy, return_attention):
    # A logit of 200 * 200 * 4 / 2 = 80,000 is beyond float16.
    query = np.full((1, 1, 1, 4), 200.0)
    key = np.stack([query[0, 0], -query[0, 0], 0.5 * query[0, 0]])[None]
    value = random_heads(3, heads=1)[:1]
    layer = QKNormAttention(None, dtype=policy)
    output = layer(query, key, value, return_attention=return_attention)
    if return_attention:
        output, maps = output
        assert float(maps.largest_logit[0, 0]) == pytest.approx(80_000)
        assert all(keras.backend.is_float_dtype(m.dtype) for m in maps)
        assert {keras.backend.standardize_dtype(m.dtype) for m in maps} == {
            "float32"
        }
    output = ops.convert_to_numpy(ops.cast(output, "float32"))
    np.testing.assert_allclose(output[0, 0], value[0, 0], atol=0.01)


@pytest.mark.parametrize("kind", [True, "statistics"])
def test_symbolic_maps_have_the_shapes_of_real_ones(kind):
    layer = QKNormAttention()
    query, key = random_heads(5), random_heads(7)
    real = layer(query, key, key, return_attention=kind)
    symbolic = layer(
        *(keras.KerasTensor(x.shape) for x in (query, key, key)),
        return_attention=kind,
    )
    assert [tuple(x.shape) for x in keras.tree.flatten(symbolic)] == [
        tuple(x.shape) for x in keras.tree.flatten(real)
    ]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("qk_norm", ["rms", "layer", None])
def test_statistics_are_those_of_the_maps(qk_norm, chunk, monkeypatch):
    monkeypatch.setattr(qk_norm_attention, "CHUNK", chunk)
    generator = np.random.default_rng(3)
    query, key, value = generator.normal(size=(3, 2, 5, 4, 8)) * 3
    layer = QKNormAttention(qk_norm)
    output, statistics = layer(query, key, value, return_attention="statistics")
    wanted, maps = layer(query, key, value, return_attention=True)
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    entropies = ops.convert_to_numpy(maps.entropy)
    largest = ops.convert_to_numpy(maps.largest_logit)
    norms = [np.linalg.norm(x, axis=-1).mean((0, 1)) for x in (query, key)]
    for found, expected in zip(
        statistics,
        (entropies.mean((0, 2)), entropies.min((0, 2)), largest.max(0), *norms),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_norm_is_named():
    with pytest.raises(ValueError, match="qk_norm must be 'rms', 'layer' or N"):
        QKNormAttention("batch")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("return_attention", [True, False])
def test_logits_are_not_rounded_in_half_precision(policy, return_attention):
    # Logits 512, 512.5 and 513.5: bfloat16 has steps of 4 there, and so
    # would weigh the three keys alike.
    query = np.array([[[[16.0, 16.0, 1.0, 1.0]]]])
    steps = [0.0, 0.5, 1.5]
    key = np.array([[[[32.0, 32.0, 2 * step, 0.0]] for step in steps]])
    value = np.eye(3, 4)[None, :, None]
    layer = QKNormAttention(None, dtype=policy)
    output = layer(query, key, value, return_attention=return_attention)
    output = output[0] if return_attention else output
    output = ops.convert_to_numpy(ops.cast(output, "float32"))[0, 0, 0, :3]
    weights = np.exp(steps) / np.exp(steps).sum()
    np.testing.assert_allclose(output, weights, atol=0.01)
