"""Devices in the order of the links between them.

`keras.distribution` takes devices as they are listed, so that neighbours on an
axis may be far apart. On slices of TPU v5e the compiler then makes a ring's
transfers synchronous.
"""

import itertools
import math

import numpy as np


def order_devices(devices, batch, model):
    """Arrange devices so that neighbours along "model" share a link.

    Args:
        devices: list of `jax.Device`, in any order.
        batch: int.
        model: int. `batch * model` is the number of devices.

    Returns:
        An object array `(batch, model)`.
    """
    grid = None
    if devices[0].platform == "tpu":
        grid = _device_grid(devices)
        devices = sorted(devices, key=_slice)
    elif devices[0].platform != "cpu":
        devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    if grid is not None:
        rings = _rings(grid.shape, _wrapped(grid), model)
        if rings is not None:
            devices = [grid[position] for ring in rings for position in ring]
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array.reshape(batch, model)


def _slice(device):
    return getattr(device, "slice_index", 0) or 0


def _device_grid(devices):
    """Return devices by their coordinates, or `None` if they fill no grid.

    The dimensions are those of the slices' number, the chips' x, y and z, and
    the core on the chip.
    """
    coords = {
        (_slice(d), *d.coords, getattr(d, "core_on_chip", 0)): d
        for d in devices
    }
    low = np.min(list(coords), axis=0)
    shape = tuple(np.max(list(coords), axis=0) - low + 1)
    if len(coords) != len(devices) or math.prod(shape) != len(devices):
        return None
    grid = np.empty(shape, dtype=object)
    for position, device in coords.items():
        grid[tuple(position - low)] = device
    return grid


def _wrapped(grid):
    """Return for each dimension whether its ends are linked.

    v4 and v5p wrap where a slice is made of whole cubes of 4 x 4 x 4; v5e and
    v6e wrap where a side has its full length, 16.
    """
    kind = grid.flat[0].device_kind.lower()
    sides = grid.shape[1:-1]
    if "lite" in kind or "v5e" in kind or "v6e" in kind:
        wrapped = [side == 16 for side in sides]
    else:
        wrapped = [all(s % 4 == 0 for s in sides)] * len(sides)
    return (False, *wrapped, False)


def _rings(shape, wrapped, size):
    """Cut a grid into rings of `size` neighbours, or return `None`.

    Args:
        shape: sides of the grid.
        wrapped: whether the ends of each side are linked.
        size: int. Devices in a ring.

    Returns:
        A list of rings, each a list of positions in the grid.
    """
    blocks = [
        block
        for block in itertools.product(*map(divisors, shape))
        if math.prod(block) == size and block[0] == 1
    ]
    whole = [
        block
        for block in blocks
        for axis, side in enumerate(block)
        if side == size == shape[axis] and wrapped[axis]
    ]
    folded = [b for b in blocks if size <= 2 or _cycle(b) is not None]
    if whole:
        block, cycle = whole[0], list(np.ndindex(*whole[0]))
    elif folded:
        # The most compact.
        block = min(folded, key=sum)
        cycle = _cycle(block) or list(np.ndindex(*block))
    else:
        return None
    corners = np.ndindex(*(side // b for side, b in zip(shape, block)))
    return [
        [
            tuple(c * b + p for c, b, p in zip(corner, block, position))
            for position in cycle
        ]
        for corner in corners
    ]


def _cycle(shape):
    """Return a closed walk of neighbours through a grid, or `None`.

    Fold all sides but one into a path; in the grid of that side and the path,
    go along the rows in turn, back and forth, and return by the first column.
    """
    sides = [axis for axis, side in enumerate(shape) if side > 1]
    for axis in sides:
        rows = shape[axis]
        path = _path([1 if a == axis else s for a, s in enumerate(shape)])
        if rows % 2 == 0 and len(path) > 1:
            cells = [
                (row, column)
                for row in range(rows)
                for column in range(1, len(path))[:: 1 if row % 2 == 0 else -1]
            ]
            cells += [(row, 0) for row in reversed(range(rows))]
            return [
                tuple(r if a == axis else p for a, p in enumerate(path[c]))
                for r, c in cells
            ]
    return None


def _path(shape):
    """Return a walk of neighbours through a grid, one side in turn."""
    walk = [()]
    for side in shape:
        walk = [
            (*position, i)
            for n, position in enumerate(walk)
            for i in range(side)[:: 1 if n % 2 == 0 else -1]
        ]
    return walk


def divisors(number):
    """Return all divisors of a positive int, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
