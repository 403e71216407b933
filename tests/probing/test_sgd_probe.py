"""Heads of one pass are those of passes of their own."""

import keras
import numpy as np
import pytest

from keras_vit22b.probing import SGDProbe

RATES = (1e-2, 0.3)


@pytest.fixture
def data():
    """Two sets of features of 80 images of 3 classes; the second tells more."""
    generator = np.random.default_rng(0)
    labels = np.arange(80) % 3
    sets = {}
    for name, width, spread in (("early", 5, 3.0), ("late", 7, 0.7)):
        centers = generator.normal(size=(3, width))
        noise = spread * generator.normal(size=(80, width))
        sets[name] = (centers[labels] + noise).astype("float32")
    return sets, labels


def reference(features, labels, train, protocol, rate):
    """Return what plain SGD gives, in float64, and the accuracy held out."""
    width, classes = features.shape[-1], labels.max() + 1
    generator = np.random.default_rng(protocol.seed)
    kernel = generator.normal(0, 0.01, (width, 1, classes))[:, 0]
    bias, speed = np.zeros(classes), [0.0, 0.0]
    batch = min(protocol.batch_size, len(train))
    steps = protocol.epochs * (len(train) // batch)
    step = 0
    for epoch in range(protocol.epochs):
        order = np.random.default_rng([protocol.seed, epoch]).permutation(train)
        for first in range(0, len(train) - batch + 1, batch):
            rows = order[first : first + batch]
            x = features[rows].astype("float64")
            scores = np.exp(x @ kernel + bias)
            error = scores / scores.sum(1, keepdims=True)
            error[np.arange(batch), labels[rows]] -= 1
            error /= batch
            now = rate * batch / 256 * (1 + np.cos(np.pi * step / steps)) / 2
            for i, gradient in enumerate((x.T @ error, error.sum(0))):
                speed[i] = protocol.momentum * speed[i] - now * gradient
            kernel, bias = kernel + speed[0], bias + speed[1]
            step += 1
    return kernel, bias


def split(count, protocol):
    order = np.random.default_rng(protocol.seed).permutation(count)
    held = round(count * protocol.held_out)
    return np.sort(order[held:]), np.sort(order[:held])


def test_every_head_is_plain_sgd(data):
    sets, labels = data
    protocol = SGDProbe(RATES, epochs=4, batch_size=16, held_out=0.25)
    probe = protocol.fit(sets, labels)
    train, held = split(len(labels), protocol)
    assert len(probe.held_out) == 4
    for record in probe.held_out:
        features = sets[record["features"]]
        kernel, bias = reference(
            features, labels, train, protocol, record["learning_rate"]
        )
        right = (features[held] @ kernel + bias).argmax(1) == labels[held]
        assert record["accuracy"] == pytest.approx(right.mean())
        if (probe.features, probe.learning_rate) == (
            record["features"],
            record["learning_rate"],
        ):
            np.testing.assert_allclose(probe.kernel, kernel, atol=1e-5)
            np.testing.assert_allclose(probe.bias, bias, atol=1e-5)
    assert probe.features == "late"
    best = max(record["accuracy"] for record in probe.held_out)
    chosen = [
        r["accuracy"]
        for r in probe.held_out
        if (r["features"], r["learning_rate"])
        == (probe.features, probe.learning_rate)
    ]
    assert chosen == [best]


def test_one_pass_is_as_many_runs(data):
    sets, labels = data
    options = {"epochs": 3, "batch_size": 16}
    together = SGDProbe(RATES, **options).fit(sets, labels)
    apart = SGDProbe((together.learning_rate,), **options).fit(
        sets[together.features], labels
    )
    np.testing.assert_allclose(together.kernel, apart.kernel, atol=1e-6)
    np.testing.assert_array_equal(
        together.predict(sets), apart.predict(sets[together.features])
    )


def test_a_run_again_gives_the_same_numbers(data):
    sets, labels = data
    protocol = SGDProbe(RATES, epochs=2, batch_size=16, seed=3)
    keras.utils.set_random_seed(1)
    first = protocol.fit(sets, labels)
    keras.utils.set_random_seed(2)
    again = protocol.fit(sets, labels)
    np.testing.assert_array_equal(first.kernel, again.kernel)
    assert first.held_out == again.held_out


def test_each_epoch_sees_the_next_view(data):
    sets, labels = data
    views = np.stack([sets["late"], sets["late"] + 1], axis=1)
    protocol = SGDProbe((0.1,), epochs=2, batch_size=72)
    probe = protocol.fit(views, labels)
    train, _ = split(80, protocol)
    one = SGDProbe((0.1,), epochs=2, batch_size=72).fit(views[:, 0], labels)
    assert np.abs(probe.kernel - one.kernel).max() > 1e-4
    # Views that are alike are as one.
    same = protocol.fit(np.stack([views[:, 0]] * 2, axis=1), labels)
    np.testing.assert_array_equal(same.kernel, one.kernel)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"learning_rates": ()}, "learning_rates must be positive"),
        ({"learning_rates": (0.1, -1)}, "learning_rates must be positive"),
        ({"epochs": 0}, "epochs must be a positive int"),
        ({"held_out": 1.0}, "between 0 and 1"),
    ],
)
def test_wrong_protocols_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        SGDProbe(**wrong)


def test_bad_rows_are_named(data):
    sets, labels = data
    sets["late"][41, 3] = np.nan
    with pytest.raises(ValueError, match="first in row 41"):
        SGDProbe(RATES, epochs=2, batch_size=16).fit(sets, labels)
    with pytest.raises(ValueError, match="leaves none"):
        SGDProbe(held_out=0.01).fit(sets["early"][:9], labels[:9])
