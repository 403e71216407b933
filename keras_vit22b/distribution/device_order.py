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
    # Keras' own names, such as "cpu:0", keep their order, as on a CPU.
    platform = getattr(devices[0], "platform", "cpu")
    if platform == "tpu":
        grid = _device_grid(devices)
        devices = sorted(devices, key=_slice)
    elif platform != "cpu":
        devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    if grid is not None:
        rings = _rings(grid.shape, _wrapped(grid), model)
        if rings is not None:
            devices = [grid[position] for ring in rings for position in ring]
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array.reshape(batch, model)


def sums_in_ring(devices):
    """Return whether gradients should go round a ring along "batch".

    That is, where no all-to-all runs beside matmuls and the ring closes over
    single links.

    Args:
        devices: array `(batch, model)` of devices.
    """
    return is_limited(devices) and closes_over_links(devices, axis=0)


def closes_over_links(devices, axis):
    """Return whether an axis of a mesh is a ring of linked TPU chips.

    Args:
        devices: array `(batch, model)` of devices.
        axis: int.
    """
    grid = _device_grid(devices.flat)
    if grid is None:
        return False
    positions = np.array([[_position(d) for d in row] for row in devices])
    steps = np.abs(positions - np.roll(positions, -1, axis))
    wrapped = np.minimum(steps, grid.shape - steps)
    steps = np.where(_wrapped(grid), wrapped, steps)
    # No link leaves a slice.
    return not steps[..., 0].any() and bool((steps.sum(axis=-1) == 1).all())


def is_limited(devices):
    """Return whether libtpu has no asynchronous all-to-all for devices.

    That is, on v5e and v6e slices of more than 16 chips ("not supported on
    limited ICI").
    """
    kind = getattr(devices.flat[0], "device_kind", "")
    return _is_grid(kind) and devices.size > 16


def _is_grid(kind):
    """Whether chips of a kind are joined in two dimensions."""
    return any(name in kind.lower() for name in ("lite", "v5e", "v6e"))


def _slice(device):
    return getattr(device, "slice_index", 0) or 0


def _position(device):
    core = getattr(device, "core_on_chip", 0)
    return (_slice(device), *device.coords, core)


def _device_grid(devices):
    """Return devices by their coordinates, or `None` if they fill no grid.

    The dimensions are those of the slices' number, the chips' x, y and z, and
    the core on the chip.
    """
    devices = list(devices)
    coords = {_position(d): d for d in devices}
    low = np.min(list(coords), axis=0)
    shape = tuple(np.max(list(coords), axis=0) - low + 1)
    if len(coords) != len(devices) or math.prod(shape) != len(devices):
        return None
    grid = np.empty(shape, dtype=object)
    for position, device in coords.items():
        grid[tuple(position - low)] = device
    return grid


def _wrapped(grid):
    """Return for each dimension of a grid whether its ends are linked."""
    sides = wrapped_sides(grid.flat[0].device_kind, grid.shape[1:-1])
    return (False, *sides, False)


def wrapped_sides(kind, sides):
    """Return for each side of a slice whether its ends are linked.

    v4 and v5p wrap where a slice is made of whole cubes of 4 x 4 x 4; v5e and
    v6e wrap where a side has its full length, 16.

    Args:
        kind: string. Of TPU, such as `"TPU v5 lite"` or `"v5e"`.
        sides: tuple of int.
    """
    if _is_grid(kind):
        return tuple(side == 16 for side in sides)
    return (all(side % 4 == 0 for side in sides),) * len(sides)


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
        # The most compact, and of these one that cuts no side that wraps.
        block = min(
            folded,
            key=lambda b: (sum(b), sum(s > 1 for s, w in zip(b, wrapped) if w)),
        )
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
