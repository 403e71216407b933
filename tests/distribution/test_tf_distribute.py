"""TensorFlow: tf.distribute trains as one device does; layouts are refused."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BBackbone

tensorflow_only = pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="Of the TensorFlow backend."
)

SCRIPT = """
import json, sys
import keras
import numpy as np
import tensorflow as tf

kind = sys.argv[1]
if kind == "mirrored":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 4
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    assert strategy.num_replicas_in_sync == 4
elif kind == "workers":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
else:
    strategy = tf.distribute.get_strategy()

import keras_vit22b

generator = np.random.default_rng(0)
x = generator.normal(size=(24, 8, 8, 1)).astype("float32")
y = generator.integers(0, 3, 24)
with strategy.scope():
    backbone = keras_vit22b.ViT22BBackbone(
        (8, 8, 1), 4, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    model = keras_vit22b.ViT22BImageClassifier(backbone, 3)
    generator = np.random.default_rng(1)
    for weight in model.weights:
        weight.assign(generator.normal(0.1, 0.3, weight.shape))
    model.compile(
        keras.optimizers.AdamW(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
history = model.fit(data, epochs=3, verbose=0, shuffle=False).history
result = {
    **history,
    "evaluate": model.evaluate(data, verbose=0),
    "probe": np.ravel(model.backbone.pooler.probe.numpy()).tolist(),
}
print(json.dumps(result))
"""


def start(kind, **env):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind],
        env={**os.environ, "KERAS_BACKEND": "tensorflow", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def one_device():
    return finish(start("one device"))


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            result[name], values, rtol=1e-4, atol=1e-5, err_msg=name
        )


@tensorflow_only
def test_four_mirrored_devices_train_as_one(one_device):
    assert one_device["loss"][-1] < one_device["loss"][0]
    assert_same(finish(start("mirrored")), one_device)


@tensorflow_only
def test_two_workers_train_as_one(one_device, free_port):
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = [
        start(
            "workers",
            TF_CONFIG=json.dumps(
                {
                    "cluster": {"worker": workers},
                    "task": {"type": "worker", "index": i},
                }
            ),
        )
        for i in range(2)
    ]
    for process in processes:
        assert_same(finish(process), one_device)


@pytest.mark.skipif(keras.config.backend() == "jax", reason="JAX has layouts.")
def test_layouts_are_refused_with_what_to_do_instead(make_backbone):
    backend = keras.config.backend()
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], devices=np.arange(4)
    )
    message = f"keras.distribution has no effect on {backend}.*KERAS_BACKEND"
    with pytest.raises(ValueError, match=message) as error:
        ViT22BBackbone.get_layout_map(mesh)
    assert ("MirroredStrategy" in str(error.value)) == (backend == "tensorflow")
    distribution = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh)
    )
    with distribution.scope(), pytest.raises(ValueError, match=message):
        make_backbone()
