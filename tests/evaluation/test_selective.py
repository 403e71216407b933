"""Abstaining and detecting, on cases that are worked out by hand."""

import numpy as np
import pytest

from keras_vit22b.evaluation import Mahalanobis
from keras_vit22b.evaluation import area_under_risk_coverage
from keras_vit22b.evaluation import detection
from keras_vit22b.evaluation import risk_coverage

pytestmark = pytest.mark.any_backend


def test_risk_is_the_error_of_those_accepted():
    confidence = [0.9, 0.2, 0.7, 0.4]
    correct = [True, False, False, True]
    coverage, risk = risk_coverage(confidence, correct)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    area = area_under_risk_coverage(confidence, correct)
    assert area == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)


def test_who_is_always_as_sure_has_the_error_everywhere():
    """Whatever the order of the images."""
    for correct in ([True, True, False, False], [False, False, True, True]):
        assert area_under_risk_coverage([0.5] * 4, correct) == 0.5


def test_detection_counts_pairs():
    inside, outside = [3.0, 2.0, 1.0], [2.0, 0.0]
    found = detection(inside, outside)
    # Of six pairs four are right and one is a tie.
    assert found["auroc"] == pytest.approx(4.5 / 6)
    # All three are needed for 95 %, so the threshold is 1.
    assert found["fpr95"] == 0.5
    many = np.arange(100.0)
    assert detection(many, [4.0, 5.0, 6.0])["fpr95"] == pytest.approx(2 / 3)


def test_distances_are_in_the_classes_own_covariance():
    generator = np.random.default_rng(0)
    labels = np.arange(400) % 2
    spread = np.array([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.0, 0.1]])
    centers = np.array([[0.0, 0.0, 0.0], [5.0, 5.0, 0.0]])
    features = centers[labels] + generator.normal(size=(400, 3)) @ spread
    score = Mahalanobis(shrinkage=0.0).fit(features, labels)
    means = np.stack([features[labels == k].mean(0) for k in (0, 1)])
    covariance = np.cov((features - means[labels]).T, bias=True)
    inverse = np.linalg.inv(covariance)
    others = generator.normal(size=(7, 3)).astype("float32") * 3
    for row, found in zip(others, score(others)):
        distances = [(row - m) @ inverse @ (row - m) for m in means]
        assert found == pytest.approx(-min(distances), rel=1e-4)
    # Far along the narrow axis is far, along the wide one it is not.
    near, far = score(np.array([[3.0, 0, 0], [0, 0, 3.0]], "float32"))
    assert near > far


def test_wrong_arrays_are_errors():
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        risk_coverage([1, 2], [True] * 3)
    with pytest.raises(ValueError, match="must be finite"):
        risk_coverage([np.nan], [True])
    with pytest.raises(ValueError, match="none of them NaN"):
        detection([1.0], [np.nan])
    with pytest.raises(ValueError, match="of 0 to 1. Received: 2"):
        Mahalanobis(shrinkage=2)
