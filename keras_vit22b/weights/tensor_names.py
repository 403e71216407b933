"""The names of tensors on disk, and the variables they belong to.

The names are the format: they never depend on Keras' variable paths.
docs/architecture.md lists them with their shapes.
"""

POSITION_EMBEDDING = "position_embedding"
# What a dense layer's weights are called here, and by Keras.
_DENSE = {
    "kernel": "kernel",
    "kernel_scale": "kernel_scale",
    "bias": "bias",
    "lora_a": "lora_kernel_a",
    "lora_b": "lora_kernel_b",
}


def is_head(name):
    """Return whether a tensor belongs to a classifier's head."""
    return name.startswith("head.")


def is_lora(name):
    """Return whether a tensor belongs to a low-rank adaptation."""
    return name.endswith((".lora_a", ".lora_b"))


def backbone_tensors(backbone):
    """Map tensor names to the variables of a built `ViT22BBackbone`.

    Args:
        backbone: a `ViT22BBackbone`.

    Returns:
        A dict from name to variable, in the order of the forward pass.

    Raises:
        ValueError: if a weight has no name, which would lose it.
    """
    tensors = {}
    embedding = backbone.patch_embedding
    tensors["patch_embedding.kernel"] = embedding.kernel
    tensors["patch_embedding.bias"] = embedding.bias
    tensors[POSITION_EMBEDDING] = embedding.position_embedding
    if embedding.class_token:
        tensors["class_token"] = embedding.class_embedding
        tensors["class_position"] = embedding.class_position
    if embedding.num_registers:
        tensors["registers"] = embedding.registers
    if backbone.pre_norm_layer is not None:
        tensors.update(_norm("pre_norm", backbone.pre_norm_layer))
    block_tensors = {
        "parallel": _parallel_block,
        "sequential": _sequential_block,
    }[backbone.block]
    for index, block in enumerate(backbone.blocks):
        for name, variable in block_tensors(block).items():
            tensors[f"blocks.{index}.{name}"] = variable
    tensors.update(_norm("final_norm", backbone.final_norm_layer))
    if backbone.pooling == "map":
        for name, variable in _attention_pooling(backbone.pooler).items():
            tensors[f"pooling.{name}"] = variable
    _check_complete(backbone, tensors)
    return tensors


def classifier_tensors(classifier):
    """Map tensor names to the variables of a `ViT22BImageClassifier`."""
    tensors = backbone_tensors(classifier.backbone)
    tensors.update(_dense("head", classifier.head))
    _check_complete(classifier, tensors)
    return tensors


def _check_complete(model, tensors):
    named = {id(v) for v in tensors.values()}
    lost = [w.path for w in model.weights if id(w) not in named]
    if lost:
        raise ValueError(
            f"{len(lost)} weights have no tensor name, so they would be lost: "
            f"{', '.join(lost[:5])}. Of Keras' quantizations, int8 has names."
        )


def _norm(name, layer):
    """RMS norms have a scale; layer norms, a bias as well."""
    if hasattr(layer, "gamma"):
        return {f"{name}.scale": layer.gamma, f"{name}.bias": layer.beta}
    return {f"{name}.scale": layer.scale}


def _dense(name, layer):
    """Name what a dense layer has, with int8 scales and LoRA if it has any."""
    variables = {v.name: v for v in layer.weights}
    return {
        f"{name}.{own}": variables[keras_name]
        for own, keras_name in _DENSE.items()
        if keras_name in variables
    }


def _query_and_key_norms(attention):
    if attention.qk_norm is None:
        return {}
    return {
        **_norm("query_norm", attention.query_norm),
        **_norm("key_norm", attention.key_norm),
    }


def _optional(name, variable):
    return {} if variable is None else {name: variable}


def _parallel_block(block):
    return {
        **_norm("norm", block.norm),
        **_query_and_key_norms(block.attention),
        **_dense("in_projection", block.in_projection),
        **_optional("in_projection.qkv_bias", block.qkv_bias),
        "in_projection.mlp_bias": block.mlp_bias,
        **_dense("out_projection", block.out_projection),
        **_optional("layer_scale", block.layer_scale),
    }


def _sequential_block(block):
    return {
        **_norm("norm", block.norm),
        **_query_and_key_norms(block.attention),
        **_dense("qkv_projection", block.qkv_projection),
        **_dense("attention_out", block.attention_out),
        **_optional("attention_scale", block.attention_scale),
        **_norm("mlp_norm", block.mlp_norm),
        **_dense("mlp_in", block.mlp_in),
        **_dense("mlp_out", block.mlp_out),
        **_optional("mlp_scale", block.mlp_scale),
    }


def _attention_pooling(pooler):
    return {
        "probe": pooler.probe,
        **_dense("query", pooler.query),
        **_dense("key", pooler.key),
        **_dense("value", pooler.value),
        **_dense("out", pooler.out),
        **_norm("norm", pooler.norm),
        **_dense("mlp_in", pooler.mlp_in),
        **_dense("mlp_out", pooler.mlp_out),
    }
