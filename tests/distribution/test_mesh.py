"""The "model" axis of a mesh is a ring of links."""

import types
import warnings

import keras
import numpy as np
import pytest

from keras_vit22b.distribution import device_mesh
from keras_vit22b.distribution import initialize
from keras_vit22b.distribution.device_order import order_devices

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
def test_flags_that_hide_weight_gathers_are_asked_for(monkeypatch):
    import jax

    devices = chips("TPU v5", (2, 2, 2))
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    with pytest.warns(UserWarning, match="--xla_enable_async_all_gather=true"):
        mesh = device_mesh(batch=1, model=8)
    flags = " ".join(f"--{f}=true" for f in mesh.compiler_options)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device_mesh(batch=1, model=8)


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
