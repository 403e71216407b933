"""Every weight has one row, and each row splits what it says."""

import re

import keras
import numpy as np
import pytest

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.distribution.sharding import TABLE
from keras_vit22b.distribution.sharding import indivisible

jax_only = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Layouts are of the JAX backend."
)

OPTIONS = {
    "paper": {},
    "all options": {
        "norm": "layer",
        "qk_norm": "layer",
        "use_qkv_bias": True,
        "num_registers": 2,
        "layer_scale": 0.1,
        "pre_norm": True,
        "dropout_rate": 0.1,
    },
    "sequential": {
        "block": "sequential",
        "norm": "layer",
        "use_qkv_bias": True,
        "layer_scale": 0.1,
        "pooling": "cls",
    },
}


def rows_of(path):
    return [row.name for row in TABLE if row.matches(path)]


def assert_each_has_one_row(variables):
    rows = {v.path: rows_of(v.path) for v in variables}
    assert not {p: r for p, r in rows.items() if len(r) != 1}
    return {path: names[0] for path, names in rows.items()}


def enable_lora(model):
    for layer in model._flatten_layers():
        # Layers that hold LoRA already were reached by another path.
        if getattr(layer, "lora_enabled", True) is False:
            layer.enable_lora(2)


def mesh_of(batch, model):
    """A mesh of devices that need not exist."""
    return keras.distribution.DeviceMesh(
        (batch, model), ["batch", "model"], devices=np.arange(batch * model)
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_weight_has_one_row(make_backbone, options):
    model = ViT22BImageClassifier(make_backbone(**options), 3)
    assert_each_has_one_row(model.variables)


@pytest.mark.parametrize("mode", ["int8", "int4", "float8", None])
@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_quantized_and_lora_weights_have_one_row(make_backbone, mode, block):
    model = ViT22BImageClassifier(make_backbone(block=block), 3)
    if mode:
        model.quantize(mode)
    if mode != "float8":  # Where Keras has no LoRA.
        enable_lora(model)
    rows = set(assert_each_has_one_row(model.variables).values())
    assert ("quantization" in rows) == bool(mode)
    assert ("into_heads.lora_a" in rows) == (mode != "float8")


def test_every_row_is_of_use(make_backbone):
    """No pattern is misspelt: each matches a weight of some model."""
    used = set()
    for options in OPTIONS.values():
        model = ViT22BImageClassifier(make_backbone(**options), 3)
        enable_lora(model)
        used |= set(assert_each_has_one_row(model.variables).values())
    assert {row.name for row in TABLE} - used == {"quantization"}


def test_the_seed_of_a_classifiers_dropout_has_a_row(make_backbone):
    model = ViT22BImageClassifier(make_backbone(), 3, dropout=0.5)
    assert "seeds" in assert_each_has_one_row(model.variables).values()


@jax_only
@pytest.mark.parametrize("cls", [ViT22BBackbone, ViT22BImageClassifier])
def test_layout_map_has_the_axes_of_the_table(cls):
    plain = cls.get_layout_map(mesh_of(2, 4))
    sharded = cls.get_layout_map(mesh_of(2, 4), fsdp=True)
    for path, axes, fsdp_axes in [
        ("block_0/in_projection/kernel", (None, "model"), ("batch", "model")),
        ("block_11/qkv_projection/kernel", (None, "model"), ("batch", "model")),
        ("block_0/out_projection/kernel", ("model",), ("model", None, "batch")),
        ("pooling/mlp_out/kernel", ("model",), ("model", "batch")),
        ("block_0/mlp_bias", ("model",), ("model",)),
        ("block_0/norm/scale", (), ()),
    ]:
        assert plain[path].axes == axes
        assert sharded[path].axes == fsdp_axes


@jax_only
def test_fsdp_splits_the_head_over_the_longer_axis():
    for mesh, axes in [((2, 4), ("model",)), ((4, 2), ("batch",))]:
        layouts = ViT22BBackbone.get_layout_map(mesh_of(*mesh), fsdp=True)
        assert layouts["head/kernel"].axes == axes


@jax_only
def test_a_mesh_with_other_axes_is_an_error():
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["data", "model"], devices=np.arange(4)
    )
    with pytest.raises(ValueError, match=r"'batch' and 'model'.*'data'"):
        ViT22BBackbone.get_layout_map(mesh)
    with pytest.raises(ValueError, match=r"DeviceMesh. Received: \(2, 4\)"):
        ViT22BBackbone.get_layout_map((2, 4))


