"""Reliability of classifiers, from plain arrays of any model."""

from keras_vit22b.evaluation.calibration import CalibrationError
from keras_vit22b.evaluation.calibration import TemperatureScaling
from keras_vit22b.evaluation.calibration import brier_score
from keras_vit22b.evaluation.calibration import negative_log_likelihood
from keras_vit22b.evaluation.calibration import scale_logits
from keras_vit22b.evaluation.selective import Mahalanobis
from keras_vit22b.evaluation.selective import area_under_risk_coverage
from keras_vit22b.evaluation.selective import detection
from keras_vit22b.evaluation.selective import risk_coverage

__all__ = [
    "CalibrationError",
    "Mahalanobis",
    "TemperatureScaling",
    "area_under_risk_coverage",
    "brier_score",
    "detection",
    "negative_log_likelihood",
    "risk_coverage",
    "scale_logits",
]
