"""Groups, gaps and intervals on cases worked out by hand."""

import numpy as np
import pytest

from keras_vit22b.evaluation import Bootstrap
from keras_vit22b.evaluation import group_report

pytestmark = pytest.mark.any_backend


def test_rates_and_gaps_are_counted():
    #            group a: 4 images   group b: 5 images
    labels = [1, 1, 0, 0, 1, 1, 1, 0, 0]
    predictions = [1, 0, 0, 1, 1, 1, 1, 0, 0]
    groups = ["a"] * 4 + ["b"] * 5
    found = group_report(predictions, labels, groups)
    assert found["groups"]["a"] == {
        "images": 4,
        "accuracy": 0.5,
        "positive_rate": 0.5,
        "true_positive_rate": 0.5,
        "false_positive_rate": 0.5,
    }
    assert found["groups"]["b"]["positive_rate"] == 0.6
    assert found["gaps"] == pytest.approx(
        {
            "accuracy": 0.5,
            "demographic_parity": 0.1,
            "equal_opportunity": 0.5,
            "equalised_odds": 0.5,
        }
    )
    assert found["worst_group"] == "a"
    assert found["accuracy"] == pytest.approx(7 / 9)


def test_of_many_classes_one_can_be_positive():
    labels, predictions = ["cat", "dog", "car"], ["cat", "cat", "car"]
    found = group_report(predictions, labels, [0, 0, 1])
    assert "positive_rate" not in found["groups"]["0"]
    assert found["gaps"] == {"accuracy": 0.5}
    found = group_report(predictions, labels, [0, 0, 1], positive="cat")
    assert found["gaps"]["demographic_parity"] == 1
    # There is no cat in group 1.
    assert np.isnan(found["groups"]["1"]["true_positive_rate"])
    assert np.isnan(found["gaps"]["equal_opportunity"])
    with pytest.raises(ValueError, match=r"'cat', 'dog'\]. Received: 'cow'"):
        group_report(predictions, labels, [0, 0, 1], positive="cow")
    with pytest.raises(ValueError, match=r"\(3,\), \(3,\) and \(2,\)"):
        group_report(predictions, labels, [0, 0])


def test_an_interval_is_that_of_the_binomial():
    """400 images, 300 right: 0.75 within 1.96 * sqrt(0.75 * 0.25 / 400)."""
    found = Bootstrap().interval([1] * 300 + [0] * 100)
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert found["mean"] == 0.75
    assert found["low"] == pytest.approx(0.75 - half, abs=0.01)
    assert found["high"] == pytest.approx(0.75 + half, abs=0.01)
    assert Bootstrap().interval([1] * 300 + [0] * 100) == found


def test_two_models_are_compared_on_the_same_images():
    generator = np.random.default_rng(0)
    right = generator.random(500) < 0.8
    better = right.copy()
    better[np.flatnonzero(~right)[:10]] = True
    found = Bootstrap().interval(better, right)
    # Ten images of 500 differ, all one way.
    assert found["mean"] == pytest.approx(0.02)
    assert 0 < found["low"] < 0.02 < found["high"] < 0.04
    with pytest.raises(ValueError, match=r"\(500,\) and \(3,\)"):
        Bootstrap().interval(right, [1, 0, 1])


@pytest.mark.parametrize(
    "wrong, message",
    [({"draws": 0}, "draws must be"), ({"level": 95}, "level must lie")],
)
def test_wrong_protocols_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        Bootstrap(**wrong)
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        Bootstrap().interval([])
