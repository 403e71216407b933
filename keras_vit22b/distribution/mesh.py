"""Meshes of devices that run a block's matmuls (JAX)."""

import os
import warnings

import keras
import numpy as np

from keras_vit22b.distribution.device_order import closes_over_links
from keras_vit22b.distribution.device_order import divisors
from keras_vit22b.distribution.device_order import is_limited
from keras_vit22b.distribution.device_order import order_devices
from keras_vit22b.distribution.device_order import sums_in_ring
from keras_vit22b.distribution.sharding import AXIS_NAMES
from keras_vit22b.distribution.sharding import check_backend

OVERLAPS = ("auto", "ring", "xla", "off")

# Without these libtpu (0.0.42) stops the chip for a weight's gather or for
# its gradient's exchange; transfers of rings never need one.
_ASYNC = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_all_to_all": "true",
}
# v5p hides a gather in fusions, as v5e does by default; v4 refuses these.
_FUSED = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}


class OverlapMesh(keras.distribution.DeviceMesh):
    """A mesh ("batch", "model") that runs the matmuls of a block.

    Layers call its methods where `keras.distribution.distribution()` has such
    a mesh; see `device_mesh`, which makes one.

    Args:
        devices: array `(batch, model)` of devices.
        overlap: string. See `device_mesh`.
    """

    def __init__(self, devices, overlap):
        super().__init__(devices.shape, AXIS_NAMES, devices)
        self.overlap = overlap

    @property
    def compiler_options(self):
        """dict. Flags of libtpu that hide weight gathers and gradients.

        In training, `LIBTPU_INIT_ARGS` holds them as `--flag=true`, set
        before Python starts. Empty where there are no TPUs.
        """
        device = self.devices.flat[0]
        if getattr(device, "platform", None) != "tpu":
            return {}
        options = dict(_ASYNC)
        if is_limited(self.devices):
            del options["xla_tpu_enable_async_all_to_all"]
        if device.device_kind in ("TPU v5", "TPU v5p"):
            options |= _FUSED
        return options

    @property
    def _sum_in_ring(self):
        return sums_in_ring(self.devices)

    def shard_tokens(self, tokens):
        """Shard the batch of `tokens` over both axes, if it divides.

        Args:
            tokens: tensor `(batch, tokens, d)`.
        """
        if self._why_not(tokens):
            return tokens
        return self._constrain(tokens, ("batch", "model"))

    def all_gather_matmul(
        self, x, kernel, axes, *, gathered=None, later=(), later_axes=()
    ):
        """Return `einsum("btd,dhf->bthf", x, kernel)`, heads over "model".

        Kernels that are split over "batch" have to be gathered. Those of
        later matmuls can be gathered beside this one.

        Args:
            x: tensor `(batch, tokens, d)`, from `shard_tokens`.
            kernel: tensor `(d, heads, f)`, or `(d, f)` with `f` for the heads.
            axes: mesh axis or `None` for each dimension of the kernel.
            gathered: the kernel, gathered in `later`. Defaults to `None`.
            later: list of kernels. Defaults to none.
            later_axes: list of the axes of each.

        Returns:
            The product, and for each kernel in `later` what a matmul takes as
            `gathered`, `None` where there is nothing to gather.

        Raises:
            ValueError: with `overlap="ring"`, if the batch or the heads do
                not divide by the mesh. Otherwise they then take the plain
                einsum.
        """
        nothing = [None] * len(later)
        why_not = self._why_not(x, heads=kernel.shape[1])
        if why_not:
            self._refuse(why_not)
            return keras.ops.tensordot(x, kernel, 1), nothing
        if self.overlap == "xla":
            x = self._constrain(x, ("batch", "model"))
            kernel = self._constrain(kernel, *_whole_over_batch(axes))
            y = keras.ops.tensordot(x, kernel, 1)
            return self._constrain(y, "batch", None, "model"), nothing
        # Here, since JAX need not be there until a mesh is used.
        from keras_vit22b.distribution import ring

        chosen = self._split_over_both(later, later_axes)
        y, kernels = ring.all_gather_matmul(
            x,
            kernel if gathered is None else gathered,
            tuple(later[i] for i in chosen),
            later_specs=tuple(_spec(later_axes[i]) for i in chosen),
            sum_in_ring=self._sum_in_ring,
            gathered=gathered is not None,
            **self._ring_options(kernel, axes, heads=1),
        )
        found = dict(zip(chosen, kernels))
        return y, [found.get(i) for i in range(len(later))]

    def matmul_reduce_scatter(self, y, kernel, axes, *, gathered=None):
        """Return `einsum("bthf,hfd->btd", y, kernel)`, sharded as tokens.

        Args:
            y: tensor `(batch, tokens, heads, f)`, or `(batch, tokens, f)`.
            kernel: tensor `(heads, f, d)` or `(f, d)`.
            axes: mesh axis or `None` for each dimension of the kernel.
            gathered: the kernel, gathered beside another matmul. Defaults to
                `None`.

        Raises:
            ValueError: with `overlap="ring"`, if the batch or the heads do
                not divide by the mesh. Otherwise they then take the plain
                einsum.
        """
        why_not = self._why_not(y, heads=kernel.shape[0])
        if why_not:
            self._refuse(why_not)
            return keras.ops.tensordot(y, kernel, len(kernel.shape) - 1)
        if self.overlap == "xla":
            y = self._constrain(y, "batch", None, "model")
            kernel = self._constrain(kernel, *_whole_over_batch(axes))
            z = keras.ops.tensordot(y, kernel, len(kernel.shape) - 1)
            return self._constrain(z, ("batch", "model"))
        from keras_vit22b.distribution import ring

        return ring.matmul_reduce_scatter(
            y,
            kernel if gathered is None else gathered,
            gathered=gathered is not None,
            **self._ring_options(kernel, axes, heads=0),
        )

    def remat(self, function):
        """Return `function` of one tensor, recomputed in the backward pass.

        As `keras.remat` does, but without keeping kernels from being gathered
        in time.
        """
        from keras_vit22b.distribution.recompute import recompute

        return recompute(function)

    def _why_not(self, tokens, heads=None):
        """Return why sizes do not divide by the mesh, or `None`."""
        batch, model = self.shape
        if not isinstance(tokens.shape[0], int):
            return f"the batch is {tokens.shape[0]}"
        if tokens.shape[0] % (batch * model):
            return (
                f"a batch of {tokens.shape[0]} does not divide by the "
                f"{batch} x {model} devices"
            )
        if heads is not None and heads % model:
            return f"{heads} heads or units do not divide by model={model}"
        return None

    def _refuse(self, why_not):
        if self.overlap == "ring":
            raise ValueError(
                f"overlap='ring' cannot run a matmul, since {why_not}. Use "
                "sizes that divide, or overlap='auto', which takes the plain "
                "matmul there."
            )

    def _constrain(self, tensor, *spec):
        from jax.sharding import NamedSharding

        return keras.distribution.distribute_tensor(
            tensor, NamedSharding(self.backend_mesh, _spec(spec))
        )

    def _split_over_both(self, kernels, all_axes):
        """Return the indices of the kernels that can be gathered."""
        return [
            i
            for i, (kernel, axes) in enumerate(zip(kernels, all_axes))
            if {"batch", "model"} <= set(axes)
            and kernel.shape[axes.index("model")] % self.shape[1] == 0
        ]

    def _ring_options(self, kernel, axes, heads):
        spec = ["batch" if axis == "batch" else None for axis in axes]
        spec += [None] * (len(kernel.shape) - len(spec))
        spec[heads] = "model"
        return {
            "mesh": self.backend_mesh,
            "kernel_spec": _spec(spec),
            "ring": self.overlap != "off",
        }