@jax_only
@pytest.mark.parametrize(
    ("block", "path"),
    [("parallel", "in_projection"), ("sequential", "qkv_projection")],
)
def test_heads_that_do_not_divide_are_named_with_meshes_that_work(
    make_backbone, block, path
):
    layouts = ViT22BBackbone.get_layout_map(mesh_of(2, 4))
    distribution = keras.distribution.ModelParallel(layout_map=layouts)
    message = (
        rf"block_0/{path}/kernel \(12, 6, .*\): dimension 1 of 6 does not "
        r"divide over the 4 devices of axis 'model'\. With 8 devices these "
        r"\(batch, model\) meshes work: \(8, 1\), \(4, 2\)\."
    )
    with distribution.scope(), pytest.raises(ValueError, match=message):
        make_backbone(num_heads=6, hidden_dim=12, mlp_dim=12, block=block)


@jax_only
def test_a_width_that_does_not_divide_is_an_error_with_fsdp(make_backbone):
    layouts = ViT22BBackbone.get_layout_map(mesh_of(8, 1), fsdp=True)
    distribution = keras.distribution.ModelParallel(layout_map=layouts)
    message = r"dimension 0 of 12 .* 8 devices of axis 'batch'.*: \(4, 2\)"
    with distribution.scope(), pytest.raises(ValueError, match=message):
        make_backbone(num_heads=6, hidden_dim=12, mlp_dim=12)


@jax_only
def test_int4_is_refused_with_fsdp(make_backbone):
    backbone = make_backbone()
    for fsdp in (True, False):
        layouts = ViT22BBackbone.get_layout_map(mesh_of(1, 1), fsdp=fsdp)
        layouts.device_mesh.devices[:] = keras.distribution.list_devices()[0]
        distribution = keras.distribution.ModelParallel(layout_map=layouts)
        with distribution.scope():
            if fsdp:
                with pytest.raises(ValueError, match="fsdp=False"):
                    backbone.quantize("int4")
            else:
                backbone.quantize("int4")


def test_where_no_mesh_of_all_devices_works_fewer_are_named():
    fault = indivisible("w", (5, 3), ("batch", "model"), mesh_of(2, 4))
    assert "With 5 devices" in fault
    assert re.search(r"work: \(5, 1\)\.$", fault)
    assert indivisible("w", (4, 8), ("batch", "model"), mesh_of(2, 4)) is None


# On 8 devices: every variable of a model has the layout of its row.
SCRIPT = """
import json, sys
import keras
import numpy as np
import keras_vit22b

batch, model, fsdp = map(int, sys.argv[1:])
mesh = keras.distribution.DeviceMesh((batch, model), ["batch", "model"])
layouts = keras_vit22b.ViT22BBackbone.get_layout_map(mesh, fsdp=bool(fsdp))
keras.distribution.set_distribution(
    keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )
)
backbone = keras_vit22b.ViT22BBackbone(
    (8, 8, 1), 4, num_layers=1, num_heads=8, hidden_dim=16, mlp_dim=32
)
classifier = keras_vit22b.ViT22BImageClassifier(backbone, 5)
if batch == 2:
    classifier.quantize("int4" if not fsdp else "int8")
images = np.ones((8, 8, 8, 1), "float32")
assert np.isfinite(classifier.predict(images, verbose=0)).all()
print(json.dumps({
    v.path: v.value.nbytes // v.value.addressable_shards[0].data.nbytes
    for v in classifier.weights
}))
"""


@jax_only
@pytest.mark.parametrize(
    ("mesh", "fsdp"), [((2, 4), 0), ((2, 4), 1), ((1, 8), 0), ((8, 1), 1)]
)
def test_devices_hold_what_the_rows_say(run_on_eight_devices, mesh, fsdp):
    batch, model = mesh
    parts = run_on_eight_devices(SCRIPT, batch, model, fsdp)
    both = model * (batch if fsdp else 1)
    for path, expected in {
        "block_0/in_projection/kernel": both,
        "block_0/out_projection/kernel": both,
        "pooling/query/kernel": both,
        "pooling/out/kernel": both,
        "pooling/mlp_in/kernel": both,
        "pooling/mlp_out/kernel": both,
        "head/kernel": max(model, batch if fsdp else 1),
        "block_0/mlp_bias": model,
        "pooling/key/bias": model,
        "patch_embedding/kernel": 1,
        "block_0/norm/scale": 1,
        "head/bias": 1,
    }.items():
        assert parts[path] == expected, path
