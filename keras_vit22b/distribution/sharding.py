"""The one table of which mesh axis splits which dimension of a weight.

A mesh has two axes: "batch" splits images, "model" splits heads. Layout maps
and `coverage` both read the table. Each weight matches one row.

A row names the axes of the first dimensions; the others stay whole. So one row
serves a kernel `(d, heads, f)` and its int4 form `(d, heads * f / 2)`.
"""

import dataclasses
import re

import keras

AXIS_NAMES = ("batch", "model")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: string. Short, for reports.
        pattern: string. A regular expression of the whole variable path.
        axes: tuple of "batch", "model" or `None`, one a dimension. Empty for
            what every device holds whole, on purpose.
        fsdp_axes: tuple. The axes with `fsdp=True`. Defaults to `None`: the
            same.
    """

    name: str
    pattern: str
    axes: tuple = ()
    fsdp_axes: tuple | None = None

    def matches(self, path):
        """Return whether a variable path belongs to the row."""
        return re.fullmatch(self.pattern, path) is not None

    def axes_on(self, sizes, *, fsdp):
        """Return the axes on a mesh of `sizes`, a dict from axis to devices.

        With `fsdp` these are the ones that split more.
        """
        if not fsdp or self.fsdp_axes is None:
            return self.axes
        return max(
            self.axes, self.fsdp_axes, key=lambda axes: num_parts(axes, sizes)
        )


_BLOCK = r"block_\d+"
# Kernels (d, heads, f) and (heads, f, d).
_INTO_HEADS = rf"({_BLOCK}/(in|qkv)_projection|pooling/(query|key|value))"
_OUT_OF_HEADS = rf"({_BLOCK}/(out_projection|attention_out)|pooling/out)"
_MLP = rf"({_BLOCK}|pooling)"

# Heads and hidden units go over "model". FSDP puts the width d over "batch".
# Whole on purpose: vectors of d numbers, and what is next to the pixels, where
# gathering a weight would stall the first block. The head is split by d, since
# few numbers of classes divide by a mesh; it has one dimension to split, and
# FSDP takes the axis with more devices.
TABLE = (
    Row("patch_embedding.kernel", "patch_embedding/kernel"),
    Row("patch_embedding.bias", "patch_embedding/bias"),
    Row("position_embedding", "patch_embedding/position_embedding"),
    Row("class_token", "patch_embedding/class_(token|position)"),
    Row("registers", "patch_embedding/registers"),
    Row(
        "norms",
        rf"(pre_norm|final_norm|pooling/norm|{_BLOCK}/(norm|mlp_norm)"
        rf"|{_BLOCK}/attention/(query|key)_norm)/(scale|gamma|beta)",
    ),
    Row("layer_scale", rf"{_BLOCK}/(layer|attention|mlp)_scale"),
    Row(
        "into_heads.kernel",
        rf"{_INTO_HEADS}/kernel",
        (None, "model"),
        ("batch", "model"),
    ),
    Row(
        "into_heads.bias",
        rf"{_INTO_HEADS}/bias|{_BLOCK}/(qkv|mlp)_bias",
        ("model",),
    ),
    Row(
        "out_of_heads.kernel",
        rf"{_OUT_OF_HEADS}/kernel",
        ("model",),
        ("model", None, "batch"),
    ),
    Row("out_of_heads.bias", rf"{_OUT_OF_HEADS}/bias"),
    Row(
        "mlp_in.kernel",
        rf"{_MLP}/mlp_in/kernel",
        (None, "model"),
        ("batch", "model"),
    ),
    Row("mlp_in.bias", rf"{_MLP}/mlp_in/bias", ("model",)),
    Row(
        "mlp_out.kernel",
        rf"{_MLP}/mlp_out/kernel",
        ("model",),
        ("model", "batch"),
    ),
    Row("mlp_out.bias", rf"{_MLP}/mlp_out/bias"),
    Row("pooling.probe", "pooling/probe"),
    Row("head.kernel", "head/kernel", ("model",), ("batch",)),
    Row("head.bias", "head/bias"),
    # LoRA: kernel + a @ b, where b has the kernel's last dimension.
    Row("into_heads.lora_a", rf"{_INTO_HEADS}/lora_kernel_a", (None, "model")),
    Row("out_of_heads.lora_a", rf"{_OUT_OF_HEADS}/lora_kernel_a", ("model",)),
    Row("mlp_out.lora_a", rf"{_MLP}/mlp_out/lora_kernel_a", ("model",)),
    Row("mlp_in.lora_b", rf"{_MLP}/mlp_in/lora_kernel_b", (None, "model")),
    Row(
        "lora",
        rf"({_INTO_HEADS}|{_OUT_OF_HEADS}|{_MLP}/mlp_out|head)/lora_kernel_b"
        rf"|({_MLP}/mlp_in|head)/lora_kernel_a",
    ),
    # Their rank depends on the kind of quantization, and a path does not tell.
    Row(
        "quantization",
        r".*/(kernel_(scale|zero)|g_idx"
        r"|(inputs|kernel|outputs_grad)_amax_history"
        r"|(inputs|outputs_grad)_scale)",
    ),
    Row("seeds", r"(.*/)?seed_generator(_\d+)?/seed_generator_state"),
)


def num_parts(axes, sizes):
    """Return into how many parts `axes` split a tensor.

    Args:
        axes: tuple of axis names and `None`.
        sizes: dict from axis name to devices.
    """
    parts = 1
    for axis in axes:
        parts *= 1 if axis is None else sizes[axis]
    return parts


def axis_sizes(device_mesh):
    """Return a dict from axis name to devices."""
    return dict(zip(device_mesh.axis_names, map(int, device_mesh.shape)))


def layout_map(device_mesh, *, fsdp=False):
    """Return the table as a `keras.distribution.LayoutMap`.

    Args:
        device_mesh: a `keras.distribution.DeviceMesh` with the axes "batch"
            and "model".
        fsdp: bool. Whether "batch" splits kernels as well, and with them the
            optimizer's state. Defaults to `False`.

    Raises:
        ValueError: if the backend is not JAX, or the mesh has other axes.
    """
    check_backend()
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise ValueError(
            "device_mesh must be a keras.distribution.DeviceMesh. Received: "
            f"{device_mesh!r}."
        )
    if sorted(device_mesh.axis_names) != sorted(AXIS_NAMES):
        raise ValueError(
            "The axes of the mesh must be 'batch' and 'model'; either may "
            f"have one device. Received: {list(device_mesh.axis_names)}."
        )
    sizes = axis_sizes(device_mesh)
    layouts = keras.distribution.LayoutMap(device_mesh)
    for row in TABLE:
        layouts[row.pattern] = row.axes_on(sizes, fsdp=fsdp)
    return layouts


def check_backend():
    """Raise where Keras ignores layouts: on any backend but JAX."""
    backend = keras.config.backend()
    if backend == "jax":
        return
    instead = {
        "tensorflow": "for data parallelism build the model within "
        "tf.distribute.MirroredStrategy().scope(); for model parallelism",
        "torch": "for model parallelism",
    }.get(backend, "for model parallelism")
    raise ValueError(
        f"keras.distribution has no effect on {backend}: {instead} set "
        "KERAS_BACKEND=jax."
    )


def check_distribution(path, shape):
    """Raise if a weight to be made does not fit the distribution in force.

    Args:
        path: string. Of the variable.
        shape: tuple of int. Of the variable.

    Raises:
        ValueError: if a dimension does not divide, or the backend ignores
            `keras.distribution`.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    check_backend()
    layout = distribution.get_tensor_layout(path)
    if layout is not None:
        fault = indivisible(path, shape, layout.axes, distribution.device_mesh)
        if fault:
            raise ValueError(fault)


