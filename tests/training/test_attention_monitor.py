"""The monitor sees what attention does, in every block and head."""

import json
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
    monitor = AttentionMonitor(batch, every=1, min_entropy=0.999, stop=True)
    for runs in (1, 2):
        with pytest.warns(UserWarning, match="of log T, under 0.999"):
            fit(model, batch, monitor, epochs=5)
        assert len(monitor.records) == 1 + runs


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


def test_records_go_on_where_a_run_was_killed(make_classifier, batch, tmp_path):
    path = tmp_path / "attention.jsonl"
    model = make_classifier()
    fit(model, batch, AttentionMonitor(batch, every=1, path=path), epochs=2)
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    # The checkpoint was of step 2, and the last line was cut.
    path.write_text("".join(lines)[:-20])
    model.optimizer.iterations.assign(2)
    monitor = AttentionMonitor(batch, every=1, path=path)
    fit(model, batch, monitor)
    again = path.read_text().splitlines(keepends=True)
    assert again[:3] == lines[:3]
    assert [r["step"] for r in monitor.records] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(
        monitor.records[1]["mean_entropy"],
        json.loads(lines[1])["mean_entropy"],
    )


def test_another_model_begins_its_own_records(make_classifier, batch):
    monitor = AttentionMonitor(batch, every=2)
    fit(make_classifier(), batch, monitor)
    fit(make_classifier(num_layers=1), batch, monitor)
    assert [r["step"] for r in monitor.records] == [0, 2]
    assert monitor.records[0]["mean_entropy"].shape == (1, 2)


def test_a_model_with_the_norm_is_not_advised_to_use_it(make_classifier, batch):
    monitor = AttentionMonitor(batch, min_entropy=0.999)
    with pytest.warns(UserWarning, match="0.999. a lower learning rate"):
        fit(make_classifier(qk_norm="rms"), batch, monitor)
    with pytest.warns(UserWarning, match="qk_norm='rms', a lower"):
        fit(make_classifier(qk_norm=None), batch, monitor)


@pytest.mark.parametrize(
    "images, options, message",
    [
        (np.zeros((2, 8, 12, 3), "uint8"), {}, "must be floats.*uint8"),
        (np.zeros((0, 8, 12, 3)), {}, r"must be floats.*\(0, 8"),
        (None, {}, "must be floats"),
        (np.full((2, 8, 12, 3), np.nan), {}, "hold NaN"),
        (np.zeros((2, 8, 12, 3)), {"every": 1.5}, "an int of at least 1"),
        (np.zeros((2, 8, 12, 3)), {"max_logit": np.nan}, "max_logit must be"),
        (np.zeros((2, 8, 12, 3)), {"min_entropy": 5}, "below 1. Received: 5"),
        (np.zeros((2, 8, 12, 3)), {"plot": "x.foo"}, "a PNG. Received: 'x.foo"),
    ],
)
def test_wrong_options_are_errors(images, options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMonitor(images, **options)


def test_images_of_another_size_are_refused(make_classifier, batch):
    with pytest.raises(ValueError, match=r"takes images \(8, 12, 3\)"):
        fit(make_classifier(), batch, AttentionMonitor(batch[:, :4]))


def test_other_models_are_refused(batch):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="needs a ViT22BBackbone"):
        fit(model, batch, AttentionMonitor(batch))
