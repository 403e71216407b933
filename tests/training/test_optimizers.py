"""Optimizers equal their equations, computed here in double precision."""

import contextlib

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_vit22b.training import SGD
from keras_vit22b.training import AdamW
from keras_vit22b.training import ReciprocalSquareRoot
from keras_vit22b.training import ScalingAdafactor
from keras_vit22b.training import WeightDecay
from keras_vit22b.training.optimizers import matrix_view

# Path to shape, and the matrix as which a weight is factored.
WEIGHTS = {
    "head/kernel": ((6, 4), None),
    "head/bias": ((4,), None),
    "block_0/in_projection/kernel": ((6, 2, 5), (6, 10)),
    "block_0/out_projection/kernel": ((2, 4, 6), (8, 6)),
    "block_0/norm/scale": ((6,), None),
}
LEAST = 5
DECAY = WeightDecay(head=3.0, body=0.03)


def decay_of(path):
    if path == "head/kernel":
        return 3.0
    return 0.03 if path.endswith("kernel") else 0.0


def variables(values):
    found = []
    for path, value in values.items():
        *scopes, name = path.split("/")
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            found.append(keras.Variable(value, name=name))
    assert [v.path for v in found] == list(values)
    return found


def start():
    generator = np.random.default_rng(0)
    return {
        path: generator.normal(size=shape)
        for path, (shape, _) in WEIGHTS.items()
    }


def gradients(step):
    generator = np.random.default_rng([1, step])
    return {
        path: generator.normal(scale=1 + step % 7, size=shape)
        for path, (shape, _) in WEIGHTS.items()
    }


