"""Models built without weights disturb no other model, and can be filled."""

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend.common import global_state

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import extract_features
from keras_vit22b import from_preset
from keras_vit22b.models.abstract import abstract_build
from keras_vit22b.models.abstract import initialize_missing
from keras_vit22b.models.abstract import is_abstract
from keras_vit22b.models.abstract import set_value


class Stored:
    """A value as the loader gives it."""

    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


def train_another_model():
    """Predict and fit a model that has nothing to do with ours."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    x = np.ones((4, 3), "float32")
    before = model.predict(x, verbose=0)
    model.compile("sgd", "mse")
    model.fit(x, np.zeros((4, 2)), verbose=0)
    assert np.abs(model.predict(x, verbose=0) - before).max() > 0


def pending():
    """Variables that Keras would initialize at the next opportunity."""
    return global_state.get_global_attribute("uninitialized_variables") or []


def test_abstract_model_has_shapes_and_no_values(make_backbone):
    with abstract_build():
        abstract = make_backbone(dropout_rate=0.1)
    real = make_backbone(dropout_rate=0.1)
    assert abstract.count_params() == real.count_params()
    assert all(map(is_abstract, abstract.variables))
    assert not any(map(is_abstract, real.variables))
    assert not pending()


def test_another_model_then_ours_loaded_and_trained(
    make_backbone, images, tmp_path
):
    source = make_backbone(random=True)
    ViT22BImageClassifier(source, 2).save_to_preset(tmp_path)
    expected = source.predict(images, verbose=0)["pooled_output"]

    abstract = from_preset(tmp_path, abstract=True, dropout_rate=0.1)
    train_another_model()
    assert all(map(is_abstract, abstract.variables))

    abstract.load_weights(tmp_path / "model.safetensors")
    assert not any(map(is_abstract, abstract.weights))
    initialize_missing(abstract)
    assert not any(map(is_abstract, abstract.variables))
    np.testing.assert_allclose(
        abstract.predict(images, verbose=0)["pooled_output"], expected
    )
    classifier = ViT22BImageClassifier(abstract, 2)
    labels = np.array([0, 1, 0])
    losses = classifier.fit(images, labels, epochs=2, verbose=0)
    assert np.isfinite(losses.history["loss"]).all()
    train_another_model()


def test_from_preset_trains_at_once(make_backbone, images, tmp_path, arrays):
    make_backbone().save_to_preset(tmp_path)
    classifier = ViT22BImageClassifier.from_preset(tmp_path, num_classes=2)
    assert classifier.compiled
    before = arrays(classifier)
    for _ in range(2):
        # The first step trains the head alone, which starts at zero.
        classifier.fit(images, np.array([0, 1, 0]), verbose=0)
    moved = [np.any(a != b) for a, b in zip(before, arrays(classifier))]
    assert sum(moved) > len(moved) / 2


def test_a_failing_build_leaves_nothing_behind(make_backbone):
    with pytest.raises(RuntimeError, match="half-way"), abstract_build():
        make_backbone(dropout_rate=0.1)
        raise RuntimeError("half-way")
    with pytest.raises(ValueError, match="pooling"), abstract_build():
        make_backbone(pooling="max")
    assert not pending()
    assert not any(map(is_abstract, make_backbone().variables))
    train_another_model()


def test_what_others_left_pending_stays_pending(make_backbone):
    with keras.StatelessScope(initialize_variables=False):
        theirs = keras.Variable(np.zeros, (2,))
    try:
        with abstract_build():
            make_backbone()
        assert [v is theirs for v in pending()] == [True]
    finally:
        theirs._deferred_initialize()
        global_state.set_global_attribute("uninitialized_variables", [])


def test_a_value_can_be_set_twice():
    with abstract_build():
        variable = keras.Variable(np.zeros, (2,))
    for value in ([1.0, 2.0], [3.0, 4.0]):
        set_value(variable, Stored(np.array(value, "float32")))
        np.testing.assert_array_equal(variable.value, value)


def test_an_abstract_model_cannot_be_saved(make_backbone, tmp_path):
    with abstract_build():
        backbone = make_backbone()
    with pytest.raises(ValueError, match="built abstractly"):
        backbone.save_to_preset(tmp_path / "preset")
    assert not (tmp_path / "preset").exists()


def test_a_model_without_weights_does_not_compute(make_backbone, images):
    with abstract_build():
        backbone = make_backbone()
        backbone.image_converter = None
    classifier = ViT22BImageClassifier(backbone, 2)
    for use in (
        lambda: backbone(images),
        lambda: backbone.predict(images, verbose=0),
        lambda: extract_features(backbone, images, image_converter=None),
        lambda: classifier.fit(images, np.zeros(3), verbose=0),
    ):
        with pytest.raises(ValueError, match="built abstractly"):
            use()
    trained = make_backbone(random=True)
    for variable, value in zip(backbone.weights, trained.weights, strict=True):
        set_value(variable, Stored(ops.convert_to_numpy(value.value)))
    initialize_missing(backbone)
    backbone.check_has_weights()
    np.testing.assert_array_equal(
        backbone.predict(images, verbose=0)["pooled_output"],
        trained.predict(images, verbose=0)["pooled_output"],
    )
