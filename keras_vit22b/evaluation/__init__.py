"""Reliability, human alignment and fairness, from arrays of any model."""

from keras_vit22b.evaluation.bootstrap import Bootstrap
from keras_vit22b.evaluation.calibration import CalibrationError
from keras_vit22b.evaluation.calibration import TemperatureScaling
from keras_vit22b.evaluation.calibration import brier_score
from keras_vit22b.evaluation.calibration import negative_log_likelihood
from keras_vit22b.evaluation.calibration import scale_logits
from keras_vit22b.evaluation.fairness import group_report
from keras_vit22b.evaluation.human_alignment import accuracy_difference
from keras_vit22b.evaluation.human_alignment import error_consistency
from keras_vit22b.evaluation.human_alignment import shape_bias
from keras_vit22b.evaluation.human_alignment import sixteen_class_names
from keras_vit22b.evaluation.human_alignment import sixteen_class_probabilities
from keras_vit22b.evaluation.responses import Responses
from keras_vit22b.evaluation.responses import compare
from keras_vit22b.evaluation.responses import read_responses
from keras_vit22b.evaluation.responses import write_responses
from keras_vit22b.evaluation.selective import Mahalanobis
from keras_vit22b.evaluation.selective import area_under_risk_coverage
from keras_vit22b.evaluation.selective import detection
from keras_vit22b.evaluation.selective import risk_coverage

__all__ = [
    "Bootstrap",
    "CalibrationError",
    "Mahalanobis",
    "Responses",
    "TemperatureScaling",
    "accuracy_difference",
    "area_under_risk_coverage",
    "brier_score",
    "compare",
    "detection",
    "error_consistency",
    "group_report",
    "negative_log_likelihood",
    "read_responses",
    "risk_coverage",
    "scale_logits",
    "shape_bias",
    "sixteen_class_names",
    "sixteen_class_probabilities",
    "write_responses",
]
