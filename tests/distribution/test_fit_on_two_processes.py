"""`fit` of two processes, which talk over sockets, is that of one device."""

import keras
import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)

# Run jobs, each on a mesh of its own or on one device; print their numbers.
SCRIPT = """
import json, pathlib, sys
import jax
import keras
import numpy as np
import tensorflow as tf

address, processes, number, folder, jobs = map(json.loads, sys.argv[1:])
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import distribution

if processes > 1:
    distribution.initialize(address, processes, number)
assert len(jax.devices()) == 8
assert len(jax.local_devices()) == 8 // processes
jax.config.update("jax_default_matmul_precision", "highest")
folder = pathlib.Path(folder)
generator = np.random.default_rng(0)
images = generator.normal(size=(48, 8, 8, 3)).astype("float32")
labels = np.arange(48) % 5


class Losses(keras.callbacks.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, batch, logs):
        self.values.append(float(logs["loss"]))


def load(path):
    model = ViT22BImageClassifier.from_preset(folder / path)
    model.compile(keras.optimizers.AdamW(0.01))
    return model


def fit(data, options, path=None):
    model, losses = load("start"), Losses()
    model.fit(*data, **options, shuffle=False, verbose=0, callbacks=[losses])
    if path:
        model.save_to_preset(folder / path)
    return losses.values


def evaluate(data, options, path):
    return load(path).evaluate(*data, **options, verbose=0)


def run(verb, mesh, *arguments, whole_batches=False):
    share, shares = 0, 1
    keras.distribution.set_distribution(None)
    if mesh is not None:
        mesh = distribution.device_mesh(batch=mesh[0], model=mesh[1])
        layouts = ViT22BImageClassifier.get_layout_map(mesh, fsdp=True)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=layouts,
                batch_dim_name="batch",
                auto_shard_dataset=whole_batches,
            )
        )
        share, shares = distribution.data_share(mesh)
    if whole_batches:
        data = tf.data.Dataset.from_tensor_slices((images, labels))
        numbers = verb((data.batch(16),), {}, *arguments)
    else:
        data = images[share::shares], labels[share::shares]
        options = {"batch_size": 16 // shares}
        numbers = verb(data, options, *arguments)
    return [share, shares], numbers


verbs = {"fit": fit, "evaluate": evaluate}
results = [run(verbs[verb], *rest, **options) for verb, *rest, options in jobs]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the start of all training lies, and what is trained from it."""
    folder = tmp_path_factory.mktemp("two processes")
    backbone = ViT22BBackbone(
        (8, 8, 3),
        4,
        num_layers=1,
        num_heads=8,
        hidden_dim=16,
        mlp_dim=32,
        pooling="mean",
    )
    model = ViT22BImageClassifier(backbone, 5)
    model.head.kernel.assign(keras.random.normal(model.head.kernel.shape))
    model.save_to_preset(folder / "start")
    return folder


@pytest.fixture(scope="module")
def two_processes(folder, run_processes):
    """Share of the data and losses, of each process for each mesh."""
    jobs = [
        ["fit", (2, 4), "trained", {}],
        ["fit", (1, 8), {}],
        ["fit", (2, 4), {"whole_batches": True}],
    ]
    return run_processes(SCRIPT, 2, str(folder), jobs)


@pytest.fixture(scope="module")
def one_process(folder, two_processes, run_processes):
    """The losses of one device, and what becomes of the saved model."""
    jobs = [
        ["fit", None, {}],
        ["evaluate", None, "trained", {}],
        ["evaluate", (4, 2), "trained", {}],
    ]
    (results,) = run_processes(SCRIPT, 1, str(folder), jobs)
    return [numbers for _, numbers in results]


def test_losses_are_those_of_one_device(two_processes, one_process):
    losses = one_process[0]
    assert len(losses) == 3
    for process in two_processes:
        for _, found in process:
            assert found == pytest.approx(losses, abs=1e-5)


def test_processes_share_the_images_where_they_share_no_row(two_processes):
    shares = [[share for share, _ in process] for process in two_processes]
    assert shares == [
        [[0, 2], [0, 1], [0, 2]],
        [[1, 2], [0, 1], [1, 2]],
    ]


def test_what_two_processes_trained_loads_on_other_meshes(one_process):
    losses, on_one_device, on_other_mesh = one_process
    assert on_other_mesh == pytest.approx(on_one_device, abs=1e-5)
    assert on_one_device[0] < losses[0] - 1e-3
