"""One call trains, goes on, cools down, and says what went wrong."""

import json

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter
from keras_vit22b.training import RECIPES
from keras_vit22b.training import AttentionMonitor
from keras_vit22b.training import Recipe
from keras_vit22b.training import TrainingData
from keras_vit22b.training import TrainingLog
from keras_vit22b.training import train
from keras_vit22b.training.non_finite import NonFiniteSearch

RECIPE = RECIPES["proxy"].replace(
    total_steps=7, batch_size=8, warmup_steps=2, cooldown_steps=2
)


@pytest.fixture
def make_model(make_backbone):
    def make(seed=0, **options):
        keras.utils.set_random_seed(seed)
        small = {"num_layers": 1, "pooling": "mean"}
        backbone = make_backbone((8, 8, 1), **small | options)
        converter = ViT22BImageConverter((8, 8), channels=1)
        return ViT22BImageClassifier(
            backbone,
            5,
            dropout=0.1,
            preprocessor=converter.make_preprocessor(),
            compile=False,
        )

    return make


@pytest.fixture
def make_data():
    def make(count=20, recipe=RECIPE):
        generator = np.random.default_rng(1)
        return TrainingData(
            generator.integers(0, 256, (count, 10, 9, 1), dtype="uint8"),
            np.arange(count) % 5,
            (8, 8, 1),
            converter=ViT22BImageConverter((8, 8), channels=1),
            augmentation=recipe.make_augmentation((8, 8, 1)),
        )

    return make


def read(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder):
    return {r["step"]: r["loss"] for r in read(folder) if "loss" in r}