def _whole_over_batch(axes):
    """Return axes of a kernel whose parts over "batch" are gathered."""
    return [None if axis == "batch" else axis for axis in axes]


def _spec(axes):
    from jax.sharding import PartitionSpec

    return PartitionSpec(*axes)


def device_mesh(*, batch, model, overlap="auto", devices=None):
    """Return a mesh ("batch", "model") whose "model" axis is a ring of links.

    On TPU v4 and v5p the axis lies along an axis of the torus, on v5e and v6e
    along one that wraps, and else on a cycle through a block of chips. GPUs
    are ordered by host, so that the axis stays within one where it can.

    Args:
        batch: int. Devices that share the batch.
        model: int. Devices that share the heads.
        overlap: how the matmuls of blocks run. `"ring"`: transfers beside
            matmuls; an error where sizes do not divide. `"auto"`: so where
            they do, else plain matmuls. `"xla"`: sharding constraints alone;
            the compiler may or may not hide transfers. `"off"`: nothing is
            hidden, as a baseline. Defaults to `"auto"`.
        devices: list of `jax.Device`. Defaults to all.

    Returns:
        An `OverlapMesh`, for `get_layout_map` and `keras.distribution`.

    Raises:
        ValueError: if `batch * model` is not the number of devices,
            `overlap` is unknown, or the backend is not JAX.

    Example:
    ```python
    mesh = keras_vit22b.distribution.device_mesh(batch=2, model=4)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(
            layout_map=ViT22BBackbone.get_layout_map(mesh),
            batch_dim_name="batch",
        )
    )
    ```
    """
    check_backend()
    if overlap not in OVERLAPS:
        raise ValueError(
            f"overlap must be {', '.join(map(repr, OVERLAPS[:-1]))} or "
            f"{OVERLAPS[-1]!r}. Received: {overlap!r}."
        )
    at_hand = devices is None
    if at_hand:
        import jax

        devices = jax.devices()
    devices = list(devices)
    check_mesh(batch, model, len(devices))
    if len(set(map(id, devices))) < len(devices):
        raise ValueError(f"A device is listed twice. Received: {devices}.")
    mesh = OverlapMesh(order_devices(devices, batch, model), overlap)
    _warn_without_ring(mesh.devices, overlap)
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    wanted = mesh.compiler_options if batch > 1 else {}
    missing = [f for f in wanted if f"--{f}=true" not in flags]
    if at_hand and missing and overlap in ("auto", "ring"):
        warnings.warn(
            "Gathers of weights and exchanges of gradients will not be "
            "hidden. Before Python starts, add to LIBTPU_INIT_ARGS: "
            f"{' '.join(f'--{flag}=true' for flag in missing)}",
            stacklevel=2,
        )
    return mesh


