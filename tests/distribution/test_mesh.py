"""The "model" axis of a mesh is a ring of links."""

import importlib
import types
import warnings

import keras
import numpy as np
import pytest

from keras_vit22b import distribution
from keras_vit22b.distribution import device_mesh
from keras_vit22b.distribution import initialize
from keras_vit22b.distribution.device_order import is_limited
from keras_vit22b.distribution.device_order import order_devices
from keras_vit22b.distribution.device_order import sums_in_ring
from keras_vit22b.distribution.process_shares import check_sharded_by_keras
from keras_vit22b.distribution.process_shares import process_shares

jax_only = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Meshes are of the JAX backend."
)


def chips(kind, shape, *, slices=1):
    """Devices of a TPU slice, in no useful order."""
    devices = [
        types.SimpleNamespace(
            platform="tpu",
            device_kind=kind,
            coords=position,
            core_on_chip=0,
            slice_index=number,
        )
        for number in range(slices)
        for position in np.ndindex(*shape)
    ]
    np.random.default_rng(0).shuffle(devices)
    return devices


def hops(a, b, wrapped):
    """Links between two chips; `wrapped` holds the sides that wrap."""
    if a.slice_index != b.slice_index:
        return float("inf")
    steps = 0
    for left, right, side in zip(a.coords, b.coords, wrapped):
        step = abs(left - right)
        steps += min(step, side - step) if side else step
    return steps


