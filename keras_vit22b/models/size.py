"""What a backbone costs: parameters, bytes, FLOPs."""

import math

from keras_vit22b.layers.patch_embedding import as_pair


def describe_size(backbone):
    """Count a backbone's parameters, bytes and FLOPs.

    Works on abstract backbones, which have no weights allocated.

    Args:
        backbone: a `ViT22BBackbone`.

    Returns:
        A dict of

        - `"tokens"`: with class token and registers;
        - `"parameters"`: in all and by part; `"block_kernels"` is how the
          literature states the size of ViT-22B;
        - `"bytes"`: of the weights, by dtype;
        - `"flops_per_image"`: of a forward pass, a multiply-add being two,
          in all and by part; norms, softmax and activations left out.
    """
    parts = {"patch_embedding": 0, "blocks": 0, "norms": 0, "pooling": 0}
    block_kernels = 0
    for name, variable in backbone.tensors().items():
        size = math.prod(variable.shape)
        part = name.split(".")[0]
        if part in ("pre_norm", "final_norm"):
            part = "norms"
        parts[part if part in parts else "patch_embedding"] += size
        if part == "blocks" and name.endswith(".kernel"):
            block_kernels += size
    total = sum(parts.values())
    return {
        "tokens": _num_tokens(backbone),
        "parameters": {
            "total": total,
            "block_kernels": block_kernels,
            **parts,
        },
        "bytes": {
            "float32": 4 * total,
            "bfloat16": 2 * total,
            "int8": total,
        },
        "flops_per_image": _flops(backbone),
    }


def _num_tokens(backbone):
    rows, columns = backbone.patch_embedding.grid_size
    return rows * columns + backbone.num_prefix_tokens


def _flops(backbone):
    tokens, width = _num_tokens(backbone), backbone.hidden_dim
    patches = tokens - backbone.num_prefix_tokens
    height, wide = as_pair(backbone.patch_size)
    numbers = height * wide * backbone.image_shape[-1]
    mlp = 2 * width * backbone.mlp_dim
    matmuls = tokens * (4 * width**2 + mlp)
    attention = 2 * tokens**2 * width
    pooling = 0
    if backbone.pooling == "map":
        # Keys and values of all tokens; query, output and MLP of one.
        pooling = (
            2 * patches * width**2 + 2 * patches * width + 2 * width**2 + mlp
        )
    parts = {
        "patch_embedding": 2 * patches * numbers * width,
        "block_matmuls": 2 * backbone.num_layers * matmuls,
        "attention": 2 * backbone.num_layers * attention,
        "pooling": 2 * pooling,
    }
    return {"total": sum(parts.values()), **parts}
