"""Which tensor of a training step is the first that is not finite."""

import keras
from keras import ops

from keras_vit22b.training.state_check import check_state


def first_non_finite(model, images, labels):
    """Name the first tensor of a step that holds NaN or infinite values.

    Looks at weights, images, outputs of the backbone's layers, the loss, and
    gradients from the last layer to the first, in this order.

    Args:
        model: a compiled `ViT22BImageClassifier`.
        images: array. The batch; of several processes, this one's share.
        labels: array.

    Returns:
        A string, or `None` if all are finite.
    """
    _, bad = check_state({v.path: v for v in model.weights})
    if bad:
        return f"weight {bad[0]}"
    backbone = model.backbone
    outputs = {
        layer.name: keras.tree.flatten(layer.output)[0]
        for layer in backbone.layers  # The first are the images.
    }
    layers = keras.Model(backbone.input, outputs)
    evaluate = {
        "jax": _evaluate_jax,
        "tensorflow": _evaluate_tensorflow,
        "torch": _evaluate_torch,
    }[keras.config.backend()]
    outputs, loss, gradients = evaluate(model, layers, images, labels)
    for layer in backbone.layers:
        if not outputs[layer.name]:
            return f"the output of {layer.name}"
    if not loss:
        return "the loss"
    for variable, finite in reversed(
        list(zip(model.trainable_variables, gradients))
    ):
        if not finite:
            return f"the gradient of {variable.path}"
    return None


def _forward(model, layers, images, labels):
    """Return the layers' outputs and the loss, as the training step does."""
    outputs = layers(images, training=True)
    scores = model(images, training=True)
    loss = model.compute_loss(images, labels, scores, training=True)
    return outputs, loss


def _are_finite(tensors):
    return keras.tree.map_structure(
        lambda tensor: ops.all(ops.isfinite(tensor)), tensors
    )


def _evaluate_jax(model, layers, images, labels):
    import jax

    @jax.jit
    def evaluate(trainable, others, images, labels):
        def loss_of(trainable):
            mapping = [
                *zip(model.trainable_variables, trainable),
                *zip(model.non_trainable_variables, others),
            ]
            with keras.StatelessScope(state_mapping=mapping):
                outputs, loss = _forward(model, layers, images, labels)
            return loss, (_are_finite(outputs), loss)

        gradients, (outputs, loss) = jax.grad(loss_of, has_aux=True)(trainable)
        return outputs, *_are_finite((loss, gradients))

    return evaluate(
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        _on_devices(images),
        _on_devices(labels),
    )


def _on_devices(array):
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.num_processes == 1:
        return array
    import jax

    layout = distribution.get_data_layout(array.shape)
    return jax.make_array_from_process_local_data(layout.backend_layout, array)


def _evaluate_tensorflow(model, layers, images, labels):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        outputs, loss = _forward(model, layers, images, labels)
    trainable = [v.value for v in model.trainable_variables]
    gradients = tape.gradient(loss, trainable)
    return _are_finite((outputs, loss, gradients))


def _evaluate_torch(model, layers, images, labels):
    import torch

    outputs, loss = _forward(model, layers, images, labels)
    trainable = [v.value for v in model.trainable_variables]
    gradients = torch.autograd.grad(loss, trainable)
    return _are_finite((outputs, loss, list(gradients)))
