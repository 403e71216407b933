"""The images of a step follow from the seed and the step's number alone."""

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageConverter
from keras_vit22b.training import InceptionCrop
from keras_vit22b.training import TrainingData


@pytest.fixture
def make():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (20, 6, 8, 3), dtype="uint8")

    def make(images=images, labels=None, **options):
        options.setdefault("converter", ViT22BImageConverter((4, 4)))
        options.setdefault("augmentation", InceptionCrop(4, 4))
        labels = np.arange(len(images)) if labels is None else labels
        return TrainingData(images, labels, (4, 4, 3), **options)

    return make


def assert_same(first, second):
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_a_run_that_goes_on_sees_what_it_would_have_seen(make):
    whole = list(make().batches(8, start=0, stop=7))
    assert [len(y) for _, y in whole] == [8] * 7
    assert whole[0][0].shape == (8, 4, 4, 3)
    assert whole[0][0].dtype == "float32"
    assert np.abs(whole[0][0]).max() <= 1
    assert_same(whole[3:], make().batches(8, start=3, stop=7))


def test_each_pass_sees_every_image_once_in_another_order(make):
    labels = [y for _, y in make().batches(10, start=0, stop=6)]
    passes = [np.concatenate(labels[i : i + 2]) for i in (0, 2, 4)]
    for order in passes:
        assert sorted(order) == list(range(20))
    assert len({tuple(order) for order in passes}) == 3


def test_a_batch_may_span_two_passes(make):
    labels = np.concatenate([y for _, y in make().batches(8, start=0, stop=5)])
    assert sorted(labels[:20]) == sorted(labels[20:]) == list(range(20))


def test_shares_together_are_the_batch(make):
    whole = list(make().batches(8, start=1, stop=4))
    for index in range(2):
        share = make().batches(8, start=1, stop=4, share=(index, 2))
        assert_same(share, [(x[index::2], y[index::2]) for x, y in whole])


def test_a_seed_gives_other_images_and_crops(make):
    (first, labels), (second, others) = (
        next(iter(make(seed=seed).batches(20, start=0, stop=1)))
        for seed in (0, 1)
    )
    assert (labels != others).any()
    assert np.abs(first[labels == 3] - second[others == 3]).max() > 0


def test_images_may_have_different_sizes(make):
    images = [np.full((4 + i, 9 - i, 3), 40 * i, "uint8") for i in range(4)]
    for augmentation in (InceptionCrop(4, 4), None):
        data = make(images, augmentation=augmentation)
        ((batch, labels),) = data.batches(4, start=0, stop=1)
        wanted = 40 * labels / 127.5 - 1
        np.testing.assert_allclose(batch[:, 2, 2, 0], wanted, atol=1e-5)


def test_in_order_gives_each_image_once_as_the_converter_does(make):
    data = make()
    batches = list(data.in_order(8))
    assert [len(y) for _, y in batches] == [8, 8, 4]
    images = np.concatenate([x for x, _ in batches])
    wanted = keras.ops.convert_to_numpy(data.converter(data.images))
    np.testing.assert_allclose(images, wanted, atol=1e-6)
    shares = [
        data.in_order(8, share=(i, 2), drop_remainder=True) for i in range(2)
    ]
    labels = [np.concatenate([y for _, y in share]) for share in shares]
    assert labels[0].tolist() == list(range(0, 16, 2))
    assert labels[1].tolist() == list(range(1, 16, 2))


def test_the_host_converts_as_the_backend_does():
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 6, 3))
    for options in (
        {"scale": [0.1, 0.2, 0.3], "offset": [1.0, 2.0, 3.0]},
        {"channels": 1},
        {"scale": None, "offset": None},
    ):
        converter = ViT22BImageConverter((5, 6), **options)
        np.testing.assert_allclose(
            converter.convert_on_host(images),
            keras.ops.convert_to_numpy(converter(images)),
            rtol=1e-6,
        )


def test_what_does_not_fit_is_an_error(make):
    with pytest.raises(ValueError, match="20 images and 3 labels"):
        make(labels=np.arange(3))
    with pytest.raises(ValueError, match="shape \\(20, 1, 1\\)"):
        make(labels=np.zeros((20, 1, 1)))
    with pytest.raises(ValueError, match="shape \\(20, 1\\)"):
        make(labels=np.zeros((20, 1)))
    with pytest.raises(ValueError, match="0 or 1"):
        make(labels=np.full((20, 2), 3))
    with pytest.raises(ValueError, match="does not divide into 3 shares"):
        make().batches(8, start=0, stop=1, share=(0, 3))
    with pytest.raises(ValueError, match="do not fill a batch of 32"):
        make().in_order(32, drop_remainder=True)
