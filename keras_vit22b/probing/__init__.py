"""Frozen features in, probes out."""

from keras_vit22b.models.image_folder import ImageFolder
from keras_vit22b.probing.feature_store import FeatureStore
from keras_vit22b.probing.features import extract_features
from keras_vit22b.probing.few_shot import FewShot
from keras_vit22b.probing.few_shot import plot_few_shot
from keras_vit22b.probing.few_shot_report import card_metrics
from keras_vit22b.probing.linear_probe import LinearProbe
from keras_vit22b.probing.logistic_probe import LogisticProbe
from keras_vit22b.probing.nearest_neighbors import NearestNeighbors
from keras_vit22b.probing.ridge_probe import RidgeProbe
from keras_vit22b.probing.sgd_probe import SGDProbe
from keras_vit22b.probing.views import Views

__all__ = [
    "FeatureStore",
    "FewShot",
    "ImageFolder",
    "LinearProbe",
    "LogisticProbe",
    "NearestNeighbors",
    "RidgeProbe",
    "SGDProbe",
    "Views",
    "card_metrics",
    "extract_features",
    "plot_few_shot",
]
