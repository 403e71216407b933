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

BATCH = "batch"
MODEL = "model"


@functools.partial(jax.jit, static_argnames=("mesh", "kernel_spec", "ring"))
def all_gather_matmul(x, kernel, *, mesh, kernel_spec, ring=True):
    """Return `einsum("btd,dhf->bthf", x, kernel)`, heads over "model".

    Args:
        x: array `(batch, tokens, d)`, the batch over both axes.
        kernel: array `(d, heads, f)`, or `(d, f)` with `f` for the heads.
        mesh: `jax.sharding.Mesh` with axes "batch" and "model".
        kernel_spec: `PartitionSpec` of the kernel: the heads over "model",
            another dimension over "batch" or not.
        ring: bool. Whether to hide the transfers. Otherwise the chunks are
            gathered first. Defaults to `True`.

    Returns:
        An array `(batch, tokens, heads, f)` or `(batch, tokens, f)`, the
        batch over "batch" and the heads over "model".
    """
    run = _ring_all_gather_matmul if ring else _plain_all_gather_matmul
    return _shard_map(
        run,
        mesh,
        kernel_spec,
        PartitionSpec((BATCH, MODEL)),
        PartitionSpec(BATCH, None, MODEL),
    )(x, kernel)


@functools.partial(jax.jit, static_argnames=("mesh", "kernel_spec", "ring"))
def matmul_reduce_scatter(y, kernel, *, mesh, kernel_spec, ring=True):
    """Return `einsum("bthf,hfd->btd", y, kernel)`, the batch over both axes.

    Args:
        y: array `(batch, tokens, heads, f)`, or `(batch, tokens, f)` with `f`
            for the heads; the batch over "batch", the heads over "model".
        kernel: array `(heads, f, d)` or `(f, d)`.
        mesh: `jax.sharding.Mesh` with axes "batch" and "model".
        kernel_spec: `PartitionSpec` of the kernel: the heads over "model",
            another dimension over "batch" or not.
        ring: bool. Whether to hide the transfers. Otherwise the sum follows
            the matmul. Defaults to `True`.

    Returns:
        An array `(batch, tokens, d)`, the batch over both axes.
    """
    run = _ring_matmul_reduce_scatter if ring else _plain_matmul_reduce_scatter
    return _shard_map(
        run,
        mesh,
        kernel_spec,
        PartitionSpec(BATCH, None, MODEL),
        PartitionSpec((BATCH, MODEL)),
    )(y, kernel)


def _shard_map(run, mesh, kernel_spec, in_spec, out_spec):
    gathered = [axis for axis, name in enumerate(kernel_spec) if name == BATCH]

    def run_with_whole_kernel(x, kernel):
        for axis in gathered:
            kernel = _gather_kernel(kernel, axis, mesh.shape[BATCH])
        return run(x, kernel, mesh.shape[MODEL])

    return jax.shard_map(
        run_with_whole_kernel,
        mesh=mesh,
        in_specs=(in_spec, kernel_spec),
        out_specs=out_spec,
        check_vma=False,
    )


# === Kernels over "batch" ===


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_kernel(kernel, axis, size):
    del size
    return lax.all_gather(kernel, BATCH, axis=axis, tiled=True)


def _gather_kernel_forward(kernel, axis, size):
    return _gather_kernel(kernel, axis, size), None


def _gather_kernel_backward(axis, size, residuals, dw):
    # A reduce-scatter, as an exchange and a sum, since libtpu has no
    # asynchronous reduce-scatter. And the sum is float32.
    del residuals
    parts = dw.reshape(*dw.shape[:axis], size, -1, *dw.shape[axis + 1 :])
    parts = lax.all_to_all(jnp.moveaxis(parts, axis, 0), BATCH, 0, 0)
    return (jnp.sum(parts, axis=0, dtype=jnp.float32).astype(dw.dtype),)


_gather_kernel.defvjp(_gather_kernel_forward, _gather_kernel_backward)

# === Without rings ===


def _plain_all_gather_matmul(x, kernel, size):
    del size
    x = lax.all_gather(x, MODEL, axis=0, tiled=True)
    return _in(x, kernel)


