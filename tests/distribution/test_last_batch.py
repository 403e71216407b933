"""Data that do not divide over a mesh give the numbers of one device."""

import keras
import numpy as np
import pytest

from keras_vit22b.distribution.padding import pad_batch
from keras_vit22b.distribution.padding import padded_data

# 13 images in batches of 6, 6 and 1: none divides over 8 devices.
SCRIPT = """
import json, sys, warnings
import keras
import numpy as np
import keras_vit22b
try:
    import torch
except ImportError:
    torch = None
try:
    import tensorflow as tf
except ImportError:
    tf = None

warnings.simplefilter("ignore")
kind = sys.argv[1]
if kind == "model parallel":
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
    layouts = keras_vit22b.ViT22BBackbone.get_layout_map(mesh, fsdp=True)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch"
        )
    )
if kind == "data parallel":
    keras.distribution.set_distribution(keras.distribution.DataParallel())

generator = np.random.default_rng(0)
x = generator.normal(size=(13, 8, 8, 1)).astype("float32")
y = generator.integers(0, 3, 13)
weights = generator.uniform(0.5, 2, 13).astype("float32")
raw = generator.integers(0, 256, (13, 8, 8, 1), "u1")
SPARSE = keras.losses.SparseCategoricalCrossentropy


def make(loss=None, preprocessor=None, **options):
    keras.utils.set_random_seed(0)
    backbone = keras_vit22b.ViT22BBackbone(
        (8, 8, 1), 4, num_layers=1, num_heads=4, hidden_dim=16, mlp_dim=32,
        pooling="mean",
    )
    model = keras_vit22b.ViT22BImageClassifier(
        backbone, 3, preprocessor=preprocessor
    )
    generator = np.random.default_rng(1)
    for weight in model.weights:
        weight.assign(generator.normal(0.1, 0.3, weight.shape))
    loss = loss or SPARSE(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, **options)
    return model


class Batches(keras.utils.PyDataset):
    num_batches = 3

    def __getitem__(self, i):
        rows = slice(6 * i, 6 * i + 6)
        return x[rows], y[rows]


class Samples:
    def __len__(self):
        return 13

    def __getitem__(self, i):
        return torch.tensor(x[i]), torch.tensor(y[i])


def endless():
    while True:
        yield from (Batches()[i] for i in range(3))


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(6)


results = {}


def record(name, history, model):
    results[name] = {k: np.ravel(v).tolist() for k, v in history.items()}
    kernel = keras.ops.convert_to_numpy(model.head.kernel.value)
    results[name]["kernel"] = np.ravel(kernel).tolist()


def fit(name, *data, model=None, **options):
    model = model or shared  # It trains on; what is compiled is compiled once.
    options = {"epochs": 2, "verbose": 0, "shuffle": False} | options
    record(name, model.fit(*data, **options).history, model)


shared = make(metrics=["accuracy"])
fit("arrays", x, y, batch_size=6)
model = make(metrics=["accuracy"])
record("evaluate", model.evaluate(
    x, y, batch_size=6, verbose=0, return_dict=True), model)
record("predict", {"": model.predict(x, batch_size=6, verbose=0)}, model)
if kind == "data parallel":
    print(json.dumps(results))
    sys.exit()

datasets = {"arrays": x, "PyDataset": Batches()}
fit("tensors", keras.ops.array(x), keras.ops.array(y), batch_size=6)
fit("default batch", x, y)
fit("steps", x, y, steps_per_epoch=3)
fit("PyDataset", Batches())
fit("workers", Batches(workers=2))
fit("generator", endless(), steps_per_epoch=3)
fit("split", x, y, batch_size=6, validation_split=0.3)
fit("validation", x, y, batch_size=6, validation_data=(x[:5], y[:5]),
    validation_batch_size=3)
classes = {0: 0.5, 1: 3.0, 2: 1.0}
fit("class_weight", x, y, batch_size=6, class_weight=classes)
fit("sample_weight", x, y, batch_size=6, sample_weight=weights)
for reduction in ("sum", "mean", "mean_with_sample_weight"):
    loss = SPARSE(from_logits=True, reduction=reduction)
    fit(reduction, x, y, batch_size=6, sample_weight=weights, model=make(loss))
fit("weighted_metrics", x, y, batch_size=6, sample_weight=weights,
    model=make(metrics=[], weighted_metrics=["accuracy"]))
one_hot = np.eye(3, dtype="float32")[y]
several = make(
    keras.losses.CategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.AUC(from_logits=True, name="auc"),
             keras.metrics.F1Score(average="macro", name="f1")],
)
fit("one-hot", x, one_hot, batch_size=6, model=several, class_weight=classes)
fit("a string", x, one_hot, batch_size=6, model=make("mse", metrics=["mae"]))
steps = make(steps_per_execution=2)
fit("steps_per_execution", x, y, batch_size=6, model=steps)
model = make(metrics=["accuracy"])
model.compile(keras.optimizers.AdamW(gradient_accumulation_steps=2), "auto")
fit("accumulation", x, y, batch_size=6, model=model)
if torch:
    datasets["torch"] = torch.utils.data.DataLoader(Samples(), batch_size=6)
    fit("torch", datasets["torch"])
if tf:
    datasets["dataset"] = dataset(x)
    datasets["labelled"] = dataset(x, y)
    fit("dataset", dataset(x, y))
    fit("dataset, weights", dataset(x, y, weights))
    fit("class_weight, dataset", dataset(x, y), class_weight=classes)
    fit("validation, dataset", x, y, batch_size=6,
        validation_data=dataset(x[:5], y[:5], weights[:5]))
    record("evaluate, dataset", model.evaluate(
        dataset(x, y, weights), verbose=0, return_dict=True), model)

for name, data in datasets.items():
    options = {"batch_size": 6} if name == "arrays" else {}
    for which, what in {
        "classifier": model, "backbone": model.backbone, "steps": steps
    }.items():
        outputs = what.predict(data, verbose=0, **options)
        outputs = outputs if isinstance(outputs, dict) else {"": outputs}
        assert all(len(o) == 13 for o in outputs.values())
        record(f"predict, {name}, {which}", outputs, model)

converter = keras_vit22b.ViT22BImageConverter((8, 8), channels=1)
pipeline = {"preprocessor": converter.make_preprocessor()}
model = make(metrics=["accuracy"], **pipeline)
record("raw predict", {"": model.predict(raw, batch_size=6, verbose=0)}, model)
record("raw evaluate", model.evaluate(
    raw, y, batch_size=6, verbose=0, return_dict=True), model)
fit("raw fit", raw, y, batch_size=6, model=model, validation_split=0.3)
if tf:
    fit("raw dataset", dataset(raw, y), model=make(**pipeline))
for images in (1, 11):
    features = keras_vit22b.extract_features(
        model.backbone, raw[:images], image_converter=converter, batch_size=5
    )
    record(f"features of {images}", {"": features}, model)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def one_device(run_on_eight_devices):
    return run_on_eight_devices(SCRIPT, "one device")


@pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)
@pytest.mark.parametrize("kind", ["model parallel", "data parallel"])
def test_numbers_are_those_of_one_device(
    run_on_eight_devices, one_device, kind
):
    results = run_on_eight_devices(SCRIPT, kind)
    assert results.keys() == one_device.keys() or kind == "data parallel"
    for case, numbers in results.items():
        assert numbers.keys() == one_device[case].keys(), case
        for name, values in numbers.items():
            np.testing.assert_allclose(
                values,
                one_device[case][name],
                rtol=1e-4,
                atol=1e-6,
                err_msg=f"{case}: {name}",
            )


def test_added_rows_repeat_the_last_with_a_weight_that_is_not_a_number():
    x, y = np.arange(10).reshape(5, 2), np.arange(5)
    padded_x, padded_y, weights = pad_batch((x, y), multiple=4)
    np.testing.assert_array_equal(padded_x[5:], [x[-1]] * 3)
    np.testing.assert_array_equal(padded_y, [0, 1, 2, 3, 4, 4, 4, 4])
    np.testing.assert_array_equal(weights, [1.0] * 5 + [np.nan] * 3)


def test_a_batch_that_divides_stays_as_it_is():
    x, y, w = np.ones((8, 2)), np.arange(8), np.full(8, 2.0)
    for ours, theirs in zip(pad_batch((x, y, w), multiple=4), (x, y, w)):
        np.testing.assert_array_equal(ours, theirs)


def test_predict_gets_which_rows_are_real():
    x, real = pad_batch((np.ones((3, 2)),), multiple=4, predict=True)
    assert len(x) == 4
    np.testing.assert_array_equal(real, [True, True, True, False])


def test_arrays_are_shuffled_each_epoch():
    x = np.arange(20)
    data = padded_data(x, x, batch_size=8, shuffle=True)
    epochs = []
    for _ in range(2):
        data.on_epoch_begin()
        batches = [data[i] for i in range(data.num_batches)]
        epochs.append(np.concatenate([b[0] for b in batches]))
        for images, labels, _ in batches:
            np.testing.assert_array_equal(images, labels)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert (epochs[0] != x).any() and (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((np.ones((3, 2)),), {}, "have no labels"),
        (
            (np.ones(3), np.ones(3), np.ones(3)),
            {"class_weight": {1: 2.0}},
            "but not both",
        ),
    ],
)
def test_a_batch_that_cannot_be_weighted_is_an_error(data, options, message):
    with pytest.raises(ValueError, match=message):
        pad_batch(data, multiple=4, **options)


def test_data_of_unknown_kind_are_an_error():
    with pytest.raises(ValueError, match="must be arrays.*Received: str"):
        padded_data("photos/")
    with pytest.raises(ValueError, match=r"as many. Received: \[3, 4\]"):
        padded_data(np.ones((3, 2)), np.ones(4))
