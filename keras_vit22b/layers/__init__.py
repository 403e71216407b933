"""Layers of ViT-22B, on `keras.ops` alone."""

from keras_vit22b.layers.attention_pooling import AttentionPooling
from keras_vit22b.layers.parallel_block import ParallelBlock
from keras_vit22b.layers.patch_embedding import PatchEmbedding
from keras_vit22b.layers.patch_embedding import resize_position_embedding
from keras_vit22b.layers.projections import InProjection
from keras_vit22b.layers.projections import OutProjection
from keras_vit22b.layers.qk_norm_attention import AttentionMaps
from keras_vit22b.layers.qk_norm_attention import AttentionStatistics
from keras_vit22b.layers.qk_norm_attention import QKNormAttention
from keras_vit22b.layers.sequential_block import SequentialBlock
from keras_vit22b.layers.token_pooling import TokenPooling

__all__ = [
    "AttentionMaps",
    "AttentionPooling",
    "AttentionStatistics",
    "InProjection",
    "OutProjection",
    "ParallelBlock",
    "PatchEmbedding",
    "QKNormAttention",
    "SequentialBlock",
    "TokenPooling",
    "resize_position_embedding",
]
