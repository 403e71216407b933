"""Errors of calibration on cases that are worked out by hand."""

import numpy as np
import pytest

from keras_vit22b.evaluation import CalibrationError
from keras_vit22b.evaluation import TemperatureScaling
from keras_vit22b.evaluation import brier_score
from keras_vit22b.evaluation import negative_log_likelihood
from keras_vit22b.evaluation import scale_logits

pytestmark = pytest.mark.any_backend


def two_classes(confidences):
    confidences = np.asarray(confidences, float)
    return np.stack([confidences, 1 - confidences], axis=1)


def test_one_who_is_as_often_right_as_said_has_no_error():
    """Ten at 0.8, of whom eight are right; ten at 0.6, of whom six are."""
    probabilities = two_classes([0.8] * 10 + [0.6] * 10)
    labels = np.array([0] * 8 + [1] * 2 + [0] * 6 + [1] * 4)
    for options in ({}, {"binning": "mass", "bins": 2}, {"order": 2}):
        error = CalibrationError(**options)(probabilities, labels)
        assert error == pytest.approx(0, abs=1e-12)


def test_a_constant_predictor_is_wrong_by_its_excess():
    """Always 0.9, right 7 times of 10."""
    probabilities = two_classes([0.9] * 10)
    labels = np.array([0] * 7 + [1] * 3)
    for options in ({}, {"binning": "mass"}, {"order": 2, "bins": 1}):
        if options.get("binning") == "mass":
            options["bins"] = 1
        error = CalibrationError(**options)(probabilities, labels)
        assert error == pytest.approx(0.2)
    # 0.04 less 0.7 * 0.3 / 9.
    debiased = CalibrationError(1, order=2, debias=True)
    expected = np.sqrt(0.04 - 0.21 / 9)
    assert debiased(probabilities, labels) == pytest.approx(expected)


def test_bins_are_weighted_by_images():
    """Three at 0.55, one right; one at 0.95, right: gaps 0.2167 and 0.05."""
    probabilities = two_classes([0.55, 0.55, 0.55, 0.95])
    labels = np.array([0, 1, 1, 0])
    error = CalibrationError(10)(probabilities, labels)
    assert error == pytest.approx((3 * (0.55 - 1 / 3) + 0.05) / 4)
    table = CalibrationError(10).table(probabilities, labels)
    assert [row["images"] for row in table] == [3, 1]
    assert (table[0]["low"], table[0]["high"]) == (0.5, 0.6)


def test_bins_are_open_on_the_left():
    table = CalibrationError(2).table(two_classes([0.5, 1.0]), [0, 0])
    assert [row["images"] for row in table] == [1, 1]


def test_debiasing_takes_off_what_noise_adds():
    """Calibrated by construction: what is left is noise of accuracies."""
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.5, 1, 3000)
    labels = (generator.random(3000) > confidence).astype(int)
    options = {"bins": 50, "binning": "mass", "order": 2}
    plain = CalibrationError(**options)(two_classes(confidence), labels)
    debiased = CalibrationError(**options, debias=True)
    assert debiased(two_classes(confidence), labels) < 0.5 * plain


def test_losses_are_sklearns():
    from sklearn.metrics import log_loss

    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(4), 50)
    labels = generator.integers(0, 4, 50)
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(
        log_loss(labels, probabilities, labels=range(4))
    )
    one_hot = np.eye(4)[labels]
    expected = ((probabilities - one_hot) ** 2).sum(1).mean()
    assert brier_score(probabilities, labels) == pytest.approx(expected)
    assert brier_score([[0.0, 1.0]], [0]) == 2
    assert negative_log_likelihood([[0.0, 1.0]], [0]) == np.inf


def test_the_temperature_that_made_logits_is_found():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(20_000, 5)) * 3
    probabilities = scale_logits(logits)
    draws = generator.random((len(logits), 1))
    labels = (probabilities.cumsum(1) < draws).sum(1)
    for factor in (0.5, 1.0, 4.0):
        found = TemperatureScaling().fit(factor * logits, labels)
        assert found == pytest.approx(factor, rel=0.03)
    # No other is better.
    scaled = scale_logits(
        4 * logits, TemperatureScaling().fit(4 * logits, labels)
    )
    best = negative_log_likelihood(scaled, labels)
    for temperature in (3.9, 4.1):
        other = scale_logits(4 * logits, temperature)
        assert negative_log_likelihood(other, labels) >= best - 1e-6


@pytest.mark.parametrize(
    "probabilities, labels, message",
    [
        (np.ones((2, 3)), [0, 1], "sum of 3 in row 0; of logits, take scale"),
        (two_classes([0.5]), [0, 1], r"shapes \(1, 2\) and \(2,\)"),
        (two_classes([0.5]), [2], "of 0 to 1. Received 2 to 2"),
        (two_classes([0.5]), [0.5], "must be integers"),
        (two_classes([np.nan]), [0], "Row 0 holds NaN"),
    ],
)
def test_what_is_no_probability_is_an_error(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        CalibrationError()(probabilities, labels)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"bins": 0}, "bins must be a positive int"),
        ({"binning": "width "}, "'width' or 'mass'"),
        ({"order": 3}, "order must be 1 or 2"),
        ({"debias": True}, "debias is of order 2"),
    ],
)
def test_wrong_protocols_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        CalibrationError(**wrong)
    with pytest.raises(ValueError, match="least below most"):
        TemperatureScaling(least=2, most=1)
