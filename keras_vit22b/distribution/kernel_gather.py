"""Kernels that "batch" splits: gathered, and their gradients summed (JAX).

All of it runs within `jax.shard_map`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from keras_vit22b.distribution.sharding import AXIS_NAMES

BATCH, MODEL = AXIS_NAMES


def whole(sizes, axis, kernel):
    """Return a kernel, gathered if `axis` is a dimension and not `None`."""
    if axis is None:
        return kernel
    return gather_kernels(sizes.batch, (axis,), (kernel,))[0]


# Names by which a compiled program tells these transfers from others.
_GATHER, _REDUCE = "weight_gather", "gradient_reduction"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@jax.named_scope(_GATHER)
def gather_kernels(size, axes, kernels):
    """Gather kernels that are split along `axes`, in one transfer."""
    if len(kernels) < 2:
        return tuple(
            lax.all_gather(kernel, BATCH, axis=axis, tiled=True)
            for kernel, axis in zip(kernels, axes)
        )
    parts = [jnp.moveaxis(kernel, a, 0) for kernel, a in zip(kernels, axes)]
    flat = [part.reshape(1, -1) for part in parts]
    ends = list(itertools.accumulate(f.shape[1] for f in flat))
    all_parts = lax.all_gather(
        jnp.concatenate(flat, axis=1), BATCH, axis=0, tiled=True
    )
    return tuple(
        jnp.moveaxis(rows.reshape(-1, *part.shape[1:]), 0, axis)
        for rows, part, axis in zip(
            jnp.split(all_parts, ends[:-1], axis=1), parts, axes
        )
    )


def _forward(size, axes, kernels):
    return gather_kernels(size, axes, kernels), None


def _backward(size, axes, residuals, gradients):
    del residuals
    summed = (sum_and_split(size, *pair) for pair in zip(axes, gradients))
    return (tuple(summed),)


gather_kernels.defvjp(_forward, _backward)


@jax.named_scope(_REDUCE)
def sum_and_split(size, axis, dw):
    """Return this device's part of the sum over "batch".

    A reduce-scatter, as an exchange and a sum, since libtpu has no
    asynchronous reduce-scatter. And the sum is float32.
    """
    parts = lax.all_to_all(_parts(size, axis, dw), BATCH, 0, 0)
    return jnp.sum(parts, axis=0, dtype=jnp.float32).astype(dw.dtype)


def _parts(size, axis, dw):
    """Return the parts of all devices along "batch", first dimension."""
    shape = *dw.shape[:axis], size, -1, *dw.shape[axis + 1 :]
    return jnp.moveaxis(dw.reshape(shape), axis, 0)


class RingOverBatch:
    """Sums that travel, each to the device whose part it is, in float32.

    Args:
        size: int. Devices along "batch".
        axes: list of int. Dimension of each gradient that is split.
        gradients: list of arrays.
        num_steps: int. In how many steps they shall arrive.
    """

    def __init__(self, size, axes, gradients, num_steps):
        self.size = size
        self.dtypes = [dw.dtype for dw in gradients]
        self.parts = [
            _parts(size, axis, dw.astype(jnp.float32))
            for axis, dw in zip(axes, gradients)
        ]
        self.transfers = -(-(size - 1) // num_steps)  # A step, rounded up.

    def start(self):
        return [self._own(parts, 0) for parts in self.parts]

    @jax.named_scope(_REDUCE)
    def step(self, i, sums):
        """Take step `i`, from 1."""
        pairs = [(r, (r + 1) % self.size) for r in range(self.size)]
        for number in range(self.transfers):
            done = (i - 1) * self.transfers + number + 1
            arriving = [lax.ppermute(z, BATCH, pairs) for z in sums]
            sums = [
                jnp.where(done < self.size, z + self._own(parts, done), old)
                for z, parts, old in zip(arriving, self.parts, sums)
            ]
        return sums

    def finish(self, sums):
        return [z.astype(dtype) for z, dtype in zip(sums, self.dtypes)]

    def _own(self, parts, done):
        # After all transfers the sum here is this device's.
        rank = lax.axis_index(BATCH)
        owner = lax.rem(rank + 2 * self.size - 1 - done, self.size)
        return lax.dynamic_index_in_dim(parts, owner, keepdims=False)
