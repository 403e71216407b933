"""A recipe builds all that `fit` needs, and is read back as it was."""

import json

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.training import RECIPES
from keras_vit22b.training import Recipe
from keras_vit22b.training import ReciprocalSquareRoot
from keras_vit22b.training import ScalingAdafactor
from keras_vit22b.training import SigmoidCrossEntropy
from keras_vit22b.training import WeightDecay


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_are_saved_and_loaded(recipe, tmp_path):
    recipe = recipe.replace(
        weight_decay=WeightDecay(head=1.0, body=0.1, others=(("a.*", 0.2),))
    )
    recipe.save(tmp_path)
    assert Recipe.load(tmp_path) == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


def test_the_22bs_recipe():
    recipe = RECIPES["vit22b"]
    schedule = recipe.make_schedule()
    assert isinstance(schedule, ReciprocalSquareRoot)
    assert schedule.get_config() == {
        "learning_rate": 1e-3,
        "warmup_steps": 10_000,
        "timescale": 10_000,
        "total_steps": 177_000,
        "cooldown_steps": 30_000,
    }
    optimizer = recipe.make_optimizer()
    assert isinstance(optimizer, ScalingAdafactor)
    assert optimizer.global_clipnorm == 1.0
    assert optimizer.decay_by_name == WeightDecay(head=3.0, body=0.03)
    assert isinstance(recipe.make_loss(), SigmoidCrossEntropy)


def test_a_schedule_counts_steps_and_keras_batches():
    recipe = RECIPES["vit22b"]
    schedule = recipe.make_schedule()
    batches = recipe.replace(accumulation_steps=4).make_schedule()
    for step in (0, 5_000, 10_000, 100_000, 170_000, 177_000):
        for batch in range(4):  # Keras asks at the last of a step's.
            rate = float(batches(4 * step + batch))
            assert rate == pytest.approx(float(schedule(step)))
    again = type(batches).from_config(batches.get_config())
    assert float(again(40_003)) == float(schedule(10_000))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train(name, make_backbone):
    recipe = RECIPES[name].replace(
        total_steps=40,
        warmup_steps=5,
        cooldown_steps=0,
        learning_rate=1e-2,
        ema_momentum=0.9,
    )
    generator = np.random.default_rng(0)
    images = generator.normal(size=(8, 8, 12, 3)).astype("float32")
    labels = np.arange(8) % 3
    classifier = ViT22BImageClassifier(make_backbone(), 3, compile=False)
    recipe.compile(classifier)
    bias = keras.ops.convert_to_numpy(classifier.head.bias)
    np.testing.assert_array_equal(bias, np.full(3, recipe.head_bias))
    history = classifier.fit(
        images, labels, batch_size=8, epochs=40, verbose=0
    ).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]


@pytest.mark.parametrize("schedule, wanted", [("cosine", 0.5), ("constant", 1)])
def test_other_schedules(schedule, wanted):
    recipe = RECIPES["proxy"].replace(
        schedule=schedule, warmup_steps=10, total_steps=110, learning_rate=1.0
    )
    rates = recipe.make_schedule()
    assert float(rates(0)) == 0.0
    assert float(rates(5)) == pytest.approx(0.5)
    assert float(rates(60)) == pytest.approx(wanted)


def test_augmentation_gives_the_models_images():
    layer = RECIPES["vit22b"].make_augmentation((8, 12, 3), seed=0)
    assert layer(np.zeros((2, 20, 15, 3))).shape == (2, 8, 12, 3)
    whole = RECIPES["vit22b"].replace(crop_area=None, flip=False)
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
    layer = whole.make_augmentation((8, 8, 3))
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(layer(images)), images, atol=1e-5
    )


def test_it_prints_itself():
    text = str(RECIPES["vit22b"])
    assert "batch size         65536" in text
    assert "weight decay       head 3, body 0.03" in text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"optimizer": "adam"}, "'adafactor', 'adamw' or 'sgd'.*'adam'"),
        ({"schedule": "step"}, "'rsqrt', 'cosine' or 'constant'"),
        ({"loss": "hinge"}, "'sigmoid' or 'softmax'"),
        ({"batch_size": 1.5}, "batch_size must be an integer"),
    ],
)
def test_wrong_values_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        RECIPES["vit22b"].replace(**changes)


@pytest.mark.parametrize("content", ["[]", "{}", '{"name": 1}', "no JSON"])
def test_a_file_that_holds_no_recipe_is_an_error(content, tmp_path):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match="holds no recipe"):
        Recipe.load(tmp_path)


def test_an_unknown_field_is_an_error(tmp_path):
    RECIPES["vit22b"].save(tmp_path)
    path = tmp_path / "recipe.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "warm_up": 3}))
    with pytest.raises(ValueError, match="warm_up"):
        Recipe.load(tmp_path)


@pytest.mark.parametrize(
    "name, value",
    [
        ("flip", "False"),
        ("clip_norm", "a"),
        ("clip_norm", 0),
        ("ema_momentum", 2),
        ("crop_area", [0.3]),
        ("crop_area", "None"),
        ("weight_decay", 0.1),
        ("learning_rate", "x"),
        ("warmup_steps", -1),
        ("accumulation_steps", 3),
        ("total_steps", True),
        ("warmup_steps", 1.5),
        ("learning_rate", np.inf),
        ("name", None),
        ("cooldown_steps", 2000),
    ],
)
def test_a_value_that_is_none_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        RECIPES["proxy"].replace(**{name: value})


def test_a_head_that_gives_probabilities_is_refused(make_backbone):
    model = ViT22BImageClassifier(make_backbone(), 3, activation="softmax")
    bias = keras.ops.convert_to_numpy(model.head.bias)
    with pytest.raises(ValueError, match="takes logits.*'softmax'"):
        RECIPES["proxy"].compile(model)
    np.testing.assert_array_equal(model.head.bias, bias)


def test_a_list_is_as_good_as_a_pair():
    recipe = RECIPES["proxy"].replace(crop_area=[0.5, 1.0])
    assert recipe == RECIPES["proxy"].replace(crop_area=(0.5, 1.0))
