"""The linear probe and the few-shot protocol."""

import numpy as np
import pytest

from keras_vit22b.probing import FewShot
from keras_vit22b.probing import LinearProbe
from keras_vit22b.probing import plot_few_shot


def blobs(count=20, classes=3, seed=0):
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), count)
    centres = 4 * np.eye(classes, 6)
    return centres[labels] + generator.normal(size=(len(labels), 6)), labels


def test_probe_ignores_the_scale_and_shift_of_features():
    features, labels = blobs()
    probe = LinearProbe()
    first = probe.fit(features, labels).predict_proba(features)
    moved = features * [1, 10, 100, 1000, 0.1, 0.01] + 7
    second = probe.fit(moved, labels).predict_proba(moved)
    np.testing.assert_allclose(first, second, atol=1e-3)


@pytest.mark.parametrize(
    "features, labels, message",
    [
        (np.full((4, 2), np.nan), [0, 0, 1, 1], "NaN"),
        (np.zeros((4, 2)), [0, 1, 1], "shapes"),
        (np.zeros((4, 2)), [1, 1, 1, 1], "two classes"),
    ],
)
def test_probe_refuses_unusable_features(features, labels, message):
    with pytest.raises(ValueError, match=message):
        LinearProbe().fit(features, labels)


def test_shots_share_test_images_and_nest():
    _, labels = blobs()
    protocol = FewShot(shots=(1, 5), seeds=(0,))
    pools, test = protocol._split(labels, seed=3)
    pool = np.concatenate(pools)
    assert [len(p) for p in pools] == [5, 5, 5]
    assert sorted([*pool, *test]) == list(range(60))
    again, _ = protocol._split(labels, seed=3)
    assert all((a == b).all() for a, b in zip(pools, again))


def test_separable_features_reach_full_accuracy_and_noise_does_not():
    features, labels = blobs()
    protocol = FewShot(shots=(5,), seeds=(0, 1))
    assert min(protocol.evaluate(features, labels)[5]) > 0.9
    noise = np.random.default_rng(1).normal(size=features.shape)
    assert max(protocol.evaluate(noise, labels)[5]) < 0.6


def test_a_class_with_too_few_images_is_named():
    features, labels = blobs(count=5)
    with pytest.raises(ValueError, match="'b' has 4 images.*at most 3 shots"):
        FewShot(shots=(5,)).evaluate(
            np.delete(features, 5, axis=0), np.delete(labels, 5), list("abc")
        )


@pytest.mark.parametrize(
    "options",
    [
        {"shots": ()},
        {"shots": (0,)},
        {"shots": 5},
        {"shots": (1.5,)},
        {"shots": (1, 1)},
        {"seeds": ()},
        {"seeds": (-1,)},
    ],
)
def test_meaningless_protocols_are_refused(options):
    with pytest.raises(ValueError, match="must be different ints"):
        FewShot(**options)


def test_more_shots_contain_the_fewer(monkeypatch):
    seen = []

    def fit(self, features, labels):
        seen.append({tuple(row) for row in features})
        return original(self, features, labels)

    original = LinearProbe.fit
    monkeypatch.setattr(LinearProbe, "fit", fit)
    FewShot(shots=(1, 5), seeds=(0,)).evaluate(*blobs())
    assert len(seen[0]) == 3 and len(seen[1]) == 15
    assert seen[0] < seen[1]


def test_labels_may_be_names():
    features, labels = blobs()
    names = np.array(["a", "b", "c"])[labels]
    protocol = FewShot(shots=(5,), seeds=(0,))
    assert protocol.evaluate(features, names) == protocol.evaluate(
        features, labels
    )


def test_plot_is_written(tmp_path):
    path = tmp_path / "plot.png"
    scores = {1: [0.5, 0.6], 5: [0.7, 0.8]}
    plot_few_shot({"features": scores, "pixels": scores}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
