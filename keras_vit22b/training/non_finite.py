"""Which tensor of a training step is the first that is not finite."""

import keras
from keras import ops

from keras_vit22b.weights.state_check import check_state


class NonFiniteSearch:
    """Names the first tensor of a step that holds NaN or infinite values.

    Looks at weights, images, outputs of the backbone's layers, the loss, and
    gradients from the last layer to the first, in this order. Changes nothing.

    Args:
        model: a compiled `ViT22BImageClassifier`.

    Call arguments:
        images: array. The batch; of several processes, this one's share.
        labels: array.

    Returns:
        A string, or `None` if all are finite.
    """

    def __init__(self, model):
        self.model = model
        self._names = [layer.name for layer in model.backbone.layers]
        outputs = [
            keras.tree.flatten(layer.output)[0]
            for layer in model.backbone.layers  # The first are the images.
        ]
        self._layers = keras.Model(
            model.backbone.input, [outputs, model.backbone.output]
        )
        evaluate = {
            "jax": self._make_jax_function,
            "tensorflow": lambda: self._evaluate_tensorflow,
            "torch": lambda: self._evaluate_torch,
        }
        self._evaluate = evaluate[keras.config.backend()]()

    def __call__(self, images, labels):
        model = self.model
        _, bad = check_state({v.path: v for v in model.weights})
        if bad:
            return f"weight {bad[0]}"
        seeds = model.non_trainable_variables
        before = [ops.copy(v.value) for v in seeds]
        outputs, loss, gradients = self._evaluate(images, labels)
        for variable, value in zip(seeds, before):
            variable.assign(value)
        for name, finite in zip(self._names, outputs):
            if not finite:
                return f"the output of {name}"
        if not loss:
            return "the loss"
        for variable, finite in reversed(
            list(zip(model.trainable_variables, gradients))
        ):
            if not finite:
                return f"the gradient of {variable.path}"
        return None

    def _forward(self, images, labels):
        """Return the layers' outputs and the loss, as the step computes it."""
        model = self.model
        outputs, features = self._layers(images, training=True)
        pooled = model.output_dropout(features["pooled_output"], training=True)
        scores = model.head(pooled)
        loss = model.compute_loss(images, labels, scores, training=True)
        return outputs, loss

    def _make_jax_function(self):
        import jax

        model = self.model

        @jax.jit
        def evaluate(trainable, others, images, labels):
            def loss_of(trainable):
                mapping = [
                    *zip(model.trainable_variables, trainable),
                    *zip(model.non_trainable_variables, others),
                ]
                with keras.StatelessScope(state_mapping=mapping):
                    outputs, loss = self._forward(images, labels)
                return loss, (_are_finite(outputs), loss)

            gradients, (outputs, loss) = jax.grad(loss_of, has_aux=True)(
                trainable
            )
            return outputs, *_are_finite((loss, gradients))

        return lambda images, labels: evaluate(
            [v.value for v in model.trainable_variables],
            [v.value for v in model.non_trainable_variables],
            _on_devices(images),
            _on_devices(labels),
        )

    def _evaluate_tensorflow(self, images, labels):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            outputs, loss = self._forward(images, labels)
        trainable = [v.value for v in self.model.trainable_variables]
        return _are_finite((outputs, loss, tape.gradient(loss, trainable)))

    def _evaluate_torch(self, images, labels):
        import torch

        outputs, loss = self._forward(images, labels)
        trainable = [v.value for v in self.model.trainable_variables]
        gradients = torch.autograd.grad(loss, trainable)
        return _are_finite((outputs, loss, list(gradients)))


def _are_finite(tensors):
    return keras.tree.map_structure(
        lambda tensor: ops.all(ops.isfinite(tensor)), tensors
    )


def _on_devices(array):
    """Return an array as `fit` places it, where processes share a batch."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.num_processes == 1:
        return array
    import jax

    layout = distribution.get_data_layout(array.shape)
    return jax.make_array_from_process_local_data(layout.backend_layout, array)
