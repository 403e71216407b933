"""Sums of bits, and which values are not finite."""

import functools

import keras
import ml_dtypes  # noqa: F401  Gives NumPy the small float types.
import numpy as np


def check_state(values):
    """Return a record of each array, and which are not finite.

    Its sum is over positions `i = 0, 1, ...` of `(2 i + 1)` times the bits
    there, modulo 2 ** 32. It does not depend on how an array lies on devices,
    and no change of one value leaves it as it is.

    Args:
        values: dict from name to variable or array.

    Returns:
        `(records, bad)`: a dict from name to a dict of `"shape"`, `"dtype"`
        and `"sum"`, and a list of the names of those with a value that is not
        finite.
    """
    values = {
        name: value.value if isinstance(value, keras.Variable) else value
        for name, value in values.items()
    }
    if keras.config.backend() == "jax":
        results = _jitted()(list(values.values()))
    else:
        values = {
            name: keras.ops.convert_to_numpy(value)
            for name, value in values.items()
        }
        results = map(_check, values.values())
    records, bad = {}, []
    for (name, value), (total, finite) in zip(values.items(), results):
        records[name] = {
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "sum": int(total),
        }
        if not finite:
            bad.append(name)
    return records, bad


def _check(array):
    finite = True
    if array.dtype.kind not in "iub":
        finite = np.isfinite(array).all()
    width = min(array.dtype.itemsize, 4)
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * width}")
    positions = np.arange(len(bits)).astype("uint32")
    products = bits.astype("uint32") * (2 * positions + 1)
    return products.sum(dtype="uint32"), finite


@functools.cache
def _jitted():
    import jax

    return jax.jit(lambda values: [_check_on_devices(v) for v in values])


def _check_on_devices(array):
    """Do the same in JAX, without an array of the flat positions."""
    import jax
    import jax.numpy as jnp

    finite = jnp.array(True)
    if jnp.issubdtype(array.dtype, jnp.floating):
        finite = jnp.isfinite(array).all()
    if array.dtype == bool:
        array = array.astype("uint8")
    bits = jax.lax.bitcast_convert_type(
        array, f"uint{8 * array.dtype.itemsize}"
    ).astype("uint32")
    position = jnp.zeros((), "uint32")
    for axis, size in enumerate(bits.shape):
        index = jax.lax.broadcasted_iota("uint32", bits.shape, axis)
        position = position * jnp.uint32(size) + index
    return (bits * (2 * position + 1)).sum(dtype="uint32"), finite
