"""What holds for the parallel block, the sequential one, and both."""

import keras
import numpy as np
import pytest
from keras import ops
from reference import gelu

from keras_vit22b.layers import ParallelBlock
from keras_vit22b.layers import QKNormAttention
from keras_vit22b.layers import SequentialBlock

BOTH = pytest.mark.parametrize("block_class", [ParallelBlock, SequentialBlock])
WIDTH, HEADS, MLP = 8, 2, 24


@pytest.fixture
def tokens():
    return np.random.default_rng(3).normal(size=(6, 5, WIDTH)).astype("float32")


@pytest.fixture
def make_block(randomize):
    def make(block_class, **options):
        block = block_class(WIDTH, HEADS, MLP, **options)
        block.build((None, 5, WIDTH))
        randomize(block)
        return block

    return make


def query_key_kernel(block):
    """Return the layer whose kernel starts with queries and keys."""
    parallel = isinstance(block, ParallelBlock)
    return block.in_projection if parallel else block.qkv_projection


# === The parallel block ===


def test_parallel_adds_attention_and_mlp_to_the_input():
    # The lesson's numbers: z = (2, 3), LN(z) = (1, -1) is given (a scale of
    # -1 makes it so), a = (0.4, 0.2), m = (-0.1, 0.5).
    block = ParallelBlock(2, num_heads=1, mlp_dim=2, norm="layer")
    z = np.array([[[2.0, 3.0]]], "float32")
    block.build(z.shape)
    block.norm.gamma.assign([-1.0, -1.0])
    np.testing.assert_allclose(block.norm(z)[0, 0], (1, -1), atol=1e-5)
    into, out = np.zeros((2, 1, 8)), np.zeros((1, 4, 2))
    # One token attends to itself, so attention gives its value: u_0 (.4, .2).
    into[0, 0, 4:6] = 0.4, 0.2
    out[0, :2] = np.eye(2)
    # The MLP's first unit is gelu(u_0) = gelu(1).
    into[0, 0, 6] = 1.0
    out[0, 2] = np.array((-0.1, 0.5)) / gelu(1.0, "gelu_tanh")
    block.in_projection.kernel.assign(into)
    block.out_projection.kernel.assign(out)
    block.mlp_bias.assign(np.zeros((1, 2)))
    np.testing.assert_allclose(block(z)[0, 0], (2.3, 3.7), atol=1e-5)


def test_parallel_equals_its_two_branches(make_block, tokens):
    block = make_block(ParallelBlock, use_qkv_bias=True)
    head_dim, split = WIDTH // HEADS, 3 * WIDTH // HEADS
    into = ops.convert_to_numpy(block.in_projection.kernel)
    out = ops.convert_to_numpy(block.out_projection.kernel)
    qkv_bias = ops.convert_to_numpy(block.qkv_bias)
    mlp_bias = ops.convert_to_numpy(block.mlp_bias)
    normed = ops.convert_to_numpy(block.norm(tokens))

    attention = QKNormAttention()
    qkv = np.einsum("btd,dhf->bthf", normed, into[..., :split]) + qkv_bias
    attention.build(*[(None, 5, HEADS, head_dim)] * 3)
    for ours, theirs in zip(attention.weights, block.attention.weights):
        ours.assign(theirs)
    attended = ops.convert_to_numpy(attention(*np.split(qkv, 3, -1)))
    attention_branch = attended.reshape(6, 5, WIDTH) @ out[
        :, :head_dim
    ].reshape(WIDTH, WIDTH)
    mlp_in = into[..., split:].reshape(WIDTH, MLP)
    mlp_out = out[:, head_dim:].reshape(MLP, WIDTH)
    hidden = gelu(normed @ mlp_in + mlp_bias.reshape(MLP), "gelu_tanh")
    mlp_branch = hidden @ mlp_out + ops.convert_to_numpy(
        block.out_projection.bias
    )
    np.testing.assert_allclose(
        block(tokens),
        tokens + attention_branch + mlp_branch,
        rtol=1e-5,
        atol=1e-5,
    )


