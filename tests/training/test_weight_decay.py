"""Every weight of every kind of model has one rule."""

import re

import pytest

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.training import AdamW
from keras_vit22b.training import WeightDecay
from keras_vit22b.training.weight_decay import ROWS

OPTIONS = {
    "defaults": {},
    "class token": {"pooling": "cls", "num_registers": 2, "pre_norm": True},
    "layer norms": {"norm": "layer", "qk_norm": "layer", "layer_scale": 0.1},
    "sequential": {
        "block": "sequential",
        "use_qkv_bias": True,
        "layer_scale": 0.1,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_weight_matches_one_row(make_backbone, options):
    model = ViT22BImageClassifier(make_backbone(**options), 3)
    paths = [w.path for w in model.trainable_weights]
    for path in paths:
        rows = [n for n, p in ROWS.items() if re.fullmatch(p, path)]
        assert len(rows) == 1, path
    decays = dict(zip(paths, WeightDecay(head=3.0, body=0.03).of(paths)))
    kernels = {path for path in paths if path.endswith("kernel")}
    assert decays["head/kernel"] == 3.0
    assert {decays[p] for p in kernels - {"head/kernel"}} == {0.03}
    assert {decays[p] for p in paths if p not in kernels} == {0.0}


def test_lora_decays_as_kernels_do():
    paths = ["block_0/in_projection/lora_kernel_a", "head/lora_kernel_b"]
    assert WeightDecay(head=3.0, body=0.03).of(paths) == [0.03, 3.0]


def test_a_weight_without_a_rule_is_an_error_that_names_one():
    with pytest.raises(
        ValueError, match=r"whether block_0/gate decays.*others"
    ):
        WeightDecay().of(["block_0/norm/scale", "block_0/gate"])
    rules = WeightDecay(others=((".*/gate", 0.5), (".*/scale", 0.1)))
    assert rules.of(["block_0/norm/scale", "block_0/gate"]) == [0.1, 0.5]


def test_a_pattern_that_no_weight_has_is_an_error():
    with pytest.raises(ValueError, match=r"is '\.\*/gatee', which.*a/gate'"):
        WeightDecay(others=((".*/gatee", 0.1),)).of(["a/gate"])


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"head": float("nan")}, "decay of head must be a number"),
        ({"body": -1}, "decay of body must be a number"),
        ({"others": ((".*",),)}, r"pairs \(pattern, decay\)"),
        ({"others": (("*/x", 0.1),)}, "'\\*/x' is no regular expression"),
    ],
)
def test_wrong_decays_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        WeightDecay(**wrong)


def test_an_optimizer_takes_what_it_is_given():
    assert WeightDecay(others=[["a", 0.1]]).others == (("a", 0.1),)
    assert AdamW(0.1).decay_by_name == WeightDecay()
    for wrong in (0.0, 0.03):
        with pytest.raises(ValueError, match="must be a WeightDecay"):
            AdamW(0.1, weight_decay=wrong)
    with pytest.raises(ValueError, match="up to WeightDecay"):
        AdamW(0.1).exclude_from_weight_decay(var_names=["kernel"])
