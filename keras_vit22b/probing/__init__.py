"""Frozen features in, probes out."""

from keras_vit22b.models.image_folder import ImageFolder
from keras_vit22b.probing.features import extract_features
from keras_vit22b.probing.few_shot import FewShot
from keras_vit22b.probing.few_shot import plot_few_shot
from keras_vit22b.probing.few_shot_report import card_metrics
from keras_vit22b.probing.linear_probe import LinearProbe

__all__ = [
    "FewShot",
    "ImageFolder",
    "LinearProbe",
    "card_metrics",
    "extract_features",
    "plot_few_shot",
]
