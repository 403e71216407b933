"""Recipes, and what makes training survive: instruments and checkpoints."""

from keras_vit22b.training.attention_monitor import AttentionMonitor
from keras_vit22b.training.checkpoints import Checkpoints
from keras_vit22b.training.inception_crop import InceptionCrop
from keras_vit22b.training.losses import SigmoidCrossEntropy
from keras_vit22b.training.optimizers import SGD
from keras_vit22b.training.optimizers import AdamW
from keras_vit22b.training.optimizers import ScalingAdafactor
from keras_vit22b.training.recipe import RECIPES
from keras_vit22b.training.recipe import Recipe
from keras_vit22b.training.schedule import ReciprocalSquareRoot
from keras_vit22b.training.training_data import TrainingData
from keras_vit22b.training.training_log import TrainingLog
from keras_vit22b.training.training_run import train
from keras_vit22b.training.weight_decay import WeightDecay

__all__ = [
    "RECIPES",
    "SGD",
    "AdamW",
    "AttentionMonitor",
    "Checkpoints",
    "InceptionCrop",
    "ReciprocalSquareRoot",
    "Recipe",
    "ScalingAdafactor",
    "SigmoidCrossEntropy",
    "TrainingData",
    "TrainingLog",
    "WeightDecay",
    "train",
]
