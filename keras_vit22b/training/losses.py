"""Sigmoid cross-entropy over many classes, with any number of labels an image.

Source: Beyer et al., 2020, https://arxiv.org/abs/2006.07159
"""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_vit22b")
class SigmoidCrossEntropy(keras.losses.Loss):
    """Binary cross-entropy of each class, summed over classes.

    Unlike softmax, each class is a question of its own, so an image may have
    several labels or none. Start the head's bias low (`Recipe.head_bias`), as
    almost all answers are no.

    Args:
        sparse: bool. Whether labels are indices `(batch,)` or `(batch, k)`,
            where -1 stands for no label, or numbers from 0 to 1
            `(batch, classes)`. Defaults to `True`.
        **kwargs: of `keras.losses.Loss`, such as `reduction`.

    Call arguments:
        y_true: tensor of labels.
        y_pred: tensor of logits `(batch, classes)`.

    Returns:
        The mean over images of the sum over classes, in nats.

    Raises:
        ValueError: if labels that are not sparse have another shape than
            logits.

    Example:
    ```python
    loss = keras_vit22b.training.SigmoidCrossEntropy()
    loss([[2, 0], [1, -1]], np.zeros((2, 3)))  # 3 log 2.
    ```
    """

    def __init__(self, *, sparse=True, name="sigmoid_cross_entropy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.sparse = sparse

    def call(self, y_true, y_pred):
        classes = y_pred.shape[-1]
        if self.sparse:
            if len(y_true.shape) == 1:
                y_true = y_true[:, None]
            labels = ops.cast(y_true, "int32")
            # A label outside 0 to classes - 1 is none; one given twice is one.
            targets = ops.max(ops.one_hot(labels, classes), axis=-2)
            targets = ops.cast(targets, y_pred.dtype)
        elif tuple(y_true.shape) != tuple(y_pred.shape):
            raise ValueError(
                f"Labels with sparse=False must be of the logits' shape "
                f"{tuple(y_pred.shape)}. Received: {tuple(y_true.shape)}. "
                "Indices of classes need sparse=True."
            )
        else:
            targets = y_true
        losses = ops.binary_crossentropy(targets, y_pred, from_logits=True)
        return ops.sum(losses, axis=-1)

    def get_config(self):
        return {**super().get_config(), "sparse": self.sparse}
