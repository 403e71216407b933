"""The schedule equals its formula, step by step."""

import math

import keras
import numpy as np
import pytest

from keras_vit22b.training import ReciprocalSquareRoot


def rate(step, peak, warmup, timescale, total=None, cooldown=0):
    """The formula, in double precision."""
    value = peak
    if step >= warmup:
        value /= math.sqrt(1 + (step - warmup) / timescale)
    if warmup:
        value *= min(1, step / warmup)
    if cooldown:
        value *= min(1, max(total - step, 0) / cooldown)
    return value


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 100, "timescale": 50},
        {"warmup_steps": 0, "timescale": 10},
        {
            "warmup_steps": 100,
            "timescale": 200,
            "total_steps": 1000,
            "cooldown_steps": 300,
        },
    ],
)
def test_a_thousand_steps_are_those_of_the_formula(settings):
    schedule = ReciprocalSquareRoot(1e-3, **settings)
    wanted = [
        rate(
            step,
            1e-3,
            settings["warmup_steps"],
            settings["timescale"],
            settings.get("total_steps"),
            settings.get("cooldown_steps", 0),
        )
        for step in range(1001)
    ]
    found = [float(schedule(step)) for step in range(1001)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-12)


def test_the_papers_rates():
    schedule = ReciprocalSquareRoot(
        1e-3, total_steps=177_000, cooldown_steps=30_000
    )
    assert float(schedule(5_000)) == pytest.approx(5e-4)
    assert float(schedule(10_000)) == pytest.approx(1e-3)
    assert float(schedule(40_000)) == pytest.approx(5e-4)
    # 1 / sqrt(14.7) when the cooldown begins, and half of 1 / sqrt(16.2).
    assert float(schedule(147_000)) == pytest.approx(1e-3 / math.sqrt(14.7))
    half = 0.5e-3 / math.sqrt(16.2)
    assert float(schedule(162_000)) == pytest.approx(half)
    assert float(schedule(177_000)) == 0.0
    assert float(schedule(200_000)) == 0.0


def test_a_cooldown_starts_at_any_checkpoint():
    endless = ReciprocalSquareRoot(1e-3, warmup_steps=10, timescale=100)
    cooled = endless.cool_down(start=500, steps=100)
    for step in (0, 5, 10, 499, 500):
        assert float(cooled(step)) == float(endless(step))
    assert float(cooled(550)) == pytest.approx(0.5 * float(endless(550)))
    assert float(cooled(600)) == 0.0


def test_it_is_saved_and_loaded():
    schedule = ReciprocalSquareRoot(
        2e-3, warmup_steps=3, total_steps=9, cooldown_steps=2
    )
    optimizer = keras.optimizers.SGD(schedule)
    config = keras.optimizers.serialize(optimizer)
    loaded = keras.optimizers.deserialize(config)
    assert loaded._learning_rate.get_config() == schedule.get_config()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"cooldown_steps": 10}, "needs total_steps"),
        ({"total_steps": 10_005, "cooldown_steps": 10}, "do not fit"),
        ({"timescale": 0}, "timescale must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
    ],
)
def test_wrong_settings_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        ReciprocalSquareRoot(**{"learning_rate": 1e-3, **settings})
