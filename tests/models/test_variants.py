"""The published sizes, counted exactly on models built abstractly."""

import math

import pytest

import keras_vit22b
from keras_vit22b.models import VARIANTS
from keras_vit22b.models import ViT22BBackbone
from keras_vit22b.models import ViT22BImageClassifier
from keras_vit22b.models.abstract import abstract_build
from keras_vit22b.models.abstract import is_abstract

# JFT's label set in the paper.
NUM_CLASSES = 29_593

# Weights in the kernels of all blocks; in all blocks; with patches, positions
# and last norm; with attention pooling; with a head. The papers publish 21,743
# (first column), 1,843 (third) and 3,926 (last) million.
COUNTS = {
    "vit22b_patch14_224": (
        21_743_271_936,
        21_745_348_608,
        21_750_546_432,
        22_203_598_848,
        22_385_447_833,
    ),
    "vit_e_patch14_224": (
        3_802_136_576,
        3_803_899_904,
        3_805_417_728,
        3_873_342_720,
        3_926_402_969,
    ),
    "vit_g_patch14_224": (
        1_840_250_880,
        1_841_362_944,
        1_842_772_352,
        1_881_132_416,
        None,
    ),
}
# The paper's 22B has two output biases a block, of attention and of the MLP.
# Only their sum acts, and the fused block stores only that.
FEWER_BIASES = {"vit22b_patch14_224": 48 * 6144}


def build_abstractly(name):
    with abstract_build():
        return ViT22BBackbone(**VARIANTS[name].backbone_config())


def count(tensors, *starts, end=""):
    return sum(
        math.prod(v.shape)
        for n, v in tensors.items()
        if n.startswith(starts) and n.endswith(end)
    )


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_published_ones(name):
    kernels, blocks, body, backbone_count, classifier_count = COUNTS[name]
    fewer = FEWER_BIASES.get(name, 0)
    backbone = build_abstractly(name)
    tensors = backbone.tensors()
    assert count(tensors, "blocks.", end=".kernel") == kernels
    assert count(tensors, "blocks.") == blocks - fewer
    embedding = ("patch_embedding.", "position_embedding", "final_norm.")
    assert count(tensors, "blocks.", *embedding) == body - fewer
    assert backbone.count_params() == backbone_count - fewer
    assert all(map(is_abstract, backbone.weights))
    if classifier_count is not None:
        with abstract_build():
            classifier = ViT22BImageClassifier(
                backbone, NUM_CLASSES, compile=False
            )
        assert classifier.count_params() == classifier_count - fewer


def test_one_block_of_22b_has_453_million_weights():
    variant = VARIANTS["vit22b_patch14_224"]
    d, mlp = variant.hidden_dim, variant.mlp_dim
    assert (4 * d * d + 2 * d * mlp) * variant.num_layers == 21_743_271_936
    assert round((4 * d * d + 2 * d * mlp) / 1e6) == 453
    assert mlp == 4 * d and d // variant.num_heads == 128


def test_22b_cuts_an_image_into_256_patches_of_588_numbers():
    config = VARIANTS["vit22b_patch14_224"].backbone_config()
    config.update(num_layers=1)
    with abstract_build():
        backbone = ViT22BBackbone(**config)
        with_class_token = ViT22BBackbone(**config, pooling="cls")
    assert tuple(backbone.tensors()["patch_embedding.kernel"].shape) == (
        588,
        6144,
    )
    assert backbone.output["sequence_output"].shape == (None, 256, 6144)
    assert with_class_token.output["sequence_output"].shape[1] == 257


def test_presets_are_listed_largest_first_with_their_sizes():
    listed = keras_vit22b.presets()
    assert set(VARIANTS) <= set(listed)
    sizes = [p["parameter_count"] for p in listed.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert listed["vit22b_patch14_224"]["parameter_count"] == 22_203_303_936
    assert listed["vit22b_patch14_224"]["has_weights"] is False
    # A second call, after the module behind it was imported.
    assert keras_vit22b.presets() == listed


def test_a_listed_size_is_the_size_of_the_model():
    backbone = keras_vit22b.from_preset("vit250k_patch7_28", abstract=True)
    listed = keras_vit22b.presets()["vit250k_patch7_28"]
    assert backbone.count_params() == listed["parameter_count"]
