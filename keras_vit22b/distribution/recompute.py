"""Recomputing a block without waiting for transfers over "batch" (JAX)."""

import functools

import jax
from jax import lax


def recompute(function):
    """Return `function`, recomputed in the backward pass.

    `keras.remat` lets nothing of a block's recomputation start before the
    gradient of its output is there, kernels that have to be gathered included.
    Here only the block's input waits, so that kernels are gathered beside the
    matmuls of the block before. And no earlier: gradients of kernels must have
    been exchanged when the block ends, or the compiler would leave all of them
    to the end of the step, and keep them in memory until then.

    Args:
        function: from one array to one array. May close over other arrays.
    """

    def run(x):
        closed, weights = jax.closure_convert(function, x)
        return _recomputed(closed, x, *weights)

    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(function, x, *weights):
    return function(x, *weights)


def _forward(function, x, *weights):
    return function(x, *weights), (x, weights)


def _backward(function, residuals, dy):
    x, weights = residuals
    x, dy = lax.optimization_barrier((x, dy))
    # One by one, so that none waits. Without these the compiler would see the
    # forward pass again, and keep its gathered kernels.
    weights = map(lax.optimization_barrier, weights)
    _, pull_back = jax.vjp(function, x, *weights)
    return lax.optimization_barrier(pull_back(dy))


_recomputed.defvjp(_forward, _backward)
