"""The shapes of tensors on disk, from a config alone.

So a preset is checked, and its size bounded, before a model is built.
docs/architecture.md lists the same names and shapes.
"""

import numpy as np

from keras_vit22b.layers.patch_embedding import as_pair
from keras_vit22b.layers.patch_embedding import patch_grid
from keras_vit22b.layers.projections import check_divides
from keras_vit22b.weights.tensor_names import POSITION_EMBEDDING


def tensor_shapes(
    image_shape,
    patch_size,
    *,
    num_layers,
    num_heads,
    hidden_dim,
    mlp_dim,
    pooling="map",
    norm="rms",
    qk_norm="rms",
    block="parallel",
    use_qkv_bias=False,
    num_registers=0,
    layer_scale=None,
    pre_norm=False,
    num_classes=None,
    **_,
):
    """Return `{tensor name: shape}` of a model with these arguments.

    Args:
        num_classes: int. Of a classifier's head. Defaults to `None`: a
            backbone.
        **_: those of `ViT22BBackbone`; some change no shape.

    Raises:
        ValueError: if the image does not divide into patches, or the widths
            do not divide by the heads.
    """
    check_divides(hidden_dim, num_heads, mlp_dim)
    rows, columns = patch_grid(image_shape, patch_size)
    height, width = as_pair(patch_size)
    d, f, heads = hidden_dim, mlp_dim, num_heads
    head_dim = d // heads
    vector = (d,)
    shapes = {
        "patch_embedding.kernel": (height * width * image_shape[2], d),
        "patch_embedding.bias": vector,
        POSITION_EMBEDDING: (rows * columns, d),
    }
    if pooling == "cls":
        shapes |= {"class_token": (1, d), "class_position": (1, d)}
    if num_registers:
        shapes["registers"] = (num_registers, d)
    if pre_norm:
        shapes |= _norm("pre_norm", norm, d)

    of_block = _norm("norm", norm, d)
    if qk_norm:
        of_block |= _norm("query_norm", qk_norm, head_dim)
        of_block |= _norm("key_norm", qk_norm, head_dim)
    if block == "parallel":
        of_block |= {
            "in_projection.kernel": (d, heads, 3 * head_dim + f // heads),
            "in_projection.mlp_bias": (heads, f // heads),
            "out_projection.kernel": (heads, head_dim + f // heads, d),
            "out_projection.bias": vector,
        }
        qkv_bias, scales = "in_projection.qkv_bias", ["layer_scale"]
    else:
        of_block |= {
            "qkv_projection.kernel": (d, heads, 3 * head_dim),
            "attention_out.kernel": (heads, head_dim, d),
            "attention_out.bias": vector,
            **_norm("mlp_norm", norm, d),
            **_mlp(d, f),
        }
        qkv_bias = "qkv_projection.bias"
        scales = ["attention_scale", "mlp_scale"]
    if use_qkv_bias:
        of_block[qkv_bias] = (heads, 3 * head_dim)
    if layer_scale is not None:
        of_block |= dict.fromkeys(scales, vector)
    for index in range(num_layers):
        shapes |= {f"blocks.{index}.{n}": s for n, s in of_block.items()}

    shapes |= _norm("final_norm", norm, d)
    if pooling == "map":
        of_pooling = {"probe": (1, d)}
        for name in ("query", "key", "value"):
            of_pooling[f"{name}.kernel"] = (d, heads, head_dim)
            of_pooling[f"{name}.bias"] = (heads, head_dim)
        of_pooling |= {
            "out.kernel": (heads, head_dim, d),
            "out.bias": vector,
            **_norm("norm", norm, d),
            **_mlp(d, f),
        }
        shapes |= {f"pooling.{n}": s for n, s in of_pooling.items()}
    if num_classes is not None:
        shapes |= {"head.kernel": (d, num_classes), "head.bias": (num_classes,)}
    return shapes


def scale_shapes(shapes, stored):
    """Return `{tensor name: shape}` of the scales of int8 kernels.

    Args:
        shapes: dict from tensor name to shape, as `tensor_shapes` makes it.
        stored: dict from tensor name to `TensorSpec`. A kernel is int8 if it
            is stored so.
    """
    return {
        f"{name}_scale": _scale_shape(name, shape)
        for name, shape in shapes.items()
        if name in stored and stored[name].dtype == np.int8
    }


def _scale_shape(name, shape):
    """One number for each output of the layer, as Keras lays them out."""
    if len(shape) == 2:
        return shape[1:]
    layer = name.split(".")[-2]
    outputs = (
        shape[2:] if layer.startswith("out") or "_out" in layer else shape[1:]
    )
    return (1, 1, *outputs)


def _norm(name, kind, size):
    shapes = {f"{name}.scale": (size,)}
    if kind == "layer":
        shapes[f"{name}.bias"] = (size,)
    return shapes


def _mlp(d, f):
    return {
        "mlp_in.kernel": (d, f),
        "mlp_in.bias": (f,),
        "mlp_out.kernel": (f, d),
        "mlp_out.bias": (d,),
    }