def _warn_without_ring(devices, overlap):
    batch, model = devices.shape
    platform = getattr(devices.flat[0], "platform", None)
    if overlap not in ("auto", "ring") or platform != "tpu" or model == 1:
        return
    if closes_over_links(devices, axis=1):
        return
    work = [
        str(m)
        for m in divisors(devices.size)[1:]
        if closes_over_links(
            order_devices(list(devices.flat), devices.size // m, m), axis=1
        )
    ]
    warnings.warn(
        f"No links join model={model} of these devices into a ring, so its "
        "transfers share links, and the compiler may not hide them."
        + (f" There are rings for model={', '.join(work)}." if work else ""),
        stacklevel=3,
    )


def check_mesh(batch, model, count):
    """Raise unless a mesh is one of `count` devices."""
    for name, size in (("batch", batch), ("model", model)):
        if not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(
                f"{name} must be a positive integer. Received: {size!r}."
            )
    if batch * model != count:
        work = [f"({count // m}, {m})" for m in divisors(count)]
        can_be = f", for which (batch, model) can be {', '.join(work)}"
        raise ValueError(
            f"A mesh of batch={batch} and model={model} needs "
            f"{batch * model} devices and there are {count}"
            f"{can_be if work else ''}."
        )


def initialize(job_addresses=None, num_processes=None, process_id=None):
    """Join this process to the others of a job, before devices are used.

    `keras.distribution.initialize`, with its failures explained. On a TPU
    slice or under Slurm all arguments can be left out.

    Args:
        job_addresses: string, `"host:port"` of process 0 or one for each
            process, joined by commas.
        num_processes: int.
        process_id: int, from 0 to `num_processes - 1`.

    Raises:
        ValueError: if the arguments contradict each other, or the backend is
            not JAX.
        RuntimeError: if devices are in use already, or the other processes
            cannot be reached.
    """
    check_backend()
    for name, value, kind, words in (
        ("job_addresses", job_addresses, str, "a string"),
        ("num_processes", num_processes, int, "an integer"),
        ("process_id", process_id, int, "an integer"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be {words}. Received: {value!r}.")
    if num_processes is not None and num_processes < 1:
        raise ValueError(
            f"num_processes must be at least 1. Received: {num_processes}."
        )
    if num_processes is not None and process_id is not None:
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id must be from 0 to {num_processes - 1}. "
                f"Received: {process_id}."
            )
    for address in filter(None, (job_addresses or "").split(",")):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ValueError(
                "job_addresses must be like '10.0.0.1:8476'. Received: "
                f"{job_addresses!r}."
            )
    try:
        keras.distribution.initialize(
            job_addresses=job_addresses,
            num_processes=num_processes,
            process_id=process_id,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"Process {process_id} of {num_processes} could not join the job "
            f"at {job_addresses}. Call initialize() once and before anything "
            "uses a device, and see that process 0 runs and its port can be "
            f"reached. {error}"
        ) from error
