"""Matmuls whose transfers run beside them, as rings over the "model" axis.

Device `r` of `n` along "model" holds chunk `r` of the batch and the kernels of
its own heads. Going in, every device needs every chunk: chunks travel round
the ring, and while one travels, the one before is multiplied. Going out, every
device holds a part of every chunk's result: sums travel instead, and while one
travels, the next part is made.

Each backward pass is a ring too, not autodiff of the forward one, which would
leave transfers exposed and keep every chunk in memory:

    y = AG(x) w     dx = RS(dy w^T)     dw = AG(x)^T dy
    z = RS(y w)     dy = AG(dz) w^T     dw = y^T AG(dz)

In the first, `x` and the sums of `dx` travel in opposite directions beside two
matmuls. In the second, one ring of `dz` serves both.

A transfer of half a chunk each way takes half the time of a whole chunk one
way, since links carry both directions at once. Eight devices on TPU v4 need
that: a whole chunk takes longer than its matmul (6144 wide, 45 GB/s a link).

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
    chunk = x.shape[0]
    parts = _parts(chunk, size)
    y = jnp.zeros(
        (size * chunk, x.shape[1], *kernel.shape[1:]),
        jnp.result_type(x, kernel),
    )

    def multiply(step, travelling, y):
        for part, x in zip(parts, travelling):
            row = _owner(step, part, size) * chunk + part.start
            y = _put(y, row, _in(x, kernel))
        return y

    def step(i, carry):
        travelling, y = carry
        arriving = [_send(x, p, size) for p, x in zip(parts, travelling)]
        return arriving, multiply(i, travelling, y)

    travelling = [_rows(x, p.start, p.rows) for p in parts]
    travelling, y = lax.fori_loop(0, size - 1, step, (travelling, y))
    return multiply(size - 1, travelling, y)


def _all_gather_matmul_forward(x, kernel, size):
    return _ring_all_gather_matmul(x, kernel, size), (x, kernel)


def _all_gather_matmul_backward(size, residuals, dy):
    x, kernel = residuals
    chunk = x.shape[0]
    there = _Part(0, chunk, +1)
    back = _Part(0, chunk, -1)

    def gradients(step, x, dw):
        dy_x = _rows(dy, _owner(step, there, size) * chunk, chunk)
        dw = dw + _kernel_gradient(x, dy_x)
        dy_dx = _rows(dy, _target(step, back, size) * chunk, chunk)
        # Over the heads and f.
        axes = [*range(2, dy.ndim)], [*range(1, kernel.ndim)]
        return jnp.tensordot(dy_dx, kernel, axes, **_FLOAT32), dw

    def step(i, carry):
        x, dx, dw = carry
        arriving = _send(x, there, size), _send(dx, back, size)
        x, dx = arriving
        own, dw = gradients(i, x, dw)
        return x, _add([dx], [own])[0], dw

    dx, dw = gradients(0, x, jnp.zeros(kernel.shape, jnp.float32))
    carry = x, dx.astype(x.dtype), dw
    _, dx, dw = lax.fori_loop(1, size, step, carry)
    return dx, dw.astype(kernel.dtype)


_ring_all_gather_matmul.defvjp(
    _all_gather_matmul_forward, _all_gather_matmul_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring_matmul_reduce_scatter(y, kernel, size):
    chunk = y.shape[0] // size
    parts = _parts(chunk, size)

    def multiply(step, part):
        row = _target(step, part, size) * chunk + part.start
        return _out(_rows(y, row, part.rows), kernel, **_FLOAT32)

    def step(i, sums):
        arriving = [_send(z, p, size) for p, z in zip(parts, sums)]
        own = [multiply(i, p) for p in parts]
        return _add(arriving, own)

    dtype = jnp.result_type(y, kernel)
    sums = [multiply(0, p).astype(dtype) for p in parts]
    return jnp.concatenate(lax.fori_loop(1, size, step, sums), axis=0)


def _matmul_reduce_scatter_forward(y, kernel, size):
    return _ring_matmul_reduce_scatter(y, kernel, size), (y, kernel)


def _matmul_reduce_scatter_backward(size, residuals, dz):
    y, kernel = residuals
    chunk = dz.shape[0]
    there = _Part(0, chunk, +1)

    def gradients(step, dz, dy, dw):
        row = _owner(step, there, size) * chunk
        dy = _put(dy, row, jnp.tensordot(dz, kernel, (-1, -1)))
        return dy, dw + _kernel_gradient(_rows(y, row, chunk), dz)

    def step(i, carry):
        dz, dy, dw = carry
        arriving = _send(dz, there, size)
        return arriving, *gradients(i, dz, dy, dw)

    carry = dz, jnp.zeros_like(y), jnp.zeros(kernel.shape, jnp.float32)
    dz, dy, dw = lax.fori_loop(0, size - 1, step, carry)
    dy, dw = gradients(size - 1, dz, dy, dw)
    return dy, dw.astype(kernel.dtype)


_ring_matmul_reduce_scatter.defvjp(
    _matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward
)

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


def _parts(chunk, size):
    """Halve a chunk of `chunk` rows, if both ways round differ."""
    half = chunk // 2
    if size < 3 or not half:
        return [_Part(0, chunk, +1)]
    return [_Part(0, half, +1), _Part(half, chunk - half, -1)]


def _owner(step, part, size):
    """Return whose chunk is here after `step` transfers."""
    rank = lax.axis_index(MODEL)
    return lax.rem(rank + size - part.direction * step, size)


def _target(step, part, size):
    """Return whose sum is here after `step` of `size - 1` transfers."""
    return _owner(step + 1, part, size)


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


def _add(arriving, own):
    # Kept apart, or the compiler fuses a sum into its matmul, which then
    # waits for the transfer.
    arriving, own = lax.optimization_barrier((arriving, own))
    return [
        (z.astype(o.dtype) + o).astype(z.dtype) for z, o in zip(arriving, own)
    ]
