"""What layers ask of a mesh that runs their matmuls.

Layers know such a mesh by its methods alone, those of
`keras_vit22b.distribution.OverlapMesh`.
"""

import keras


def active_mesh():
    """Return the mesh of the current distribution if it runs matmuls."""
    distribution = keras.distribution.distribution()
    mesh = getattr(distribution, "device_mesh", None)
    return mesh if hasattr(mesh, "all_gather_matmul") else None


def shard_tokens(tokens):
    """Shard tokens `(batch, tokens, d)` by batch over the whole mesh."""
    mesh = active_mesh()
    return tokens if mesh is None else mesh.shard_tokens(tokens)


def call_and_gather(layer, x, *later):
    """Return `layer(x)`, and beside it gather the kernels of later layers.

    Args:
        layer: `InProjection` or the like.
        x: tensor `(batch, tokens, d)`.
        *later: layers of either direction.

    Returns:
        The outputs, and a dict of call arguments for each of `later`.
    """
    layers = (layer, *later)
    if active_mesh() is None or any(one.quantization_mode for one in layers):
        return layer(x), [{} for _ in later]
    kernels, axes = zip(*map(kernel_and_axes, later))
    outputs, gathered = layer(x, later=kernels, later_axes=axes)
    return outputs, list(map(as_argument, gathered))


def as_argument(gathered):
    """Return a gathered kernel as a layer's call arguments."""
    return {} if gathered is None else {"gathered": gathered}


def remat(function):
    """Return `function` of one tensor, recomputed in the backward pass."""
    mesh = active_mesh()
    return (keras if mesh is None else mesh).remat(function)


def kernel_and_axes(layer):
    """Return a layer's kernel, and its mesh axis or `None` by dimension."""
    # By name, since `layer.kernel` is no variable where LoRA is enabled.
    kernel = next(w for w in layer.weights if w.name == "kernel")
    layout = keras.distribution.distribution().get_variable_layout(kernel)
    return keras.ops.convert_to_tensor(layer.kernel), layout.axes
