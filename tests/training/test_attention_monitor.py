"""The monitor sees what attention does, in every block and head."""

import math
import warnings

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.training import AttentionMonitor

LABELS = np.arange(8) % 3


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    return generator.normal(size=(8, 8, 12, 3)).astype("float32")


@pytest.fixture
def make_classifier(make_backbone):
    def make(**options):
        model = ViT22BImageClassifier(make_backbone(**options), 3)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return make


def fit(model, batch, monitor, **options):
    return model.fit(
        batch,
        LABELS,
        batch_size=4,
        verbose=0,
        callbacks=[monitor],
        **options,
    )


@pytest.mark.parametrize("block", ["parallel", "sequential"])
@pytest.mark.parametrize("qk_norm", [None, "rms", "layer"])
def test_records_are_those_of_the_attention_maps(
    make_classifier, batch, block, qk_norm
):
    model = make_classifier(
        block=block, qk_norm=qk_norm, random=True, pre_norm=True
    )
    monitor = AttentionMonitor(batch, every=2)
    fit(model, batch, monitor)
    assert [r["step"] for r in monitor.records] == [0, 2]
    backbone, record = model.backbone, monitor.records[-1]
    tokens = backbone.pre_norm_layer(backbone.patch_embedding(batch))
    for index, layer in enumerate(backbone.blocks):
        tokens, maps = layer(tokens, return_attention=True)
        entropy = keras.ops.convert_to_numpy(maps.entropy)
        logits = keras.ops.convert_to_numpy(maps.largest_logit)
        for name, wanted in (
            ("mean_entropy", entropy.mean((0, 2))),
            ("min_entropy", entropy.min((0, 2))),
            ("largest_logit", logits.max(0)),
        ):
            np.testing.assert_allclose(
                record[name][index], wanted, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_epochs_log_the_worst_head(make_classifier, batch):
    model = make_classifier()
    monitor = AttentionMonitor(batch, every=1)
    history = fit(model, batch, monitor, epochs=2).history
    assert len(monitor.records) == 5
    last = monitor.records[-1]
    share = last["mean_entropy"].min() / math.log(6)
    assert history["attention_entropy"][-1] == pytest.approx(share)
    assert history["attention_logit"][-1] == last["largest_logit"].max()


def test_a_model_near_collapse_is_warned_of_once(make_classifier, batch):
    model = make_classifier(qk_norm=None)
    monitor = AttentionMonitor(batch, every=1, max_logit=1e-6, min_entropy=0.0)
    message = r"block 0, head 0 is near collapse at step 0: largest logit"
    with pytest.warns(UserWarning, match=message) as caught:
        fit(model, batch, monitor, epochs=2)
    assert len([w for w in caught if "collapse" in str(w.message)]) == 1
    assert len(monitor.warned) == 1
    assert len(monitor.records) == 5


def test_it_can_stop_a_run(make_classifier, batch):
    model = make_classifier()
    monitor = AttentionMonitor(batch, every=1, min_entropy=2.0, stop=True)
    with pytest.warns(UserWarning, match="of log T, under 2"):
        fit(model, batch, monitor, epochs=5)
    assert len(monitor.records) <= 2


def test_numbers_that_are_none_are_warned_of(make_classifier, batch):
    model = make_classifier()
    weight = model.backbone.blocks[1].norm.scale
    weight.assign(np.full(weight.shape, np.nan, "float32"))
    monitor = AttentionMonitor(batch, every=10)
    with pytest.warns(UserWarning, match="block 1, head 0 .*nan"):
        fit(model, batch, monitor)


def test_a_model_that_trains_well_is_not_warned_of(make_classifier, batch):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*collapse.*")
        fit(make_classifier(), batch, AttentionMonitor(batch, every=1))


def test_steps_go_on_where_a_run_resumes(make_classifier, batch):
    model = make_classifier()
    fit(model, batch, AttentionMonitor(batch))
    monitor = AttentionMonitor(batch, every=1)
    fit(model, batch, monitor)
    assert [r["step"] for r in monitor.records] == [2, 3, 4]


def test_steps_are_batches_however_many_run_at_once(make_backbone, batch):
    model = ViT22BImageClassifier(make_backbone(), 3)
    model.compile(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        steps_per_execution=2,
    )
    monitor = AttentionMonitor(batch, every=4)
    model.fit(
        batch,
        LABELS,
        batch_size=1,
        epochs=2,
        verbose=0,
        callbacks=[monitor],
    )
    assert [r["step"] for r in monitor.records] == [0, 4, 8, 12, 16]


def test_pictures_and_events_are_written(make_classifier, batch, tmp_path):
    monitor = AttentionMonitor(
        batch,
        every=1,
        plot=tmp_path / "new" / "attention.png",
        log_dir=tmp_path / "events",
    )
    fit(make_classifier(), batch, monitor)
    png = (tmp_path / "new" / "attention.png").read_bytes()
    assert png[:4] == b"\x89PNG"
    (events,) = (tmp_path / "events").iterdir()
    content = events.read_bytes()
    for block in (0, 1):
        assert b"attention/mean_entropy/block_%d" % block in content


def test_other_models_are_refused(batch):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="needs a ViT22BBackbone"):
        fit(model, batch, AttentionMonitor(batch))
