"""Pooling without weights: the class token, or the mean of the patches."""

import keras
from keras import ops

TOKEN_POOLINGS = ("cls", "mean")


@keras.saving.register_keras_serializable(package="keras_vit22b")
class TokenPooling(keras.layers.Layer):
    """Take the first token, or the mean of the patch tokens.

    Args:
        mode: `"cls"` or `"mean"`.
        num_prefix_tokens: int. Class token and registers, which the mean
            leaves out. Defaults to `0`.
        **kwargs: `keras.layers.Layer` arguments, such as `name` and `dtype`.

    Call arguments:
        tokens: tensor `(batch, tokens, hidden_dim)`.

    Returns:
        A tensor `(batch, hidden_dim)`.

    Raises:
        ValueError: if `mode` is unknown.
    """

    def __init__(self, mode, *, num_prefix_tokens=0, **kwargs):
        super().__init__(**kwargs)
        if mode not in TOKEN_POOLINGS:
            raise ValueError(
                f"mode must be {' or '.join(map(repr, TOKEN_POOLINGS))}. "
                f"Received: {mode!r}."
            )
        self.mode = mode
        self.num_prefix_tokens = num_prefix_tokens
        self.built = True

    def call(self, tokens):
        if self.mode == "cls":
            return tokens[:, 0]
        return ops.mean(tokens[:, self.num_prefix_tokens :], axis=1)

    def compute_output_shape(self, tokens_shape):
        return (tokens_shape[0], tokens_shape[-1])

    def get_config(self):
        config = super().get_config()
        config.update(
            {"mode": self.mode, "num_prefix_tokens": self.num_prefix_tokens}
        )
        return config
