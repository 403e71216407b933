"""Matmuls whose transfers run beside them, as rings over the "model" axis.

Device `r` of `n` along "model" holds chunk `r` of the batch and the kernels of
its own heads. Going in, every device needs every chunk: chunks travel round
the ring, and while one travels, the one before is multiplied. Going out, every
device holds a part of every chunk's result: sums travel instead, and while one
travels, the next part is made.

Each backward pass is made of rings too, not autodiff of the forward one, which
would leave transfers exposed and keep every chunk in memory:

    y = AG(x) w     dw = AG(x)^T dy    dx = RS(dy w^T)
    z = RS(y w)     dy = AG(dz) w^T    dw = y^T AG(dz)

Where a transfer has one matmul beside it, halves of a chunk travel both ways,
since links carry both directions at once and a half takes half the time. Eight
devices on TPU v4 need that: a whole chunk (6144 wide, 45 GB/s a link) takes
longer than its matmul. One way is enough where two matmuls or the sum of a
kernel's gradient in memory go with a transfer.

Loops are `fori_loop`s, since the compiler reorders unrolled steps and then
leaves transfers without a matmul beside them.

Reference: Wang et al., 2023, https://dl.acm.org/doi/10.1145/3567955.3567959;
ViT-22B, section 3, https://arxiv.org/abs/2302.05442
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from keras_vit22b.distribution.kernel_gather import BATCH
from keras_vit22b.distribution.kernel_gather import MODEL
from keras_vit22b.distribution.kernel_gather import RingOverBatch
from keras_vit22b.distribution.kernel_gather import gather_kernels
from keras_vit22b.distribution.kernel_gather import sum_and_split
from keras_vit22b.distribution.kernel_gather import whole

_STATIC = ("mesh", "kernel_spec", "gathered", "ring")


@functools.partial(
    jax.jit, static_argnames=(*_STATIC, "later_specs", "sum_in_ring")
)
def all_gather_matmul(
    x,
    kernel,
    later=(),
    *,
    mesh,
    kernel_spec,
    later_specs=(),
    gathered=False,
    ring=True,
    sum_in_ring=False,
):
    """Return `einsum("btd,dhf->bthf", x, kernel)`, heads over "model".

    Args:
        x: array `(batch, tokens, d)`, the batch over both axes.
        kernel: array `(d, heads, f)`, or `(d, f)` with `f` for the heads.
        later: tuple of kernels that are split over "batch" and to be gathered
            beside this matmul.
        mesh: `jax.sharding.Mesh` with axes "batch" and "model".
        kernel_spec: `PartitionSpec` of the kernel: the heads over "model",
            another dimension over "batch" or not.
        later_specs: tuple of `PartitionSpec`, of the kernels in `later`.
        gathered: bool. Whether `kernel` was gathered already, in `later`, and
            is `(size of "batch", *shape)`. Defaults to `False`.
        ring: bool. Whether to hide the transfers. Otherwise the chunks are
            gathered first. Defaults to `True`.
        sum_in_ring: bool. Whether gradients of kernels travel in a ring over
            "batch", beside a matmul, instead of in an all-to-all. Defaults to
            `False`.

    Returns:
        An array `(batch, tokens, heads, f)` or `(batch, tokens, f)`, the
        batch over "batch" and the heads over "model"; and a tuple of the
        kernels in `later`, gathered: `(size of "batch", *kernel.shape)`, a
        copy for each device along "batch", since each has its own gradient.
    """
    multiply = _ring_all_gather_matmul if ring else _plain_all_gather_matmul
    kernels = _Kernels(
        None if gathered else _batch_axis(kernel_spec),
        tuple(map(_batch_axis, later_specs)),
        sum_in_ring,
    )

    def run(sizes, kernel, x, *later):
        y, later = multiply(sizes, kernels, kernel, x, later)
        return y, tuple(kernel[None] for kernel in later)

    return _shard_map(
        run,
        mesh,
        kernel_spec,
        gathered,
        in_specs=(PartitionSpec((BATCH, MODEL)), *later_specs),
        out_specs=(
            PartitionSpec(BATCH, None, MODEL),
            tuple(map(_gathered_spec, later_specs)),
        ),
    )(kernel, x, *later)


@functools.partial(jax.jit, static_argnames=_STATIC)
def matmul_reduce_scatter(
    y, kernel, *, mesh, kernel_spec, gathered=False, ring=True
):
    """Return `einsum("bthf,hfd->btd", y, kernel)`, the batch over both axes.

    Args:
        y: array `(batch, tokens, heads, f)`, or `(batch, tokens, f)` with `f`
            for the heads; the batch over "batch", the heads over "model".
        kernel: array `(heads, f, d)` or `(f, d)`.
        mesh: `jax.sharding.Mesh` with axes "batch" and "model".
        kernel_spec: `PartitionSpec` of the kernel: the heads over "model",
            another dimension over "batch" or not.
        gathered: bool. Whether `all_gather_matmul` gathered `kernel` already,
            which is then `(size of "batch", *shape)`. Defaults to `False`.
        ring: bool. Whether to hide the transfers. Otherwise the sum follows
            the matmul. Defaults to `True`.

    Returns:
        An array `(batch, tokens, d)`, the batch over both axes.
    """
    multiply = (
        _ring_matmul_reduce_scatter if ring else _plain_matmul_reduce_scatter
    )
    axis = None if gathered else _batch_axis(kernel_spec)

    def run(sizes, kernel, y):
        return multiply(sizes, whole(sizes, axis, kernel), y)

    return _shard_map(
        run,
        mesh,
        kernel_spec,
        gathered,
        in_specs=(PartitionSpec(BATCH, None, MODEL),),
        out_specs=PartitionSpec((BATCH, MODEL)),
    )(kernel, y)


class _Sizes(typing.NamedTuple):
    """Devices along each axis."""

    batch: int
    model: int


class _Kernels(typing.NamedTuple):
    """Which kernels a matmul gathers, and how their gradients are summed.

    Attributes:
        axis: int. Dimension of its own kernel that is split over "batch", or
            `None`.
        later_axes: tuple of int. The same of the kernels for later.
        sum_in_ring: bool.
    """

    axis: int | None
    later_axes: tuple
    sum_in_ring: bool


def _shard_map(run, mesh, kernel_spec, gathered, in_specs, out_specs):
    sizes = _Sizes(mesh.shape[BATCH], mesh.shape[MODEL])

    def run_on_device(kernel, *arguments):
        return run(sizes, kernel[0] if gathered else kernel, *arguments)

    return jax.shard_map(
        run_on_device,
        mesh=mesh,
        in_specs=(
            _gathered_spec(kernel_spec) if gathered else kernel_spec,
            *in_specs,
        ),
        out_specs=out_specs,
        check_vma=False,
    )


def _batch_axis(spec):
    return spec.index(BATCH) if BATCH in spec else None


def _gathered_spec(kernel_spec):
    kept = (name if name == MODEL else None for name in kernel_spec)
    return PartitionSpec(BATCH, *kept)


# === Without rings ===


def _plain_all_gather_matmul(sizes, kernels, kernel, x, later):
    x = lax.all_gather(x, MODEL, axis=0, tiled=True)
    y = _in(x, whole(sizes, kernels.axis, kernel))
    return y, gather_kernels(sizes.batch, kernels.later_axes, later)


def _plain_matmul_reduce_scatter(sizes, kernel, y):
    del sizes
    z = _out(y, kernel)
    return lax.psum_scatter(z, MODEL, scatter_dimension=0, tiled=True)


# === Rings ===


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring_all_gather_matmul(sizes, kernels, kernel, x, later):
    return _all_gather_matmul_forward(sizes, kernels, kernel, x, later)[0]


def _all_gather_matmul_forward(sizes, kernels, kernel, x, later):
    def put(start, x, y):
        return _put(y, start, _in(x, kernel))

    kernel = whole(sizes, kernels.axis, kernel)
    # Kernels for later are gathered meanwhile: not before the input is there,
    # or all would be at the start of the step; and by the end, or they would
    # keep the next block's from being gathered in time, since the compiler
    # has one gather under way at a time.
    if later:
        x, later = lax.optimization_barrier((x, later))
        later = gather_kernels(sizes.batch, kernels.later_axes, later)
    y_shape = (sizes.model * x.shape[0], x.shape[1], *kernel.shape[1:])
    y = jnp.zeros(y_shape, jnp.result_type(x, kernel))
    parts = _both_ways(x.shape[0], sizes.model)
    y = _send_chunks(x, y, put, sizes.model, parts)
    return lax.optimization_barrier((y, later)), (kernel, x)


def _all_gather_matmul_backward(sizes, kernels, residuals, gradients):
    kernel, x = residuals
    dy, later = gradients
    chunk = x.shape[0]

    def add(start, x, dw):
        return dw + _kernel_gradient(x, _rows(dy, start, chunk))

    dw, dy = _float32_zeros(kernel.shape, dy)
    dw = _send_chunks(x, dw, add, sizes.model, _one_way(chunk))
    # The kernel's gradient first: its exchange over "batch" can then run
    # beside what follows.
    dw, dy = lax.optimization_barrier((dw.astype(kernel.dtype), dy))

    def multiply(start, rows):
        # Over the heads and f.
        axes = [*range(2, dy.ndim)], [*range(1, kernel.ndim)]
        return jnp.tensordot(_rows(dy, start, rows), kernel, axes, **_FLOAT32)

    # To be summed over "batch".
    axes, parts = list(kernels.later_axes), list(later)
    if kernels.axis is not None:
        axes.append(kernels.axis)
        parts.append(dw)
    if kernels.sum_in_ring and sizes.model > 1:
        beside = RingOverBatch(sizes.batch, axes, parts, sizes.model - 1)
        dx, parts = _send_sums(multiply, x.dtype, chunk, sizes.model, beside)
    else:
        dx = _send_sums(multiply, x.dtype, chunk, sizes.model)
        parts = [sum_and_split(sizes.batch, *p) for p in zip(axes, parts)]
    if kernels.axis is not None:
        *parts, dw = parts
    return dw, dx, tuple(parts)


_ring_all_gather_matmul.defvjp(
    _all_gather_matmul_forward, _all_gather_matmul_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_matmul_reduce_scatter(sizes, kernel, y):
    def multiply(start, rows):
        return _out(_rows(y, start, rows), kernel, **_FLOAT32)

    dtype, chunk = jnp.result_type(y, kernel), y.shape[0] // sizes.model
    return _send_sums(multiply, dtype, chunk, sizes.model)


def _matmul_reduce_scatter_forward(sizes, kernel, y):
    return _ring_matmul_reduce_scatter(sizes, kernel, y), (kernel, y)


def _matmul_reduce_scatter_backward(sizes, residuals, dz):
    kernel, y = residuals
    chunk = dz.shape[0]

    def put_and_add(start, dz, gradients):
        dy, dw = gradients
        dy = _put(dy, start, jnp.tensordot(dz, kernel, (-1, -1)))
        return dy, dw + _kernel_gradient(_rows(y, start, chunk), dz)

    dw, dz = _float32_zeros(kernel.shape, dz)
    gradients = jnp.zeros_like(y), dw
    dy, dw = _send_chunks(
        dz, gradients, put_and_add, sizes.model, _one_way(chunk)
    )
    return dw.astype(kernel.dtype), dy


_ring_matmul_reduce_scatter.defvjp(
    _matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward
)


def _send_chunks(x, result, visit, size, parts):
    """Send the devices' chunks `x` round, and visit each on the way.

    Args:
        x: array `(chunk, ...)`, the chunk of this device.
        result: what `visit` makes, before any visit.
        visit: function from the first row of a part within the whole batch,
            the part and the result so far, to the result.
        size: int. Devices in the ring.
        parts: list of `_Part`.
    """
    chunk = x.shape[0]

    def visit_all(step, travelling, result):
        for part, x in zip(parts, travelling):
            start = _owner(step, part, size) * chunk + part.start
            result = visit(start, x, result)
        return result

    def step(i, carry):
        travelling, result = carry
        arriving = [_send(x, p, size) for p, x in zip(parts, travelling)]
        return arriving, visit_all(i, travelling, result)

    travelling = [_rows(x, p.start, p.rows) for p in parts]
    carry = travelling, result
    travelling, result = lax.fori_loop(0, size - 1, step, carry)
    return visit_all(size - 1, travelling, result)


def _send_sums(multiply, dtype, chunk, size, beside=None):
    """Send sums round, each to the device whose chunk it is.

    Args:
        multiply: function from a first row and a number of rows, within the
            whole batch, to this device's share of their sum, in float32.
        dtype: in which sums travel.
        chunk: int. Rows of a device.
        size: int. Devices in the ring.
        beside: `RingOverBatch`, run in the same steps. Defaults to `None`.

    Returns:
        An array `(chunk, ...)`; with `beside` a pair of it and their sums.
    """
    parts = _both_ways(chunk, size)

    def shares(step):
        # After a step the sum is here of whose chunk would be one later.
        starts = [_owner(step + 1, p, size) * chunk + p.start for p in parts]
        return [multiply(s, p.rows) for s, p in zip(starts, parts)]

    def step(i, carry):
        sums, others = carry
        arriving = [_send(z, p, size) for p, z in zip(parts, sums)]
        # Kept apart, or the compiler fuses a sum into its matmul, which then
        # waits for the transfer.
        arriving, own = lax.optimization_barrier((arriving, shares(i)))
        sums = [
            (z.astype(o.dtype) + o).astype(dtype) for z, o in zip(arriving, own)
        ]
        return sums, beside.step(i, others) if beside else others

    sums = [share.astype(dtype) for share in shares(0)]
    others = beside.start() if beside else []
    sums, others = lax.fori_loop(1, size, step, (sums, others))
    z = jnp.concatenate(sums, axis=0)
    return (z, beside.finish(others)) if beside else z


# === One step ===

# Sums are float32 and travel in the compute dtype.
_FLOAT32 = {"preferred_element_type": jnp.float32}


class _Part(typing.NamedTuple):
    """Rows of each chunk that travel one way.

    Attributes:
        start: int. First row within the chunk.
        rows: int.
        direction: `+1` or `-1`: to the next device or the one before.
    """

    start: int
    rows: int
    direction: int


def _one_way(chunk):
    return [_Part(0, chunk, +1)]


def _both_ways(chunk, size):
    """Halve a chunk of `chunk` rows, if both ways round differ."""
    half = chunk // 2
    if size < 3 or not half:
        return _one_way(chunk)
    return [_Part(0, half, +1), _Part(half, chunk - half, -1)]


def _owner(step, part, size):
    """Return whose chunk is here after `step` transfers."""
    rank = lax.axis_index(MODEL)
    return lax.rem(rank + size - part.direction * step, size)


def _float32_zeros(shape, event):
    """Return zeros that are not there before `event`, and `event`.

    Otherwise the compiler reserves them in the whole step.
    """
    return lax.optimization_barrier((jnp.zeros(shape, jnp.float32), event))


def _in(x, kernel):
    return jnp.tensordot(x, kernel, 1)


def _out(y, kernel, **options):
    return jnp.tensordot(y, kernel, kernel.ndim - 1, **options)


def _kernel_gradient(inputs, gradient):
    # Over images and tokens.
    return jnp.tensordot(inputs, gradient, ((0, 1), (0, 1)), **_FLOAT32)


def _send(x, part, size):
    pairs = [(r, (r + part.direction) % size) for r in range(size)]
    return lax.ppermute(x, MODEL, pairs)


def _rows(x, start, rows):
    return lax.dynamic_slice_in_dim(x, start, rows, axis=0)


def _put(x, start, rows):
    return lax.dynamic_update_slice_in_dim(x, rows, start, axis=0)
