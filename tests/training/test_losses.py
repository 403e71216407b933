"""Sigmoid cross-entropy, against its definition."""

import keras
import numpy as np
import pytest

from keras_vit22b.training import SigmoidCrossEntropy


def by_definition(targets, logits):
    p = 1 / (1 + np.exp(-logits))
    losses = -(targets * np.log(p) + (1 - targets) * np.log(1 - p))
    return losses.sum(-1).mean()


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(3, 4)).astype("float32")


@pytest.mark.parametrize(
    "labels, targets",
    [
        ([2, 0, 3], [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]),
        (
            [[2, 0], [-1, 1], [-1, -1]],
            [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
        ),
        ([[1, 1], [2, 2], [3, 3]], [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
    ],
)
def test_indices_of_classes(labels, targets, logits):
    loss = SigmoidCrossEntropy()(np.array(labels), logits)
    wanted = by_definition(np.array(targets), logits)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)


def test_targets_between_zero_and_one(logits):
    targets = np.random.default_rng(1).uniform(size=(3, 4)).astype("float32")
    loss = SigmoidCrossEntropy(sparse=False)(targets, logits)
    assert float(loss) == pytest.approx(
        by_definition(targets, logits), rel=1e-5
    )


def test_no_logit_is_too_large():
    logits = np.array([[1e4, -1e4]], "float32")
    assert float(SigmoidCrossEntropy()(np.array([0]), logits)) == 0.0
    assert float(SigmoidCrossEntropy()(np.array([1]), logits)) == 2e4


def test_labels_of_another_form_are_an_error(logits):
    with pytest.raises(ValueError, match="need sparse=True"):
        SigmoidCrossEntropy(sparse=False)(np.array([[1], [2], [0]]), logits)


def test_it_is_saved_and_loaded():
    loss = SigmoidCrossEntropy(sparse=False)
    loaded = keras.losses.deserialize(keras.losses.serialize(loss))
    assert loaded.get_config() == loss.get_config()
