"""What the parallel and the sequential block share."""

import keras
from keras import ops

from keras_vit22b.layers.on_mesh import remat
from keras_vit22b.layers.on_mesh import shard_tokens
from keras_vit22b.layers.projections import check_divides
from keras_vit22b.layers.qk_norm_attention import QKNormAttention
from keras_vit22b.layers.qk_norm_attention import attention_spec

ACTIVATIONS = ("gelu_tanh", "gelu")


class TransformerBlock(keras.layers.Layer):
    """Base of `ParallelBlock` and `SequentialBlock`.

    Args:
        hidden_dim: int. Width `d` of a token.
        num_heads: int. Must divide `hidden_dim` and `mlp_dim`.
        mlp_dim: int. Hidden units of the MLP.
        norm: `"rms"` or `"layer"`. Defaults to `"rms"`.
        qk_norm: `"rms"`, `"layer"` or `None`. Defaults to `"rms"`.
        use_qkv_bias: bool. Defaults to `False`, as in the paper.
        activation: `"gelu_tanh"` or `"gelu"` (with erf). Defaults to
            `"gelu_tanh"`.
        epsilon: float. Of every norm. Defaults to `1e-6`.
        layer_scale: float. Start of a learned scale on each branch, or
            `None` for no scale. Defaults to `None`.
        dropout_rate: float. On the MLP's hidden units and on each branch's
            output. Defaults to `0.0`.
        drop_path_rate: float. Chance that a sample skips a branch. Defaults
            to `0.0`.
        remat: bool. Whether to recompute the block in the backward pass
            instead of keeping its activations. Defaults to `False`.
        **kwargs: `keras.layers.Layer` arguments, such as `name` and `dtype`.

    Call arguments:
        inputs: tensor `(batch, tokens, hidden_dim)`.
        return_attention: bool or `"statistics"`, see `QKNormAttention`.
            Defaults to `False`.

    Returns:
        A tensor `(batch, tokens, hidden_dim)`, or a pair of it and
        `AttentionMaps` or `AttentionStatistics`.

    Raises:
        ValueError: if the widths do not divide by the heads, or an option is
            unknown.

    A subclass has `_forward(inputs, seeds, return_attention)`, which returns
    the outputs and the maps or `None`, and `num_dropouts`, how often it calls
    `_drop`.
    """

    num_dropouts = 0

    def __init__(
        self,
        hidden_dim,
        num_heads,
        mlp_dim,
        *,
        norm="rms",
        qk_norm="rms",
        use_qkv_bias=False,
        activation="gelu_tanh",
        epsilon=1e-6,
        layer_scale=None,
        dropout_rate=0.0,
        drop_path_rate=0.0,
        remat=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_divides(hidden_dim, num_heads, mlp_dim)
        check_activation(activation)
        check_rate("dropout_rate", dropout_rate)
        check_rate("drop_path_rate", drop_path_rate)
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.head_dim = hidden_dim // num_heads
        self.norm_kind = norm
        self.qk_norm = qk_norm
        self.use_qkv_bias = use_qkv_bias
        self.activation = activation
        self.epsilon = epsilon
        self.layer_scale_init = layer_scale
        self.dropout_rate = dropout_rate
        self.drop_path_rate = drop_path_rate
        self.attention = QKNormAttention(
            qk_norm, epsilon=epsilon, dtype=self.dtype_policy, name="attention"
        )
        self.remat = remat
        self.seed_generator = None
        if dropout_rate or drop_path_rate:
            self.seed_generator = keras.random.SeedGenerator()

    def call(self, inputs, training=None, return_attention=False):
        seeds = []
        if training and self.seed_generator is not None:
            # Drawn here, so that recomputing drops the same units.
            seeds = [
                self.seed_generator.next() for _ in range(self.num_dropouts)
            ]
        if return_attention:
            return self._forward(inputs, seeds, return_attention)

        def forward(x):
            return self._forward(x, list(seeds), return_attention=False)[0]

        return remat(forward)(inputs) if self.remat else forward(inputs)

    def _build_attention(self, input_shape):
        heads = (*input_shape[:2], self.num_heads, self.head_dim)
        self.attention.build(heads, heads, heads)

    def _add_layer_scale(self, name):
        if self.layer_scale_init is None:
            return None
        return self.add_weight(
            name=name,
            shape=(self.hidden_dim,),
            initializer=keras.initializers.Constant(self.layer_scale_init),
        )

    def _attend(self, query, key, value, return_attention):
        """Return the attention output and, if asked for, its maps."""
        attended = self.attention(
            query, key, value, return_attention=return_attention
        )
        return attended if return_attention else (attended, None)

    def _drop(self, x, rate, seeds, noise_shape=None):
        """Drop with the next of `seeds`, or not at all if there are none."""
        if not seeds:
            return x
        seed = seeds.pop(0)
        if not rate:
            return x
        # keras.random.dropout on torch would look into the seed.
        drawn = keras.random.uniform(
            noise_shape or ops.shape(x), seed=_DrawnSeed(seed)
        )
        return ops.where(drawn >= rate, x / (1 - rate), ops.zeros_like(x))

    def _add_branch(self, inputs, branch, scale, seeds):
        """Return `inputs + drop_path(scale * dropout(branch))`."""
        branch = self._drop(branch, self.dropout_rate, seeds)
        if scale is not None:
            branch = branch * ops.cast(scale, branch.dtype)
        per_sample = (ops.shape(branch)[0], 1, 1)
        outputs = inputs + self._drop(
            branch, self.drop_path_rate, seeds, per_sample
        )
        return shard_tokens(outputs)

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(
        self, inputs, training=None, return_attention=False
    ):
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention:
            return outputs
        batch, tokens = inputs.shape[:2]
        return outputs, attention_spec(
            return_attention, batch, self.num_heads, tokens, tokens
        )

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "hidden_dim": self.hidden_dim,
                "num_heads": self.num_heads,
                "mlp_dim": self.mlp_dim,
                "norm": self.norm_kind,
                "qk_norm": self.qk_norm,
                "use_qkv_bias": self.use_qkv_bias,
                "activation": self.activation,
                "epsilon": self.epsilon,
                "layer_scale": self.layer_scale_init,
                "dropout_rate": self.dropout_rate,
                "drop_path_rate": self.drop_path_rate,
                "remat": self.remat,
            }
        )
        return config


class _DrawnSeed(keras.random.SeedGenerator):
    """A seed that was drawn already, in the form `keras.random` takes."""

    def __init__(self, value):
        self.value = value

    def next(self, ordered=True):
        return self.value


def check_rate(name, rate):
    """Raise unless `rate` is a chance below one."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be in [0, 1). Received: {rate!r}.")


def activate(x, activation):
    """Apply GELU, by its tanh approximation or exactly."""
    return ops.gelu(x, approximate=activation == "gelu_tanh")


def check_activation(activation):
    """Raise if `activation` is unknown."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be {' or '.join(map(repr, ACTIVATIONS))}. "
            f"Received: {activation!r}."
        )
