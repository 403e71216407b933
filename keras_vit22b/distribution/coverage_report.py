"""What each device holds of a model, checked against its layouts."""

import dataclasses
import math

import keras
import ml_dtypes  # noqa: F401  Gives NumPy the small float types.
import numpy as np

from keras_vit22b.distribution.sharding import TABLE
from keras_vit22b.distribution.sharding import axis_sizes
from keras_vit22b.distribution.sharding import check_backend
from keras_vit22b.distribution.sharding import indivisible
from keras_vit22b.distribution.sharding import num_parts

# Bytes from which a copy on every device must be asked for.
LARGE = 2**20
MAX_FAULTS = 10


@dataclasses.dataclass(frozen=True)
class CoverageRow:
    """How one variable is held.

    Attributes:
        path: string. Of the variable.
        row: string. Its row of the table; of an optimizer's slot, that of its
            weight. Without one: "layout map", "optimizer" or "metrics".
        shape: tuple of int.
        dtype: string.
        axes: tuple of axis names and `None`, one a dimension.
        num_bytes: int. In all.
        bytes_per_device: int.
    """

    path: str
    row: str
    shape: tuple
    dtype: str
    axes: tuple
    num_bytes: int
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What `coverage` returns; `str` of it is a table.

    Attributes:
        mesh: dict from axis name to devices.
        rows: tuple of `CoverageRow`.
    """

    mesh: dict
    rows: tuple

    @property
    def num_bytes(self):
        """int. Of all variables, each counted once."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def bytes_per_device(self):
        """int. Of all variables, on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    def __str__(self):
        cells = [("variable", "row", "shape", "axes", "bytes", "a device")]
        for row in self.rows:
            axes = ", ".join(axis or "-" for axis in row.axes)
            cells.append(
                (
                    row.path,
                    row.row,
                    f"{row.dtype} {row.shape}",
                    axes if any(row.axes) else "whole",
                    f"{row.num_bytes:,}",
                    f"{row.bytes_per_device:,}",
                )
            )
        totals = (f"{self.num_bytes:,}", f"{self.bytes_per_device:,}")
        mesh = " x ".join(f"{axis} {n}" for axis, n in self.mesh.items())
        cells.append((f"in all, on {mesh}", "", "", "", *totals))
        widths = [max(map(len, column)) for column in zip(*cells)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, [0, 0, 0, 0, 1, 1])
            )
            for line in cells
        )


def coverage(model, *, layout_map=None):
    """Check and report how every variable of a model is held on a mesh.

    Weights, quantization scales, LoRA, seeds, the optimizer's slots once it
    is built, and metrics. Keras gives no layouts to metrics and to what an
    optimizer does not shape as a weight, such as the factors of Adafactor;
    these may be whole where they are small.

    Args:
        model: a `ViT22BBackbone`, a `ViT22BImageClassifier`, or a model around
            one. It may be abstract.
        layout_map: a `keras.distribution.LayoutMap`, to see what it would do;
            its mesh may be of devices that do not exist. Defaults to `None`:
            that of the `keras.distribution.ModelParallel` in force.

    Returns:
        A `Coverage`: `print` it, or read its `rows`.

    Raises:
        ValueError: naming each variable that has no layout, matches several,
            does not divide over its axes, is not held as its layout says, or
            is large and whole without a row that says so; and what would work.

    Example:
    ```python
    devices = np.arange(1024)  # A mesh of devices that do not exist.
    mesh = keras.distribution.DeviceMesh(
        (128, 8), ["batch", "model"], devices=devices
    )
    layout_map = keras_vit22b.ViT22BBackbone.get_layout_map(mesh, fsdp=True)
    model = keras_vit22b.ViT22BBackbone.from_preset(
        "vit22b_patch14_224", abstract=True
    )
    print(keras_vit22b.distribution.coverage(model, layout_map=layout_map))
    ```
    """
    check_backend()
    if not isinstance(model, keras.Model) or not model.variables:
        raise ValueError(
            "coverage needs a keras.Model that is built, so that it has "
            f"variables. Received: {model!r}."
        )
    if layout_map is not None:
        device_mesh, find = layout_map.device_mesh, layout_map.__getitem__
    else:
        distribution = keras.distribution.distribution()
        if not isinstance(distribution, keras.distribution.ModelParallel):
            raise ValueError(
                "coverage needs a keras.distribution.ModelParallel in force, "
                "or a layout_map, as ViT22BBackbone.get_layout_map makes. "
                f"In force is: {distribution}."
            )
        device_mesh = distribution.device_mesh
        find = distribution.get_tensor_layout
    held = layout_map is None and not getattr(model, "_is_abstract", False)
    rows, faults = [], []
    for variable, kind, path in _variables(model):
        row, axes, fault = kind, (), None
        if path is not None:
            row, axes, fault = _layout(path, variable.shape, find, device_mesh)
        fault = fault or _fault(variable, row, axes, device_mesh)
        if fault is None and held:
            fault = _misplaced(variable, axes, device_mesh)
        if fault:
            faults.append(fault)
        else:
            rows.append(_row(variable, row, axes, device_mesh))
    if faults:
        more = len(faults) - MAX_FAULTS
        raise ValueError(
            f"{len(faults)} variables are not covered:\n- "
            + "\n- ".join(faults[:MAX_FAULTS])
            + (f"\n- and {more} more." if more > 0 else "")
        )
    return Coverage(axis_sizes(device_mesh), tuple(rows))


def _variables(model):
    """Yield each variable, its kind, and the path whose layout it has.

    The kind is `None` for weights and their slots. The path is `None` for
    what Keras gives no layout.
    """
    weights = {}
    for variable in model.variables:
        weights[variable.path.replace("/", "_")] = variable
        yield variable, None, variable.path
    optimizer = getattr(model, "optimizer", None)
    for variable in optimizer.variables if optimizer else ():
        weight = _weight_of_slot(variable, weights)
        if weight is None:
            yield variable, "optimizer", None
        else:
            yield variable, None, weight.path
    for variable in model.metrics_variables:
        yield variable, "metrics", None


def _weight_of_slot(slot, weights):
    """Return the weight that an optimizer's variable has the layout of.

    Keras names slots "adam_w/block_0_norm_scale_velocity".
    """
    name = slot.path.rpartition("/")[2]
    while name:
        name = name.rpartition("_")[0]
        if name in weights and weights[name].shape == slot.shape:
            return weights[name]
    return None


def _layout(path, shape, find, device_mesh):
    """Return a row's name, its axes, and a fault or `None`."""
    names = [row.name for row in TABLE if row.matches(path)]
    if len(names) > 1:
        return None, (), f"{path} matches the rows {' and '.join(names)}."
    try:
        layout = find(path)
    except ValueError as error:
        return None, (), f"{error} Delete all but one from the layout map."
    if layout is not None:
        return (names or ["layout map"])[0], tuple(layout.axes), None
    if names:
        advice = "use the layout map of ViT22BBackbone.get_layout_map"
    else:
        axes = _largest_that_divides(shape, axis_sizes(device_mesh))
        advice = (
            "before the model is made, add one to the layout map, such as "
            f"layout_map[{path!r}] = {axes}"
        )
    return None, (), f"{path} {tuple(shape)} has no layout; {advice}."


