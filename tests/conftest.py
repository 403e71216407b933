"""Fixtures that tests of several rooms share."""

import json
import os
import socket
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

if keras.backend.backend() == "torch":
    import torch

    def as_array(tensor, dtype=None, copy=None):
        """Let NumPy compare tensors that would want a gradient."""
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        array = tensor.numpy()
        return array if dtype is None else array.astype(dtype)

    torch.Tensor.__array__ = as_array


def pytest_collection_modifyitems(items):
    """Leave to JAX what is the same on any backend."""
    if keras.backend.backend() == "jax":
        return
    skip = pytest.mark.skip(reason="The same on any backend; JAX runs it.")
    for item in items:
        if item.get_closest_marker("any_backend"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_seed_and_policy():
    """Start each test from one seed, and undo what it sets globally."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_image_data_format("channels_last")


@pytest.fixture
def make_backbone():
    """Make a tiny backbone; `random=True` moves every weight off its start."""

    def make(image_shape=(8, 12, 3), patch_size=4, *, random=False, **options):
        from keras_vit22b import ViT22BBackbone

        sizes = {
            "num_layers": 2,
            "num_heads": 2,
            "hidden_dim": 8,
            "mlp_dim": 16,
        }
        backbone = ViT22BBackbone(image_shape, patch_size, **sizes | options)
        if random:
            randomize(backbone)
        return backbone

    return make


@pytest.fixture
def images():
    """Three images for the backbone of `make_backbone`."""
    return np.random.default_rng(1).normal(size=(3, 8, 12, 3)).astype("float32")


@pytest.fixture(name="randomize")
def randomize_fixture():
    """Give a layer or model weights that no initializer would give."""
    return randomize


def randomize(model, seed=2):
    generator = np.random.default_rng(seed)
    for weight in model.weights:
        # Wide, so that a wrong norm, scale or nonlinearity shows.
        weight.assign(generator.normal(0.2, 0.5, weight.shape))


@pytest.fixture
def arrays():
    """Copy a layer's or a model's weights to NumPy arrays, in order."""

    def arrays(model):
        # Copied, since on torch the arrays would change with the weights.
        return [
            keras.ops.convert_to_numpy(w.value).copy() for w in model.weights
        ]

    return arrays


def simulated_devices(count):
    """Return the environment of a process that has so many CPU devices."""
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        # Collectives of simulated devices can hang when launched
        # asynchronously, or when all threads wait in different ones.
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        "NPROC": "64",
        "JAX_PLATFORMS": "cpu",
        # Optimizing machine code takes longer than it saves here.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


@pytest.fixture(scope="session")
def run_on_eight_devices():
    """Run Python code on 8 CPU devices; return the JSON of its last line."""

    def run(code, *arguments):
        process = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=simulated_devices(8),
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(process.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def run_processes():
    """Run Python code in processes that hold eight CPU devices in all.

    The code gets JSON: the address of process 0, the number of processes, its
    own, and the arguments.

    Returns:
        What each process prints last, which is JSON too.
    """

    def run(code, processes, *arguments):
        env = simulated_devices(8 // processes) | {
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        }
        address, started = f"127.0.0.1:{free_port()}", []
        try:
            for number in range(processes):
                values = (address, processes, number, *arguments)
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-c", code, *map(json.dumps, values)],
                        env=env,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            outputs = [process.communicate(timeout=900) for process in started]
        finally:
            for process in started:
                process.kill()
        for process, (_, log) in zip(started, outputs):
            assert process.returncode == 0, log
        return [json.loads(text.splitlines()[-1]) for text, _ in outputs]

    return run


@pytest.fixture(name="free_port", scope="session")
def free_port_fixture():
    """Find a port on which nothing listens."""
    return free_port


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
