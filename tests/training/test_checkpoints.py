"""What was saved comes back, bit by bit, or is passed over with a warning."""

import errno
import re

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.training import RECIPES
from keras_vit22b.training import Checkpoints
from keras_vit22b.weights.state_check import check_state

RECIPE = RECIPES["proxy"].replace(
    optimizer="adafactor", ema_momentum=0.9, warmup_steps=2, learning_rate=0.01
)


@pytest.fixture
def make_model(make_backbone):
    def make(seed=0, recipe=RECIPE, **options):
        keras.utils.set_random_seed(seed)
        backbone = make_backbone(hidden_dim=32, mlp_dim=64, **options)
        model = ViT22BImageClassifier(backbone, 5, dropout=0.1, compile=False)
        recipe.compile(model)
        return model

    return make


def state(model):
    return {
        re.sub(r"^seed_generator_\d+", f"seed_{i}", v.path): np.array(
            keras.ops.convert_to_numpy(v.value), copy=True
        )
        for i, v in enumerate(
            (
                *model.trainable_variables,
                *model.non_trainable_variables,
                *model.optimizer.variables,
            )
        )
    }


def assert_same(model, wanted):
    found = state(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def fit(model, images, checkpoints, epochs=1):
    model.fit(
        np.repeat(images, 4, 0),
        np.arange(12) % 5,
        batch_size=6,
        epochs=epochs,
        verbose=0,
        callbacks=[checkpoints],
    )


def test_a_model_goes_on_where_it_was(make_model, images, tmp_path):
    model = make_model()
    fit(model, images, Checkpoints(tmp_path), epochs=2)
    # EMA ends a fit by writing its average into the weights, after the save.
    model = make_model(seed=1)
    assert Checkpoints(tmp_path).restore(model) == 4
    saved = state(model)
    other = make_model(seed=2)
    assert Checkpoints(tmp_path).restore(other) == 4
    assert_same(other, saved)
    names = " ".join(saved)
    assert "momentum" in names and "average" in names and "seed" in names
    assert any(value.dtype.name == "bfloat16" for value in saved.values())


@pytest.mark.any_backend
def test_the_last_and_the_best_are_kept(make_model, images, tmp_path):
    model = make_model()
    checkpoints = Checkpoints(tmp_path, keep=2, monitor="val_loss")
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
        model.optimizer.iterations.assign(step)
        checkpoints.save(model, {"val_loss": loss})
    assert checkpoints.steps == [1, 3, 4]
    # Also those of a process before.
    checkpoints = Checkpoints(tmp_path, keep=2, monitor="val_loss")
    for step, loss, kept in (
        (5, 6.0, [1, 4, 5]),
        (6, 0.5, [5, 6]),
        (7, 7.0, [6, 7]),
        (8, 7.0, [6, 7, 8]),
    ):
        model.optimizer.iterations.assign(step)
        checkpoints.save(model, {"val_loss": loss})
        assert checkpoints.steps == kept


def cut_file(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)


@pytest.mark.any_backend
@pytest.mark.parametrize("damage", [cut_file, flip_bit])
def test_a_damaged_checkpoint_is_passed_over(
    make_model, images, tmp_path, damage
):
    model = make_model()
    fit(model, images, Checkpoints(tmp_path), epochs=2)
    largest = max(
        (tmp_path / "4").rglob("*"),
        key=lambda path: path.stat().st_size * path.is_file(),
    )
    damage(largest)
    model = make_model(seed=1)
    with pytest.warns(UserWarning, match="4 is broken and passed over"):
        assert Checkpoints(tmp_path).restore(model) == 2
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2
    # It is set aside, so that its step can be written anew.
    assert (tmp_path / "4.broken").is_dir()
    fit(model, images, Checkpoints(tmp_path))
    assert Checkpoints(tmp_path).steps == [2, 4]
    assert Checkpoints(tmp_path).restore(make_model(seed=1)) == 4


@pytest.mark.any_backend
def test_a_disk_that_fails_breaks_no_checkpoint(
    make_model, images, tmp_path, monkeypatch
):
    fit(make_model(), images, Checkpoints(tmp_path), epochs=2)
    checkpoints = Checkpoints(tmp_path)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints._manager, "restore", fail)
    with pytest.raises(OSError, match="Input/output"):
        checkpoints.restore(make_model(seed=1))
    assert checkpoints.steps == [2, 4]


