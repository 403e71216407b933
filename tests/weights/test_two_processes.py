"""Layouts that span two processes save and load every bit (JAX).

Two processes hold four simulated devices each, and talk over sockets.
"""

import os

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b import from_preset

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)

# Run jobs, each under a mesh of its own; print what was read for each tensor.
SCRIPT = """
import json, pathlib, sys
import jax
import keras
import safetensors.numpy

address, processes, number, scratch, jobs = map(json.loads, sys.argv[1:])
scratch = pathlib.Path(scratch)
if processes > 1:
    keras.distribution.initialize(address, processes, number)
assert jax.process_count() == processes
assert len(jax.devices()) == 8
assert len(jax.local_devices()) == 8 // processes

import keras_vit22b
from keras_vit22b.weights.safetensors_file import SafetensorsFile

whole, parts = [], {}
read, read_slice = SafetensorsFile.read, SafetensorsFile.read_slice


def count_whole(file, name):
    whole.append(name)
    return read(file, name)


def count_part(file, name, index):
    part = read_slice(file, name, index)
    parts[name] = parts.get(name, 0) + part.nbytes
    return part


SafetensorsFile.read, SafetensorsFile.read_slice = count_whole, count_part


def distribute(shape):
    mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*in_projection/kernel"] = (None, "model", None)
    layout[".*out_projection/kernel"] = ("model", None, None)
    layout["pooling/mlp_in/kernel"] = ("batch", "model")
    layout[".*position_embedding"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=layout, batch_dim_name="batch"
        )
    )


def stored(name):
    tensors = {}
    for path in (scratch / "alone" / name / "preset").glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def save(name, dtype, max_shard_size, path):
    model, rows = load(name, dtype, f"alone/{name}/preset")
    model.save_to_preset(scratch / path, max_shard_size=max_shard_size)
    return model, rows


def load(name, dtype, path):
    whole.clear(), parts.clear()
    model = keras_vit22b.from_preset(scratch / path, dtype=dtype)
    assert not whole, whole
    return model, describe(model, stored(name))


def describe(model, values):
    "Compare each device's slice; return bytes in all, held here, read here."
    rows = {}
    for name, variable in model.tensors().items():
        slices = {}
        for shard in variable.value.addressable_shards:
            slices[str(shard.index)] = shard.data.nbytes
            expected = values[name][shard.index].tobytes()
            assert jax.device_get(shard.data).tobytes() == expected, name
        rows[name] = [
            variable.value.nbytes, sum(slices.values()), parts.get(name)
        ]
    return rows


report = []
for verb, mesh, *arguments in jobs:
    distribute(mesh)
    _, rows = {"save": save, "load": load}[verb](*arguments)
    report.append(rows)
print(json.dumps(report))
"""
# Name to dtype and largest size of a file.
MODELS = {
    "one file": ("float32", "5GB"),
    "shards": ("float32", 2000),
    "bfloat16": ("bfloat16", 2000),
}
MESHES = ((1, 8), (2, 4))


def loads(*pairs):
    """Jobs that load each model under `mesh`, as saved under `writer`."""
    return [
        ["load", mesh, name, dtype, f"{writer}/{name}/preset"]
        for name, (dtype, _) in MODELS.items()
        for mesh, writer in pairs
    ]


def assert_each_process_reads_what_it_holds(jobs, reports):
    for report in reports:
        for (_, mesh, *_), rows in zip(jobs, report, strict=True):
            for tensor, (_, held, read) in rows.items():
                assert read == held, tensor
            spread = "pooling.mlp_in.kernel"
            if tuple(mesh) == (1, 8):
                spread = "blocks.0.in_projection.kernel"
            size, held, _ = rows[spread]
            assert held * len(reports) == size


@pytest.fixture(scope="module")
def saved(tmp_path_factory, run_processes):
    """What one process and two processes save of the same three models.

    The two load it again, and all slices are compared there.

    Returns:
        The folder, with `alone/NAME/preset` and `MESH/NAME/preset`.
    """
    scratch = tmp_path_factory.mktemp("processes")
    jobs = []
    for seed, (name, (dtype, size)) in enumerate(MODELS.items()):
        backbone = ViT22BBackbone(
            (8, 12, 3),
            4,
            num_layers=1,
            num_heads=8,
            hidden_dim=16,
            mlp_dim=32,
            dtype=dtype,
        )
        generator = np.random.default_rng(seed)
        for weight in backbone.weights:
            weight.assign(generator.normal(size=weight.shape))
        path = f"{name}/preset"
        backbone.save_to_preset(scratch / "alone" / path, max_shard_size=size)
        jobs += [
            ["save", mesh, name, dtype, size, f"{mesh}/{path}"]
            for mesh in MESHES
        ]
    jobs += loads(*((mesh, writer) for mesh in MESHES for writer in MESHES))
    reports = run_processes(SCRIPT, 2, str(scratch), jobs)
    assert len(reports) == 2
    assert_each_process_reads_what_it_holds(jobs, reports)
    return scratch


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_write_the_bytes_of_one(saved, name):
    expected = files_in(saved / "alone" / name / "preset")
    shards = [file for file in expected if file.endswith(".safetensors")]
    assert (len(shards) > 2) == (name != "one file")
    for mesh in MESHES:
        folder = saved / f"{mesh}" / name
        assert files_in(folder / "preset") == expected
        assert os.listdir(folder) == ["preset"]


def test_what_two_processes_saved_loads_on_eight_devices_of_one(
    saved, run_processes
):
    jobs = loads(((2, 4), (1, 8)), ((1, 8), (1, 8)))
    reports = run_processes(SCRIPT, 1, str(saved), jobs)
    assert_each_process_reads_what_it_holds(jobs, reports)


@pytest.mark.parametrize("name", MODELS)
def test_what_two_processes_saved_loads_on_one_device(saved, name):
    dtype = MODELS[name][0]
    loaded, expected = (
        from_preset(saved / writer / name / "preset", dtype=dtype).tensors()
        for writer in ("(1, 8)", "alone")
    )
    for tensor, variable in expected.items():
        ours = np.asarray(loaded[tensor].value)
        assert ours.tobytes() == np.asarray(variable.value).tobytes(), tensor
