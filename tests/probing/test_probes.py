"""Probes equal what they are defined as, however their features are read."""

import numpy as np
import pytest

from keras_vit22b.probing import LogisticProbe
from keras_vit22b.probing import NearestNeighbors
from keras_vit22b.probing import RidgeProbe
from keras_vit22b.probing import rows

pytestmark = pytest.mark.any_backend


@pytest.fixture
def data():
    """Three classes that overlap: features `(90, 7)` and labels."""
    generator = np.random.default_rng(0)
    labels = np.arange(90) % 3
    centers = generator.normal(size=(3, 7))
    features = centers[labels] + generator.normal(size=(90, 7))
    return features.astype("float32"), labels


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", 8)


class Lazy:
    """Rows that count how many were read at once."""

    def __init__(self, array):
        self.shape, self.most, self._array = array.shape, 0, array

    def __getitem__(self, index):
        part = self._array[index]
        self.most = max(self.most, len(part))
        return part


@pytest.mark.parametrize("count", [90, 6], ids=["primal", "dual"])
def test_ridge_is_sklearns_ridge(data, count, small_chunks):
    from sklearn.linear_model import Ridge

    features, labels = (part[:count] for part in data)
    probe = RidgeProbe(l2=3.0, constant=2.0).fit(features, labels)
    wide = features.astype("float64")
    scaled = (wide - wide.mean(0)) / (wide.std(0) + 1e-5)
    scaled = np.concatenate([scaled, np.full((count, 1), 2.0)], axis=1)
    targets = 2.0 * (labels[:, None] == np.arange(3)) - 1
    ridge = Ridge(alpha=3.0, fit_intercept=False, solver="svd")
    kernel = ridge.fit(scaled, targets).coef_.T
    np.testing.assert_allclose(probe.kernel, kernel, rtol=0, atol=1e-8)
    assert probe.predict(features).tolist() == (
        (scaled @ kernel).argmax(1).tolist()
    )


def test_logistic_regression_is_sklearns(data, small_chunks):
    from sklearn.linear_model import LogisticRegression

    features, labels = data
    probe = LogisticProbe(cs=0.5, tolerance=1e-9).fit(features, labels)
    theirs = LogisticRegression(C=0.5, tol=1e-9, max_iter=1000)
    theirs.fit(features.astype("float64"), labels)
    np.testing.assert_allclose(
        probe.predict_proba(features),
        theirs.predict_proba(features.astype("float64")),
        atol=1e-5,
    )
    np.testing.assert_allclose(probe.kernel[:-1], theirs.coef_.T, atol=1e-4)


def test_the_penalty_is_chosen_on_what_is_held_out(data):
    features, labels = data
    cs = (1e-6, 1e-1, 1e3)
    probe = LogisticProbe(cs=cs, held_out=0.2).fit(features, labels)
    assert probe.held_out.keys() == set(cs)
    train, held = rows.split(90, 0.2, 0)
    assert len(held) == 18 and not set(train) & set(held)
    for c, accuracy in probe.held_out.items():
        alone = LogisticProbe(cs=c, tolerance=1e-9)
        alone = alone.fit(features[train], labels[train])
        assert alone.score(features[held], labels[held]) == accuracy
    assert probe.held_out[probe.c] == max(probe.held_out.values())
    # And fitted again to all.
    whole = LogisticProbe(cs=probe.c).fit(features, labels)
    np.testing.assert_array_equal(probe.kernel, whole.kernel)
    assert len(LogisticProbe().cs) == 45
    assert LogisticProbe().cs[0] == 1e-6 and LogisticProbe().cs[-1] == 1e5


def test_neighbors_are_those_of_a_loop(data, small_chunks):
    features, labels = data
    train, test = slice(0, 61), slice(61, 90)
    probe = NearestNeighbors(k=5).fit(features[train], labels[train])
    found = probe.predict_proba(features[test])
    for row, probabilities in zip(features[test], found):
        cosines = [
            np.float64(row)
            @ other
            / np.linalg.norm(row)
            / np.linalg.norm(other)
            for other in np.float64(features[train])
        ]
        nearest = np.argsort(cosines)[::-1][:5]
        votes = np.exp([cosines[i] / 0.07 for i in nearest])
        shares = np.zeros(3)
        for image, vote in zip(nearest, votes):
            shares[labels[image]] += vote / votes.sum()
        np.testing.assert_allclose(probabilities, shares, atol=1e-5)


def test_of_equal_neighbors_the_first_count(small_chunks):
    features = np.ones((40, 2), "float32")
    labels = np.array([1] * 3 + [0] * 37)
    probe = NearestNeighbors(k=3).fit(features, labels)
    assert probe.predict(features[:2]).tolist() == [1, 1]


@pytest.mark.parametrize(
    "protocol",
    [RidgeProbe(), NearestNeighbors(k=3), LogisticProbe(cs=(0.1, 1.0))],
    ids=lambda protocol: type(protocol).__name__,
)
def test_rows_are_read_some_at_a_time(data, protocol, small_chunks):
    features, labels = data
    names = np.array(["bear", "cat", "dog"])[labels]
    lazy = Lazy(features)
    probe = protocol.fit(lazy, names)
    found = probe.predict_proba(lazy)
    assert lazy.most == 8
    whole = protocol.fit(features, names)
    np.testing.assert_array_equal(found, whole.predict_proba(features))
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    assert probe.classes_.tolist() == ["bear", "cat", "dog"]
    assert probe.score(lazy, names) == (probe.predict(lazy) == names).mean()
    assert probe.score(lazy, names) > 0.6


@pytest.mark.parametrize(
    "protocol",
    [RidgeProbe(), NearestNeighbors(k=3), LogisticProbe(cs=(0.1, 1.0))],
    ids=lambda protocol: type(protocol).__name__,
)
def test_what_cannot_be_probed_is_an_error(data, protocol):
    features, labels = data
    for bad, message in (
        ((features, labels[:5]), r"label for each row.*\(90, 7\) and \(5,\)"),
        ((features[0], labels), r"Expected features \(n, d\)"),
        ((features, np.zeros(90)), r"two classes. Received only \[0.0\]"),
        ((features, np.full(90, np.nan)), "Labels hold NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            protocol.fit(*bad)
    probe = protocol.fit(features, labels)
    with pytest.raises(ValueError, match="of 7 numbers. Received 6"):
        probe.predict(features[:, 1:])
    features[17, 2] = np.inf
    with pytest.raises(ValueError, match="first in row 17"):
        probe.predict(features)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RidgeProbe(l2=0), "l2 must be positive. Received: 0"),
        (lambda: LogisticProbe(cs=(1, -1)), "cs must be positive"),
        (lambda: LogisticProbe(held_out=0), "between 0 and 1"),
        (lambda: LogisticProbe(max_iter=0.5), "max_iter must be a positive"),
        (lambda: NearestNeighbors(k=0), "k must be a positive int"),
        (lambda: NearestNeighbors(temperature=0.0), "temperature must be"),
    ],
)
def test_wrong_protocols_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