def _largest_that_divides(shape, sizes):
    """Return axes that split the largest dimension that can be split."""
    axis, devices = list(sizes.items())[-1]
    axes = [None] * len(shape)
    dividing = [i for i, size in enumerate(shape) if size % devices == 0]
    if dividing:
        axes[max(dividing, key=lambda i: shape[i])] = axis
    return tuple(axes)


def _fault(variable, row, axes, device_mesh):
    """Say why axes do not fit a variable, or return `None`."""
    path, shape = variable.path, tuple(variable.shape)
    if len(axes) > len(shape):
        return (
            f"{path} {shape} has fewer dimensions than its axes {axes}. int4 "
            "folds kernels into two: there use fsdp=False, or int8."
        )
    fault = indivisible(path, shape, axes, device_mesh)
    if fault:
        return fault
    num_bytes = _num_bytes(variable)
    if row in ("optimizer", "metrics") and num_bytes >= LARGE:
        return (
            f"{path} {shape} takes {num_bytes:,} bytes on every device, since "
            f"Keras gives no layout to such variables of {row}. "
            + (
                "The slots of AdamW, Lion and Muon are split as their weights."
                if row == "optimizer"
                else "Compute this metric from predictions instead."
            )
        )
    return None


def _misplaced(variable, axes, device_mesh):
    """Say whether a variable is held otherwise than its axes say."""
    sharding = getattr(variable.value, "sharding", None)
    if sharding is None:
        return None
    sizes = axis_sizes(device_mesh)
    axes = (*axes, *[None] * (len(variable.shape) - len(axes)))
    should = tuple(
        size // sizes[axis] if axis else size
        for size, axis in zip(variable.shape, axes)
    )
    held = variable.value.addressable_shards[0].data.shape
    if held == should:
        return None
    return (
        f"{variable.path} {tuple(variable.shape)} should be held as parts "
        f"{should}, but a device holds {held}. Set the distribution before "
        "the model is made."
    )


def _row(variable, row, axes, device_mesh):
    num_bytes = _num_bytes(variable)
    rank = len(variable.shape)
    return CoverageRow(
        path=variable.path,
        row=row,
        shape=tuple(variable.shape),
        dtype=variable.dtype,
        axes=tuple(axes) + (None,) * (rank - len(axes)),
        num_bytes=num_bytes,
        bytes_per_device=num_bytes // num_parts(axes, axis_sizes(device_mesh)),
    )


def _num_bytes(variable):
    itemsize = np.dtype(variable.dtype).itemsize
    return math.prod(variable.shape) * itemsize
