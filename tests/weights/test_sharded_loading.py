"""On a mesh of devices each reads its slice, and nobody the whole (JAX)."""

import json

import keras
import numpy as np
import pytest

from keras_vit22b import from_preset

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)

# On 8 devices: load under a layout, and count what is read of each tensor.
SCRIPT = """
import json, math, sys
import jax
import keras
import numpy as np

folder, options = sys.argv[1], json.loads(sys.argv[2])
assert len(jax.devices()) == 8
mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
layout = keras.distribution.LayoutMap(mesh)
layout[".*in_projection/kernel"] = (None, "model", None)
layout[".*out_projection/kernel"] = ("model", None, None)
layout["pooling/(query|key|value)/kernel"] = (None, "model", None)
layout["pooling/mlp_in/kernel"] = ("batch", "model")
layout[".*position_embedding"] = (None, "model")
keras.distribution.set_distribution(
    keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
)

import keras_vit22b
from keras_vit22b.weights.safetensors_file import SafetensorsFile

whole, parts = {}, {}
read, read_slice = SafetensorsFile.read, SafetensorsFile.read_slice


def count_whole(file, name):
    whole[name] = whole.get(name, 0) + 1
    return read(file, name)


def count_part(file, name, index):
    part = read_slice(file, name, index)
    parts.setdefault(name, []).append(part.nbytes)
    return part


SafetensorsFile.read, SafetensorsFile.read_slice = count_whole, count_part


def describe(model):
    rows = {}
    for name, variable in model.tensors().items():
        value = variable.value
        assert len(value.addressable_shards) == 8
        whole_value = np.asarray(value)
        for shard in value.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), whole_value[shard.index]
            )
        rows[name] = {
            "spec": [list(a) if isinstance(a, tuple) else a
                     for a in value.sharding.spec],
            "slice": max(s.data.nbytes for s in value.addressable_shards),
            "bytes": value.nbytes,
            "whole": whole.get(name, 0),
            "parts": parts.get(name, []),
        }
    return rows


model = keras_vit22b.from_preset(folder, **options)
rows = describe(model)
np.savez(
    f"{folder}/loaded.npz",
    **{n: np.asarray(v.value).astype("float32")
       for n, v in model.tensors().items()},
)
# The same into a model that has values.
whole.clear(), parts.clear()
other = keras_vit22b.from_preset(folder, load_weights=False, **options)
other.load_weights(f"{folder}/model.weights.json")
assert describe(other) == rows
for ours, theirs in zip(model.weights, other.weights):
    np.testing.assert_array_equal(np.asarray(ours.value),
                                  np.asarray(theirs.value))
if not options:
    # And what is saved from the mesh is what was loaded.
    model.save_to_preset(f"{folder}/again", max_shard_size=2000)
outputs = model.predict(np.ones((8, *model.image_shape), "float32"), verbose=0)
np.save(f"{folder}/outputs.npy", outputs["pooled_output"])
print(json.dumps(rows))
"""


@pytest.fixture
def load(run_on_eight_devices):
    def load(folder, **options):
        return run_on_eight_devices(SCRIPT, folder, json.dumps(options))

    return load


@pytest.fixture
def folder(make_backbone, tmp_path):
    backbone = make_backbone(num_heads=4, random=True)
    backbone.save_to_preset(tmp_path, max_shard_size=2000)
    assert len(list(tmp_path.glob("model-*"))) > 2
    return tmp_path


def values(backbone):
    return {
        name: keras.ops.convert_to_numpy(v.value).astype("float32")
        for name, v in backbone.tensors().items()
    }


def assert_loaded(folder, expected):
    loaded = np.load(folder / "loaded.npz")
    assert set(loaded) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name], array)


def assert_only_slices_are_read(rows):
    """Each slice once, however many devices hold it."""
    sharded = {n for n, row in rows.items() if row["slice"] < row["bytes"]}
    assert sharded >= {
        "blocks.0.in_projection.kernel",
        "blocks.1.out_projection.kernel",
        "pooling.mlp_in.kernel",
    }
    for name, row in rows.items():
        assert row["whole"] == 0, name
        assert set(row["parts"]) == {row["slice"]}, name
        assert sum(row["parts"]) == row["bytes"], name


def test_each_device_reads_its_slice_and_no_more(folder, load):
    rows = load(folder)
    assert_only_slices_are_read(rows)
    backbone = from_preset(folder)
    assert_loaded(folder, values(backbone))
    assert rows["pooling.mlp_in.kernel"]["spec"] == ["batch", "model"]
    assert len(rows["pooling.mlp_in.kernel"]["parts"]) == 8
    again = from_preset(folder / "again")
    for name, array in values(again).items():
        np.testing.assert_array_equal(array, values(backbone)[name])
    images = np.ones((8, *backbone.image_shape), "float32")
    np.testing.assert_allclose(
        np.load(folder / "outputs.npy"),
        backbone.predict(images, verbose=0)["pooled_output"],
        rtol=1e-4,
        atol=1e-5,
    )


def test_casts_and_resizing_are_those_of_one_device(folder, load):
    options = {"dtype": "bfloat16", "image_shape": (16, 16, 3)}
    rows = load(folder, **options)
    # Each number of a table that is resized needs all others.
    del rows["position_embedding"]
    for row in rows.values():  # The file has numbers of four bytes, not two.
        row["parts"] = [size // 2 for size in row["parts"]]
    assert_only_slices_are_read(rows)
    assert_loaded(folder, values(from_preset(folder, **options)))
