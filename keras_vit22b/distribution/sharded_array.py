"""JAX arrays made from slices, so that the whole is never in memory."""

import jax


def sharded_array(shape, sharding, read_slice):
    """Return an array of which each device holds its slice.

    Args:
        shape: tuple of int.
        sharding: a `jax.sharding.Sharding`.
        read_slice: a function from a tuple of slices, with start and stop, to
            the NumPy array there. Each slice is read once, however many
            devices hold it.
    """
    parts = {}

    def part(index):
        index = tuple(
            slice(*s.indices(size)[:2]) for s, size in zip(index, shape)
        )
        key = tuple((s.start, s.stop) for s in index)
        if key not in parts:
            parts[key] = read_slice(index)
        return parts[key]

    return jax.make_array_from_callback(tuple(shape), sharding, part)