@pytest.mark.any_backend
def test_where_all_are_damaged_nothing_starts_anew(
    make_model, images, tmp_path
):
    fit(make_model(), images, Checkpoints(tmp_path))
    for name in ("2.broken", "2.broken2"):  # Of earlier times.
        (tmp_path / name).mkdir()
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file():
            cut_file(path)
    with (
        pytest.warns(UserWarning, match="2 is broken"),
        pytest.raises(ValueError, match="were damaged, of steps 2. They are"),
    ):
        Checkpoints(tmp_path).restore(make_model(seed=1))
    assert (tmp_path / "2.broken1").is_dir()


def test_a_scaled_loss_counts_its_steps(make_model, images, tmp_path):
    """Of float16, whose optimizer is wrapped."""
    keras.config.set_dtype_policy("mixed_float16")
    recipe = RECIPE.replace(optimizer="adamw", ema_momentum=None)
    model = make_model(recipe=recipe)
    assert hasattr(model.optimizer, "inner_optimizer")
    fit(model, images, Checkpoints(tmp_path), epochs=2)
    assert Checkpoints(tmp_path).steps == [2, 4]
    other = make_model(seed=1, recipe=recipe)
    assert Checkpoints(tmp_path).restore(other) == 4


@pytest.mark.any_backend
def test_a_half_written_checkpoint_is_no_checkpoint(
    make_model, images, tmp_path
):
    fit(make_model(), images, Checkpoints(tmp_path), epochs=2)
    # As orbax names what is not complete.
    (tmp_path / "4").rename(tmp_path / "4.orbax-checkpoint-tmp")
    assert Checkpoints(tmp_path).restore(make_model(seed=1)) == 2


@pytest.mark.any_backend
def test_another_model_is_refused(make_model, images, tmp_path):
    fit(make_model(), images, Checkpoints(tmp_path))
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="of another model, optimizer"):
        checkpoints.restore(make_model(num_layers=3))
    with pytest.raises(ValueError, match="of another model, optimizer"):
        checkpoints.restore(make_model(patch_size=2))
    adamw = RECIPE.replace(optimizer="adamw")
    with pytest.raises(ValueError, match="such as optimizer"):
        checkpoints.restore(make_model(recipe=adamw))


def test_without_a_checkpoint_there_is_none(make_model, tmp_path):
    assert Checkpoints(tmp_path).restore(make_model()) is None


def test_what_is_not_finite_is_not_saved(make_model, tmp_path):
    model, checkpoints = make_model(), Checkpoints(tmp_path)
    checkpoints.save(model)
    model.optimizer.iterations.assign(1)
    bias = model.backbone.pooler.weights[0]
    bias.assign(np.full(bias.shape, np.inf))
    with pytest.raises(FloatingPointError, match=bias.path.split("/")[0]):
        checkpoints.save(model)
    assert checkpoints.steps == [0]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool"]
)
def test_a_sum_sees_every_change_of_one_value(dtype):
    import ml_dtypes  # noqa: F401

    generator = np.random.default_rng(0)
    values = generator.integers(0, 2, (3, 4, 5)).astype(dtype)
    records, bad = check_state({"a": values})
    assert not bad
    assert records["a"]["shape"] == [3, 4, 5]
    for index in np.ndindex(3, 4, 5):
        changed = values.copy()
        changed[index] = not changed[index]
        other, _ = check_state({"a": changed})
        assert other["a"]["sum"] != records["a"]["sum"]
    swapped = values[::-1].copy()
    assert check_state({"a": swapped})[0] != records


def test_a_sum_is_the_one_of_its_formula():
    values = np.array([[1.0, -2.0], [0.5, 3.0]], "float32")
    bits = values.view("uint32").ravel().astype(object)
    wanted = sum((2 * i + 1) * int(b) for i, b in enumerate(bits)) % 2**32
    assert check_state({"a": values})[0]["a"]["sum"] == wanted