def _plain_matmul_reduce_scatter(y, kernel, size):
    del size
    z = _out(y, kernel)
    return lax.psum_scatter(z, MODEL, scatter_dimension=0, tiled=True)


# === Rings ===


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring_all_gather_matmul(x, kernel, size):
    y_shape = (size * x.shape[0], x.shape[1], *kernel.shape[1:])

    def put(start, x, y):
        return _put(y, start, _in(x, kernel))

    y = jnp.zeros(y_shape, jnp.result_type(x, kernel))
    return _gather(x, y, put, size, _both_ways(x.shape[0], size))


def _all_gather_matmul_forward(x, kernel, size):
    return _ring_all_gather_matmul(x, kernel, size), (x, kernel)


def _all_gather_matmul_backward(size, residuals, dy):
    x, kernel = residuals
    chunk = x.shape[0]

    def add(start, x, dw):
        return dw + _kernel_gradient(x, _rows(dy, start, chunk))

    dw = jnp.zeros(kernel.shape, jnp.float32)
    dw = _gather(x, dw, add, size, _one_way(chunk)).astype(kernel.dtype)
    # The kernel's gradient first: its exchange over "batch" can then run
    # beside what follows.
    dw, dy = lax.optimization_barrier((dw, dy))

    def multiply(start, rows):
        # Over the heads and f.
        axes = [*range(2, dy.ndim)], [*range(1, kernel.ndim)]
        return jnp.tensordot(_rows(dy, start, rows), kernel, axes, **_FLOAT32)

    return _scatter(multiply, x.dtype, chunk, size), dw


_ring_all_gather_matmul.defvjp(
    _all_gather_matmul_forward, _all_gather_matmul_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring_matmul_reduce_scatter(y, kernel, size):
    def multiply(start, rows):
        return _out(_rows(y, start, rows), kernel, **_FLOAT32)

    return _scatter(
        multiply, jnp.result_type(y, kernel), y.shape[0] // size, size
    )


def _matmul_reduce_scatter_forward(y, kernel, size):
    return _ring_matmul_reduce_scatter(y, kernel, size), (y, kernel)


def _matmul_reduce_scatter_backward(size, residuals, dz):
    y, kernel = residuals
    chunk = dz.shape[0]

    def put_and_add(start, dz, gradients):
        dy, dw = gradients
        dy = _put(dy, start, jnp.tensordot(dz, kernel, (-1, -1)))
        return dy, dw + _kernel_gradient(_rows(y, start, chunk), dz)

    gradients = jnp.zeros_like(y), jnp.zeros(kernel.shape, jnp.float32)
    dy, dw = _gather(dz, gradients, put_and_add, size, _one_way(chunk))
    return dy, dw.astype(kernel.dtype)


_ring_matmul_reduce_scatter.defvjp(
    _matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward
)


def _gather(x, result, visit, size, parts):
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


def _scatter(multiply, dtype, chunk, size):
    """Send sums round, each to the device whose chunk it is.

    Args:
        multiply: function from a first row and a number of rows, within the
            whole batch, to this device's share of their sum, in float32.
        dtype: in which sums travel.
        chunk: int. Rows of a device.
        size: int. Devices in the ring.

    Returns:
        An array `(chunk, ...)`.
    """
    parts = _both_ways(chunk, size)

    def shares(step):
        # After a step the sum is here of whose chunk would be one later.
        starts = [_owner(step + 1, p, size) * chunk + p.start for p in parts]
        return [multiply(s, p.rows) for s, p in zip(starts, parts)]

    def step(i, sums):
        arriving = [_send(z, p, size) for p, z in zip(parts, sums)]
        # Kept apart, or the compiler fuses a sum into its matmul, which then
        # waits for the transfer.
        arriving, own = lax.optimization_barrier((arriving, shares(i)))
        return [
            (z.astype(o.dtype) + o).astype(dtype) for z, o in zip(arriving, own)
        ]

    sums = [share.astype(dtype) for share in shares(0)]
    return jnp.concatenate(lax.fori_loop(1, size, step, sums), axis=0)


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
