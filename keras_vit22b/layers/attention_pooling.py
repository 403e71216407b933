"""Multi-head attention pooling (MAP): the frozen feature of an image.

Reference: Zhai et al., 2022, https://arxiv.org/abs/2106.04560
"""

import keras
from keras import ops

from keras_vit22b.layers.normalization import make_norm
from keras_vit22b.layers.on_mesh import active_mesh
from keras_vit22b.layers.on_mesh import as_argument
from keras_vit22b.layers.on_mesh import kernel_and_axes
from keras_vit22b.layers.projections import OutProjection
from keras_vit22b.layers.projections import check_divides
from keras_vit22b.layers.qk_norm_attention import QKNormAttention
from keras_vit22b.layers.sequential_block import make_mlp
from keras_vit22b.layers.transformer_block import activate
from keras_vit22b.layers.transformer_block import check_activation


@keras.saving.register_keras_serializable(package="keras_vit22b")
class AttentionPooling(keras.layers.Layer):
    """Pool tokens by a learned query, then add an MLP of the result.

    `x = attention(probe, tokens)`, then `x + mlp(norm(x))`. All projections
    have biases and there is no query or key norm.

    Args:
        hidden_dim: int. Width `d` of a token.
        num_heads: int. Must divide `hidden_dim`.
        mlp_dim: int. Hidden units of the MLP.
        norm: `"rms"` or `"layer"`. Defaults to `"rms"`.
        activation: `"gelu_tanh"` or `"gelu"`. Defaults to `"gelu_tanh"`.
        epsilon: float. Defaults to `1e-6`.
        **kwargs: `keras.layers.Layer` arguments, such as `name` and `dtype`.

    Call arguments:
        tokens: tensor `(batch, tokens, hidden_dim)`.

    Returns:
        A tensor `(batch, hidden_dim)`.

    Raises:
        ValueError: if the widths do not divide by the heads, or an option is
            unknown.

    Example:
    ```python
    layer = keras_vit22b.layers.AttentionPooling(64, num_heads=4, mlp_dim=256)
    layer(np.zeros((2, 16, 64))).shape  # (2, 64)
    ```

    Reference: [Zhai et al., 2022](https://arxiv.org/abs/2106.04560)
    """

    def __init__(
        self,
        hidden_dim,
        num_heads,
        mlp_dim,
        *,
        norm="rms",
        activation="gelu_tanh",
        epsilon=1e-6,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_divides(hidden_dim, num_heads, 0)
        check_activation(activation)
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.norm_kind = norm
        self.activation = activation
        self.epsilon = epsilon
        dtype = self.dtype_policy
        head_dim = hidden_dim // num_heads

        def project(name):
            return keras.layers.EinsumDense(
                "btd,dhf->bthf",
                output_shape=(None, num_heads, head_dim),
                bias_axes="hf",
                dtype=dtype,
                name=name,
            )

        self.query = project("query")
        self.key = project("key")
        self.value = project("value")
        self.attention = QKNormAttention(None, dtype=dtype, name="attention")
        self.out = OutProjection(
            hidden_dim, num_heads, use_bias=True, dtype=dtype, name="out"
        )
        self.norm = make_norm(norm, epsilon=epsilon, dtype=dtype, name="norm")
        self.mlp_in, self.mlp_out = make_mlp(hidden_dim, mlp_dim, dtype)

    def build(self, tokens_shape):
        pooled = (tokens_shape[0], 1, self.hidden_dim)
        heads = (self.num_heads, self.hidden_dim // self.num_heads)
        self.probe = self.add_weight(
            name="probe",
            shape=(1, self.hidden_dim),
            initializer="glorot_uniform",
        )
        self.query.build(pooled)
        self.key.build(tokens_shape)
        self.value.build(tokens_shape)
        self.attention.build(
            (*pooled[:2], *heads),
            (*tokens_shape[:2], *heads),
            (*tokens_shape[:2], *heads),
        )
        self.out.build((*pooled[:2], *heads))
        self.norm.build(pooled)
        self.mlp_in.build(pooled)
        self.mlp_out.build((*pooled[:2], self.mlp_dim))
        self.built = True

    def call(self, tokens):
        probe = ops.expand_dims(ops.convert_to_tensor(self.probe), 0)
        query = ops.tile(self.query(probe), (ops.shape(tokens)[0], 1, 1, 1))
        key, value, later = self._key_and_value(tokens)
        out, mlp_in, mlp_out = map(as_argument, later)
        pooled = self.out(self.attention(query, key, value), **out)
        hidden = self.mlp_in(self.norm(pooled), **mlp_in)
        hidden = activate(hidden, self.activation)
        return (pooled + self.mlp_out(hidden, **mlp_out))[:, 0]

    def _key_and_value(self, tokens):
        """Return both, and the kernels of what follows if gathered."""
        mesh = active_mesh()
        both = (self.key, self.value)
        later = (self.out, self.mlp_in, self.mlp_out)
        if mesh is None or any(
            layer.quantization_mode for layer in both + later
        ):
            return self.key(tokens), self.value(tokens), [None] * 3
        # Tokens are exchanged once for both.
        kernels, axes = zip(*map(kernel_and_axes, both))
        later_kernels, later_axes = zip(*map(kernel_and_axes, later))
        projected, gathered = mesh.all_gather_matmul(
            tokens,
            ops.concatenate(kernels, axis=-1),
            axes[0],
            later=later_kernels,
            later_axes=later_axes,
        )
        parts = ops.split(projected, 2, axis=-1)
        key, value = (
            part + ops.cast(layer.bias, part.dtype)
            for part, layer in zip(parts, both)
        )
        return key, value, gathered

    def compute_output_shape(self, tokens_shape):
        return (tokens_shape[0], self.hidden_dim)

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "hidden_dim": self.hidden_dim,
                "num_heads": self.num_heads,
                "mlp_dim": self.mlp_dim,
                "norm": self.norm_kind,
                "activation": self.activation,
                "epsilon": self.epsilon,
            }
        )
        return config