class Kill(keras.callbacks.Callback):
    """Fail after some steps, as a kill would, but within the process."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_run_goes_on_as_if_nothing_had_happened(
    make_model, make_data, arrays, tmp_path
):
    recipe = RECIPE.replace(ema_momentum=0.5)
    options = {"every": 3, "log_every": 1}

    def run(folder, **more):
        model = make_model()
        train(model, recipe, make_data(), tmp_path / folder, **options, **more)
        return arrays(model)

    whole = run("whole", validation=make_data(11))
    for step in (4, 2):  # From steps 0 and 3.
        with pytest.raises(KeyboardInterrupt):
            run("broken", validation=make_data(11), callbacks=[Kill(step)])
    for ours, theirs in zip(
        run("broken", validation=make_data(11)), whole, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "whole")) == list(range(1, 8))
    held = [r["step"] for r in read(tmp_path / "whole") if "val_loss" in r]
    assert held == [3, 6, 7]
    # A run that is done gives the average again.
    again = run("broken", validation=make_data(11))
    for ours, theirs in zip(again, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_accumulated_batches_train_as_one_does(
    make_model, make_data, arrays, tmp_path
):
    def run(folder, **changes):
        model, data = make_model(), make_data()
        model.output_dropout.rate = 0.0
        data.augmentation = None
        recipe = RECIPE.replace(optimizer="sgd", learning_rate=0.1, **changes)
        log = train(model, recipe, data, tmp_path / folder, log_every=1)
        return arrays(model), log.records

    whole, records = run("whole")
    parts, more = run("parts", accumulation_steps=2)
    assert len(more) == 2 * len(records) == 14
    for ours, theirs in zip(parts, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    "labels, message",
    [
        (np.arange(20) % 5 + 0.5, "integers from 0. Received: float64"),
        (np.full(20, np.nan), "integers from 0"),
        (np.arange(20) % 5 - 1, "such as -1"),
        (np.arange(20) % 6, "head has 5 classes. Received labels of 6"),
        (np.eye(20, 4, dtype=int), "head has 5 classes. Received labels of 4"),
    ],
)
def test_labels_are_classes_of_the_head(
    make_model, make_data, tmp_path, labels, message
):
    images = make_data().images
    with pytest.raises(ValueError, match=message):
        data = TrainingData(images, labels, (8, 8, 1))
        train(make_model(), RECIPE, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_of_something_else_is_left_alone(make_model, make_data, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("My notes.\nMore of them.\n")
    model, data = make_model(), make_data()
    RECIPE.compile(model)
    batch = list(data.batches(8, start=0, stop=1))[0]
    with pytest.raises(ValueError, match="line 1 is 'My notes.'"):
        model.preprocessor = None
        model.fit(*batch, verbose=0, callbacks=[TrainingLog(notes)])
    assert notes.read_text() == "My notes.\nMore of them.\n"
    # That of a run whose checkpoints are gone is kept under another name.
    log = tmp_path / "log.jsonl"
    for kept in ([], ["log.1.jsonl"], ["log.1.jsonl", "log.2.jsonl"]):
        RECIPE.compile(model)
        model.fit(*batch, verbose=0, callbacks=[TrainingLog(log, every=1)])
        assert len(log.read_text().splitlines()) == 1
        assert sorted(p.name for p in tmp_path.glob("log.?.jsonl")) == kept


def test_callbacks_write_into_the_log(make_model, make_data, tmp_path):
    images, _ = next(iter(make_data().in_order(4)))
    monitor = AttentionMonitor(images, every=1)
    log = train(
        make_model(), RECIPE, make_data(), tmp_path, callbacks=[monitor]
    )
    assert log.records[-1]["attention_entropy"] > 0


def test_the_log_has_speed_and_mfu(make_model, make_data, tmp_path):
    log = train(
        make_model(),
        RECIPE,
        make_data(),
        tmp_path,
        log_every=2,
        peak_flops=1e12,
    )
    # Also at the end of each epoch, as of the last.
    assert [r["step"] for r in log.records] == [2, 4, 6, 7]
    assert "seconds_per_step" not in log.records[0]
    for record in log.records[1:]:
        rate = 8 / record["seconds_per_step"]
        assert record["images_per_second"] == pytest.approx(rate)
        assert 0 < record["mfu"] < 1
    rates = [r["learning_rate"] for r in log.records]
    schedule = RECIPE.make_schedule()
    assert rates == pytest.approx([float(schedule(s)) for s in (2, 4, 6, 7)])


def test_another_recipe_is_refused(make_model, make_data, tmp_path):
    train(make_model(), RECIPE.replace(total_steps=4), make_data(), tmp_path)
    assert Recipe.load(tmp_path).total_steps == 4
    with pytest.raises(ValueError, match="total_steps=4, not 7"):
        train(make_model(), RECIPE, make_data(), tmp_path)


def test_other_data_are_refused(make_model, make_data, tmp_path):
    recipe = RECIPE.replace(total_steps=4)
    train(make_model(), recipe, make_data(), tmp_path)
    with pytest.raises(ValueError, match="data=.*'images': 20"):
        train(make_model(), recipe, make_data(21), tmp_path)


def test_a_second_run_in_a_folder_is_refused(make_model, make_data, tmp_path):
    class Second(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with pytest.raises(ValueError, match="Another run is writing"):
                train(make_model(), RECIPE, make_data(), tmp_path)
            self.model.stop_training = True

    train(make_model(), RECIPE, make_data(), tmp_path, callbacks=[Second()])


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_one_hot_labels_train_as_integers_do(
    make_model, make_data, arrays, tmp_path, loss
):
    results = []
    for name in ("integers", "one_hot"):
        model, data = make_model(), make_data()
        if name == "one_hot":
            data.labels = np.eye(5, dtype="float32")[data.labels]
        recipe = RECIPE.replace(total_steps=4, loss=loss)
        train(model, recipe, data, tmp_path / name)
        results.append(arrays(model))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_run_cools_down_from_anothers_checkpoint(
    make_model, make_data, arrays, tmp_path
):
    endless = RECIPE.replace(total_steps=4, cooldown_steps=0)
    first = make_model()
    train(first, endless, make_data(), tmp_path / "a")
    cooled = endless.replace(total_steps=6, cooldown_steps=2)
    model = make_model(seed=3)
    start = tmp_path / "a" / "checkpoints"
    log = train(
        model, cooled, make_data(), tmp_path / "b", log_every=1, start=start
    )
    assert [r["step"] for r in log.records] == [5, 6]
    assert log.records[-1]["learning_rate"] == 0
    # One step at half the rate and one at none lie between them.
    for before, after in zip(arrays(first), arrays(model)):
        assert np.abs(after - before).max() < 0.01
    with pytest.raises(ValueError, match="no checkpoint to start from"):
        train(
            make_model(),
            cooled,
            make_data(),
            tmp_path / "c",
            start=tmp_path / "nothing",
        )


def test_a_loss_that_is_not_finite_names_the_first_tensor(
    make_model, make_data, tmp_path
):
    model = make_model()
    kernel = model.backbone.patch_embedding.weights[0]
    kernel.assign(np.ones(kernel.shape))  # So that sums overflow.
    data = make_data()
    batch = data._batch

    def overflow(step, *args):
        images, labels = batch(step, *args)
        return (np.full_like(images, 3e38) if step == 4 else images), labels

    data._batch = overflow
    with pytest.raises(FloatingPointError) as error:
        train(model, RECIPE, data, tmp_path, every=3, log_every=1)
    message = str(error.value)
    assert "Step 5: the output of patch_embedding is the first" in message
    assert str(tmp_path / "checkpoints" / "3") in message
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "0",
        "3",
    ]


@pytest.mark.parametrize(
    "path, value, named",
    [
        ("block_1/in_projection/kernel", np.nan, "weight block_1/in_proj"),
        ("block_1/out_projection/kernel", 3e38, "the output of block_1"),
        ("head/kernel", 3e38, "the loss"),
    ],
)
def test_the_first_tensor_is_named(make_model, make_data, path, value, named):
    model = make_model(num_layers=2)
    RECIPE.compile(model)
    weight = next(w for w in model.weights if w.path.startswith(path))
    weight.assign(np.full(weight.shape, value))
    images, labels = next(iter(make_data().batches(8, start=0, stop=1)))
    assert NonFiniteSearch(model)(images, labels).startswith(named)


def test_what_is_finite_has_no_first_tensor(make_model, make_data):
    model = make_model()
    RECIPE.compile(model)
    batch = next(iter(make_data().batches(8, start=0, stop=1)))
    assert NonFiniteSearch(model)(*batch) is None