def test_parallel_runs_one_matmul_in_and_one_out(make_block):
    block = make_block(ParallelBlock)
    kernels = [w for w in block.weights if w.name == "kernel"]
    assert [tuple(k.shape) for k in kernels] == [
        (WIDTH, HEADS, 3 * WIDTH // HEADS + MLP // HEADS),
        (HEADS, WIDTH // HEADS + MLP // HEADS, WIDTH),
    ]


# === Both ===


@BOTH
@pytest.mark.parametrize("qk_norm", ["rms", "layer"])
def test_qk_norm_makes_the_scale_of_queries_and_keys_immaterial(
    make_block, tokens, block_class, qk_norm
):
    block = make_block(block_class, qk_norm=qk_norm)
    output, maps = block(tokens, return_attention=True)
    scale_queries_and_keys(block, 1000)
    scaled_output, scaled_maps = block(tokens, return_attention=True)
    np.testing.assert_allclose(scaled_output, output, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scaled_maps.entropy, maps.entropy, atol=1e-4)


@BOTH
def test_without_qk_norm_entropy_collapses_as_the_weights_grow(
    make_block, tokens, block_class
):
    block = make_block(block_class, qk_norm=None)
    healthy = block(tokens, return_attention=True)[1].entropy
    scale_queries_and_keys(block, 1000)
    collapsed = block(tokens, return_attention=True)[1].entropy
    assert ops.mean(healthy) > 0.3
    assert ops.max(collapsed) < 1e-3


def scale_queries_and_keys(block, factor):
    layer = query_key_kernel(block)
    kernel = np.array(ops.convert_to_numpy(layer.kernel))
    kernel[..., : 2 * WIDTH // HEADS] *= factor
    layer.kernel.assign(kernel)


@BOTH
def test_asking_for_attention_does_not_change_the_output(
    make_block, tokens, block_class
):
    block = make_block(block_class)
    output, maps = block(tokens, return_attention=True)
    np.testing.assert_allclose(block(tokens), output, rtol=1e-5, atol=1e-5)
    assert tuple(maps.weights.shape) == (6, HEADS, 5, 5)
    np.testing.assert_allclose(ops.sum(maps.weights, -1), 1, atol=1e-5)


@BOTH
def test_symbolic_call_gives_attention_too(make_block, tokens, block_class):
    block = make_block(block_class)
    inputs = keras.Input((5, WIDTH))
    outputs, maps = block(inputs, return_attention=True)
    model = keras.Model(inputs, [outputs, maps.entropy])
    expected = block(tokens, return_attention=True)[1].entropy
    np.testing.assert_allclose(
        model.predict(tokens, verbose=0)[1], expected, atol=1e-5
    )


@BOTH
def test_a_layer_scale_of_zero_leaves_the_input(tokens, block_class):
    block = block_class(WIDTH, HEADS, MLP, layer_scale=0.0)
    np.testing.assert_array_equal(block(tokens), tokens)


@BOTH
def test_each_branch_starts_as_if_unfused(block_class):
    width, heads, mlp = 64, 4, 256
    head_dim, share = width // heads, mlp // heads
    block = block_class(width, heads, mlp)
    block.build((None, 5, width))
    square, oblong = (width, width), (width, mlp)
    branches = [
        (query_key_kernel(block).kernel[..., i * head_dim :][..., :head_dim],)
        + square
        for i in range(3)
    ]
    if block_class is ParallelBlock:
        into, out = block.in_projection.kernel, block.out_projection.kernel
        assert tuple(into.shape) == (width, heads, 3 * head_dim + share)
        branches += [
            (into[..., 3 * head_dim :], *oblong),
            (out[:, :head_dim], *square),
            (out[:, head_dim:], *oblong),
        ]
    else:
        branches += [
            (block.attention_out.kernel, *square),
            (block.mlp_in.kernel, *oblong),
            (block.mlp_out.kernel, *oblong),
        ]
    for kernel, fan_in, fan_out in branches:
        kernel = ops.convert_to_numpy(kernel)
        limit = np.sqrt(6 / (fan_in + fan_out))
        # Uniform in +-limit: the variance is 2 / (fan_in + fan_out).
        assert kernel.size == fan_in * fan_out
        assert limit * 0.99 < np.abs(kernel).max() <= limit
        assert kernel.var() == pytest.approx(limit**2 / 3, rel=0.05)


@BOTH
def test_biases_start_near_zero_and_scales_at_one(block_class):
    block = block_class(WIDTH, HEADS, MLP, use_qkv_bias=True, norm="layer")
    block.build((None, 5, WIDTH))
    for weight in block.weights:
        value = ops.convert_to_numpy(weight.value)
        if weight.name in ("gamma", "scale"):
            np.testing.assert_array_equal(value, 1)
        elif weight.name != "kernel":
            assert np.abs(value).max() < 1e-5, weight.path


# === Dropout, stochastic depth, rematerialization ===


@BOTH
def test_nothing_is_dropped_at_inference(make_block, tokens, block_class):
    plain = make_block(block_class)
    dropping = make_block(block_class, dropout_rate=0.5, drop_path_rate=0.5)
    np.testing.assert_array_equal(dropping(tokens), plain(tokens))
    np.testing.assert_array_equal(
        dropping(tokens, training=False), plain(tokens)
    )


def test_drop_path_skips_whole_samples(make_block, tokens):
    block = make_block(ParallelBlock, drop_path_rate=0.5)
    tokens = np.repeat(tokens, 8, axis=0)
    branches = ops.convert_to_numpy(block(tokens)) - tokens
    dropped = ops.convert_to_numpy(block(tokens, training=True)) - tokens
    skipped = np.array([not d.any() for d in dropped])
    assert 0.25 < skipped.mean() < 0.75
    # The others make up for them, so that the expectation stays.
    np.testing.assert_allclose(
        dropped[~skipped], 2 * branches[~skipped], rtol=1e-3, atol=1e-4
    )


def test_sequential_drop_path_skips_each_branch_on_its_own(make_block, tokens):
    block = make_block(SequentialBlock, drop_path_rate=0.5)
    tokens = np.repeat(tokens[:1], 64, axis=0)
    outputs = ops.convert_to_numpy(block(tokens, training=True))
    kinds = {o.round(3).tobytes() for o in outputs}
    assert len(kinds) == 4
    assert tokens[0].round(3).tobytes() in kinds


@BOTH
def test_dropout_differs_from_call_to_call(make_block, tokens, block_class):
    block = make_block(block_class, dropout_rate=0.5)
    once = ops.convert_to_numpy(block(tokens, training=True))
    again = ops.convert_to_numpy(block(tokens, training=True))
    assert np.abs(once - again).max() > 0.01


@BOTH
def test_remat_trains_as_without_it(block_class, tokens, monkeypatch, arrays):
    """Also with dropout: the backward pass drops the same units."""
    recomputed = []
    remat = keras.remat
    monkeypatch.setattr(
        keras, "remat", lambda f: recomputed.append(f) or remat(f)
    )

    def train(remat):
        keras.utils.set_random_seed(5)
        block = block_class(
            WIDTH, HEADS, MLP, dropout_rate=0.3, drop_path_rate=0.3, remat=remat
        )
        model = keras.Sequential([keras.Input((5, WIDTH)), block])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        losses = model.fit(
            tokens, tokens[::-1], batch_size=3, epochs=2, verbose=0
        ).history["loss"]
        return losses, arrays(block)

    losses, weights = train(remat=False)
    assert not recomputed
    remat_losses, remat_weights = train(remat=True)
    assert recomputed
    np.testing.assert_allclose(remat_losses, losses, rtol=1e-5)
    for ours, theirs in zip(remat_weights, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# === Bad input ===


@BOTH
@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_heads": 3},
            "hidden_dim 8 does not divide by num_heads 3.* 6 an",
        ),
        ({"mlp_dim": 25}, "mlp_dim 25 does not divide by num_heads 2.* 24 and"),
        ({"num_heads": 0}, "must be positive"),
        ({"norm": "batch"}, "norm must be 'rms' or 'layer'. Received: 'batch'"),
        ({"qk_norm": "l2"}, "qk_norm must be .* or None. Received: 'l2'"),
        ({"activation": "relu"}, "activation must be 'gelu_tanh' or 'gelu'"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\)"),
        ({"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\)"),
    ],
)
def test_bad_options_are_named(block_class, options, message):
    sizes = {"hidden_dim": WIDTH, "num_heads": HEADS, "mlp_dim": MLP}
    with pytest.raises(ValueError, match=message):
        block_class(**sizes | options)