def check_int4():
    """Raise if int4 kernels would not fit the distribution in force.

    Keras folds them into two dimensions, so that the axes of FSDP, which name
    the third, do not apply.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    layout = distribution.get_tensor_layout("pooling/out/kernel")
    if layout is not None and len(layout.axes) > 2:
        raise ValueError(
            "int4 folds kernels into two dimensions, which fsdp=True cannot "
            "split. Use get_layout_map(mesh, fsdp=False), or int8."
        )


def indivisible(path, shape, axes, device_mesh):
    """Say which dimension does not divide and what would, or return `None`.

    Args:
        path: string. Of the variable.
        shape: tuple of int. Of the variable.
        axes: tuple of axis names and `None`, of the first dimensions.
        device_mesh: a `keras.distribution.DeviceMesh`.
    """
    sizes = axis_sizes(device_mesh)
    for dimension, axis in enumerate(axes):
        if axis is None or shape[dimension] % sizes[axis] == 0:
            continue
        fault = (
            f"{path} {tuple(shape)}: dimension {dimension} of "
            f"{shape[dimension]} does not divide over the {sizes[axis]} "
            f"devices of axis {axis!r}."
        )
        if sorted(sizes) != sorted(AXIS_NAMES):
            return fault
        total = sizes["batch"] * sizes["model"]
        count, meshes = _workable_meshes(shape, axes, total)
        return (
            f"{fault} With {count} devices these (batch, model) meshes work: "
            f"{', '.join(map(str, meshes))}."
        )
    return None


def _workable_meshes(shape, axes, total):
    """Return the most devices, up to `total`, that work, and their meshes."""
    for count in range(total, 0, -1):
        meshes = [
            (count // model, model)
            for model in range(1, count + 1)
            if count % model == 0
            and all(
                axis is None
                or size % (model if axis == "model" else count // model) == 0
                for size, axis in zip(shape, axes)
            )
        ]
        if meshes:
            return count, meshes
    raise AssertionError("A mesh of one device always works.")
