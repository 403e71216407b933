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


def remat(function):
    """Return `function` of one tensor, recomputed in the backward pass."""
    mesh = active_mesh()
    return (keras if mesh is None else mesh).remat(function)


def kernel_axes(layer):
    """Return the mesh axis or `None` of each dimension of a layer's kernel."""
    # By name, since `layer.kernel` is no variable where LoRA is enabled.
    kernel = next(w for w in layer.weights if w.name == "kernel")
    return keras.distribution.distribution().get_variable_layout(kernel).axes
