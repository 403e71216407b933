"""Models, on keras-hub's base classes. Importing this registers them."""

from keras_vit22b.models.backbone import ViT22BBackbone
from keras_vit22b.models.image_classifier import ViT22BImageClassifier
from keras_vit22b.models.preprocessing import ViT22BImageClassifierPreprocessor
from keras_vit22b.models.preprocessing import ViT22BImageConverter
from keras_vit22b.models.variants import VARIANTS
from keras_vit22b.models.variants import Variant

__all__ = [
    "VARIANTS",
    "Variant",
    "ViT22BBackbone",
    "ViT22BImageClassifier",
    "ViT22BImageClassifierPreprocessor",
    "ViT22BImageConverter",
]