@pytest.mark.parametrize(
    "kind, shape, wrapped, model",
    [
        ("TPU v4", (2, 2, 2), (0, 0, 0), 8),
        ("TPU v4", (2, 2, 4), (0, 0, 0), 4),
        ("TPU v4", (4, 4, 4), (4, 4, 4), 4),
        ("TPU v4", (4, 4, 4), (4, 4, 4), 8),
        ("TPU v4", (8, 8, 16), (8, 8, 16), 8),
        ("TPU v5", (2, 2, 2), (0, 0, 0), 8),
        ("TPU v5", (4, 4, 8), (4, 4, 8), 8),
        ("TPU v5 lite", (2, 4, 1), (0, 0, 0), 8),
        ("TPU v5 lite", (4, 8, 1), (0, 0, 0), 8),
        ("TPU v5 lite", (4, 8, 1), (0, 0, 0), 4),
        ("TPU v5 lite", (8, 16, 1), (0, 16, 0), 16),
        ("TPU v5 lite", (16, 16, 1), (16, 16, 0), 16),
        ("TPU v6 lite", (4, 4, 1), (0, 0, 0), 2),
        ("TPU v6 lite", (8, 8, 1), (0, 0, 0), 16),
    ],
)
def test_each_ring_closes_over_single_links(kind, shape, wrapped, model):
    devices = chips(kind, shape, slices=2)
    rows = order_devices(devices, len(devices) // model, model)
    assert rows.shape == (len(devices) // model, model)
    assert {id(d) for d in rows.flat} == {id(d) for d in devices}
    for row in rows:
        for device, following in zip(row, np.roll(row, -1)):
            assert hops(device, following, wrapped) == 1


@pytest.mark.parametrize(
    "kind, shape, model, limited, ring",
    [
        ("TPU v4", (4, 4, 4), 4, False, False),
        ("TPU v5 lite", (4, 4, 1), 4, False, False),
        # Blocks of a snake are no neighbours.
        ("TPU v5 lite", (4, 8, 1), 8, True, False),
        ("TPU v5 lite", (16, 16, 1), 16, True, True),
        ("TPU v6 lite", (16, 16, 1), 16, True, True),
        ("TPU v5 lite", (16, 16, 1), 8, True, False),
    ],
)
def test_gradients_go_round_a_ring_where_it_follows_links(
    kind, shape, model, limited, ring
):
    devices = chips(kind, shape)
    devices = order_devices(devices, len(devices) // model, model)
    assert is_limited(devices) == limited
    assert sums_in_ring(devices) == ring


def test_an_axis_of_the_torus_is_preferred_to_a_folded_block():
    rows = order_devices(chips("TPU v4", (4, 4, 4)), 16, 4)
    for row in rows:
        assert len({d.coords[:2] for d in row}) == 1


def test_chips_that_fill_no_grid_keep_their_order():
    devices = chips("TPU v4", (2, 2, 2))[:6]
    assert list(order_devices(devices, 3, 2).flat) == devices


def test_gpus_are_ordered_by_host():
    devices = [
        types.SimpleNamespace(platform="gpu", process_index=i % 2, id=i)
        for i in range(8)
    ]
    for row in order_devices(devices, 2, 4):
        assert len({d.process_index for d in row}) == 1
        assert [d.id for d in row] == sorted(d.id for d in row)


def test_simulated_devices_keep_their_order():
    devices = [types.SimpleNamespace(platform="cpu", id=i) for i in range(8)]
    assert list(order_devices(devices, 2, 4).flat) == devices


@jax_only
def test_a_mesh_that_does_not_fill_the_devices_names_those_that_do():
    devices = list(np.arange(8))
    with pytest.raises(ValueError, match=r"needs 6 .* are 8, .*\(2, 4\)"):
        device_mesh(batch=2, model=3, devices=devices)


@jax_only
@pytest.mark.parametrize("devices", [[], np.arange(8)])
@pytest.mark.parametrize("sizes", [(2.0, 4), (0, 8), (2, 2)])
def test_wrong_sizes_are_errors(devices, sizes):
    with pytest.raises(ValueError, match="positive integer|needs 4 devices"):
        device_mesh(batch=sizes[0], model=sizes[1], devices=devices)


@jax_only
def test_a_mesh_without_a_ring_of_links_is_warned_of():
    devices = chips("TPU v5 lite", (3, 3, 1))
    with pytest.warns(UserWarning, match="No links join model=3"):
        device_mesh(batch=3, model=3, devices=devices)
    devices = chips("TPU v5 lite", (1, 8, 1))
    with pytest.warns(UserWarning, match="rings for model=2"):
        device_mesh(batch=1, model=8, devices=devices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_mesh(batch=4, model=2, devices=devices)
        device_mesh(batch=1, model=8, overlap="xla", devices=devices)


@jax_only
def test_flags_that_hide_weight_gathers_are_asked_for(monkeypatch):
    import jax

    devices = chips("TPU v5", (2, 2, 2))
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    with pytest.warns(UserWarning, match="--xla_enable_async_all_gather=true"):
        mesh = device_mesh(batch=2, model=4)
    flags = " ".join(f"--{f}=true" for f in mesh.compiler_options)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_mesh(batch=2, model=4)
        # Without images to share out there are no weights to gather.
        monkeypatch.delenv("LIBTPU_INIT_ARGS")
        device_mesh(batch=1, model=8)


def on_hosts(devices, host_shape):
    """Number the hosts that hold chips `host_shape` each."""
    corner = [tuple(np.floor_divide(d.coords, host_shape)) for d in devices]
    numbers = {host: i for i, host in enumerate(sorted(set(corner)))}
    for device, host in zip(devices, corner):
        device.process_index = numbers[host]
    return devices


@jax_only
@pytest.mark.parametrize(
    "shape, batch, model, count",
    [
        ((2, 2, 2), 1, 8, 1),
        ((2, 2, 2), 2, 4, 1),  # Each ring lies on both hosts.
        ((2, 2, 2), 8, 1, 2),
        ((8, 8, 16), 128, 8, 64),
    ],
)
def test_processes_of_a_share_hold_the_same_rows(shape, batch, model, count):
    devices = on_hosts(chips("TPU v4", shape), (2, 2, 1))
    mesh = device_mesh(batch=batch, model=model, devices=devices)
    shares = process_shares(mesh)
    assert set(shares.values()) == {(i, count) for i in range(count)}
    for row in mesh.devices:
        assert len({shares[d.process_index] for d in row}) == 1


@jax_only
def test_one_process_gives_all_of_the_data():
    importlib.import_module("keras_vit22b.models.padded_model")
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
    assert distribution.data_share(mesh) == (0, 1)


@jax_only
def test_a_mesh_whose_processes_overlap_in_part_is_an_error():
    devices = [types.SimpleNamespace(process_index=i // 2) for i in range(6)]
    mesh = keras.distribution.DeviceMesh((2, 3), ["batch", "model"], devices)
    with pytest.raises(ValueError, match=r"1 holds \(0, 1\).*divides"):
        process_shares(mesh)


@jax_only
@pytest.mark.parametrize("batch, model, same", [(1, 8, True), (2, 4, False)])
def test_shares_that_keras_gets_wrong_are_refused(
    monkeypatch, batch, model, same
):
    devices = on_hosts(chips("TPU v4", (2, 2, 2)), (2, 2, 1))
    mesh = device_mesh(batch=batch, model=model, devices=devices)
    layouts = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"
    )
    monkeypatch.setattr(layouts, "_num_processes", 2)
    with layouts.scope():
        if same:
            check_sharded_by_keras()
        else:
            with pytest.raises(ValueError, match="auto_shard_dataset=False"):
                check_sharded_by_keras()
        layouts.auto_shard_dataset = False
        check_sharded_by_keras()


@jax_only
def test_an_unknown_overlap_is_an_error():
    with pytest.raises(ValueError, match="'auto', 'ring', 'xla' or 'off'"):
        device_mesh(batch=1, model=1, overlap="always")


@jax_only
@pytest.mark.parametrize(
    "arguments, fault",
    [
        (("localhost", 2, 0), "like '10.0.0.1:8476'"),
        (("localhost:1234", 2, 2), "from 0 to 1"),
        (("a:1,b:2,c:3", 2, 0), "3 jobs"),
        ((8476, 2, 0), "job_addresses must be a string"),
        (("localhost:1234", "2", 0), "num_processes must be an integer"),
    ],
)
def test_initialize_explains_what_is_wrong(arguments, fault):
    with pytest.raises(ValueError, match=fault):
        initialize(*arguments)


@jax_only
def test_initialize_after_a_device_was_used_says_so():
    keras.ops.zeros(1)
    with pytest.raises(RuntimeError, match="before anything uses a device"):
        initialize("localhost:1234", 2, 0)


@pytest.mark.skipif(keras.config.backend() == "jax", reason="Works on JAX.")
def test_other_backends_are_refused():
    for function in (lambda: device_mesh(batch=1, model=1), initialize):
        with pytest.raises(ValueError, match="KERAS_BACKEND=jax"):
            function()