def compiled(optimizer, weights):
    """Return `optimizer.apply` of gradients, compiled where that is quicker."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda given: optimizer.apply(given, weights))
    if keras.config.backend() != "jax":
        return lambda given: optimizer.apply(given, weights)
    import jax

    step = jax.jit(optimizer.stateless_apply)

    def apply(given):
        state = [v.value for v in optimizer.variables]
        values, state = step(state, given, [w.value for w in weights])
        for variable, value in zip(
            [*weights, *optimizer.variables], [*values, *state]
        ):
            variable.assign(value)

    return apply


def run(optimizer, steps):
    weights = variables(start())
    optimizer.build(weights)
    apply = compiled(optimizer, weights)
    for step in range(steps):
        apply(
            [
                keras.ops.convert_to_tensor(g.astype("float32"))
                for g in gradients(step).values()
            ]
        )
    return {v.path: keras.ops.convert_to_numpy(v.value) for v in weights}


def rate(step):
    return 1e-2 / np.sqrt(1 + max(step - 50, 0) / 100) * min(1, step / 50)


SCHEDULE = {"learning_rate": 1e-2, "warmup_steps": 50, "timescale": 100}


def adafactor(steps, momentum_dtype, cap=0.999):
    """Zhai et al., 2022, section 3.5, from its equations."""
    weights, states = start(), {}
    for step in range(steps):
        beta = min(cap, 1 - (step + 1.0) ** -0.8)
        for path, gradient in gradients(step).items():
            shape, view = WEIGHTS[path]
            gradient = gradient.astype("float32").astype("float64")
            square = gradient**2 + 1e-30
            state = states.setdefault(
                path, {"v": 0.0, "r": 0.0, "c": 0.0, "m": np.zeros(shape)}
            )
            if view is None:
                state["v"] = v = beta * state["v"] + (1 - beta) * square
            else:
                square = square.reshape(view)
                state["r"] = beta * state["r"] + (1 - beta) * square.mean(1)
                state["c"] = beta * state["c"] + (1 - beta) * square.mean(0)
                v = np.outer(state["r"], state["c"]) / state["r"].mean()
                v = v.reshape(shape)
            m = 0.9 * state["m"] + 0.1 * gradient / np.sqrt(v)
            state["m"] = m.astype(momentum_dtype).astype("float64")
            weights[path] = weights[path] - rate(step) * (
                m + decay_of(path) * weights[path]
            )
    return weights


@pytest.mark.parametrize(
    "momentum_dtype, tolerance",
    [("float32", 2e-5), ("bfloat16", 2e-3)],
)
def test_adafactor_is_its_equations_over_a_thousand_steps(
    momentum_dtype, tolerance
):
    optimizer = ScalingAdafactor(
        ReciprocalSquareRoot(**SCHEDULE),
        DECAY,
        momentum_dtype=momentum_dtype,
        min_factored_dim=LEAST,
    )
    found = run(optimizer, 1000)
    numpy_dtype = {"float32": "float32", "bfloat16": ml_dtypes.bfloat16}
    wanted = adafactor(1000, numpy_dtype[momentum_dtype])
    for path, value in wanted.items():
        np.testing.assert_allclose(
            found[path], value, atol=tolerance, err_msg=path
        )


def test_the_decay_of_squares_has_a_cap():
    """That of 0.999 binds after 5,623 steps; this one after 17."""
    optimizer = ScalingAdafactor(
        ReciprocalSquareRoot(**SCHEDULE),
        DECAY,
        beta_2_cap=0.9,
        momentum_dtype="float32",
        min_factored_dim=LEAST,
    )
    found = run(optimizer, 100)
    wanted = adafactor(100, "float32", cap=0.9)
    without = adafactor(100, "float32", cap=1.0)
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, atol=2e-5)
        assert np.abs(value - without[path]).max() > 1e-3
    assert ScalingAdafactor().beta_2_cap == 0.999


def test_adamw_is_its_equations_over_a_thousand_steps():
    optimizer = AdamW(ReciprocalSquareRoot(**SCHEDULE), weight_decay=DECAY)
    found = run(optimizer, 1000)
    weights = start()
    m = {path: 0.0 for path in weights}
    v = {path: 0.0 for path in weights}
    for step in range(1000):
        t = step + 1
        for path, g in gradients(step).items():
            m[path] = 0.9 * m[path] + 0.1 * g
            v[path] = 0.999 * v[path] + 0.001 * g**2
            update = m[path] / (1 - 0.9**t)
            # Keras adds epsilon to the root before it is debiased.
            correction = np.sqrt(1 - 0.999**t)
            update = update * correction / (np.sqrt(v[path]) + 1e-7)
            weights[path] = weights[path] - rate(step) * (
                update + decay_of(path) * weights[path]
            )
    for path, value in weights.items():
        np.testing.assert_allclose(found[path], value, atol=5e-5, err_msg=path)


def test_with_one_decay_for_all_adamw_is_keras_own():
    decay = WeightDecay(others=((".*", 0.1),))
    found = run(AdamW(1e-2, weight_decay=decay), 20)
    wanted = run(keras.optimizers.AdamW(1e-2, weight_decay=0.1), 20)
    for path, value in wanted.items():
        np.testing.assert_allclose(found[path], value, atol=1e-6)


def test_sgd_decays_by_name():
    found = run(SGD(0.1, weight_decay=DECAY), 1)
    for path, value in start().items():
        wanted = value - 0.1 * (gradients(0)[path] + decay_of(path) * value)
        np.testing.assert_allclose(found[path], wanted, atol=1e-5)


def test_kernels_are_factored_as_matrices():
    assert matrix_view("block_3/in_projection/kernel", (64, 2, 96), 32) == (
        64,
        192,
    )
    assert matrix_view("pooling/key/kernel", (64, 2, 32), 32) == (64, 64)
    assert matrix_view("block_3/out_projection/kernel", (2, 96, 64), 32) == (
        192,
        64,
    )
    assert matrix_view("head/kernel", (64, 10), 32) is None
    assert matrix_view("block_3/norm/scale", (64,), 32) is None


def test_adafactor_keeps_few_bytes():
    """A kernel's momentum in two bytes, and its rows and columns."""
    (kernel,) = variables(
        {"block_0/in_projection/kernel": np.zeros((64, 2, 96))}
    )
    optimizer = ScalingAdafactor(1e-3)
    optimizer.build([kernel])
    slots = {
        v.path.rpartition("kernel_")[2]: (tuple(v.shape), v.dtype)
        for v in optimizer.variables
        if "kernel" in v.path
    }
    assert slots == {
        "row_square": ((64,), "float32"),
        "column_square": ((192,), "float32"),
        "momentum": ((64, 2, 96), "bfloat16"),
    }


@pytest.mark.parametrize("kind", [AdamW, SGD, ScalingAdafactor])
def test_optimizers_are_saved_and_loaded(kind):
    decay = WeightDecay(head=1.0, body=0.5, others=(("gate", 0.1),))
    optimizer = kind(1e-2, weight_decay=decay, global_clipnorm=1.0)
    loaded = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(loaded) is kind
    assert loaded.decay_by_name == decay
    assert loaded.get_config() == optimizer.get_config()
