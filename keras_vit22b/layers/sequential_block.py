"""The standard pre-norm block, the control of the parallel one.

Reference: Dosovitskiy et al., 2021, https://arxiv.org/abs/2010.11929
"""

import keras
from keras import ops

from keras_vit22b.layers.normalization import make_norm
from keras_vit22b.layers.on_mesh import call_and_gather
from keras_vit22b.layers.projections import ColumnParallelDense
from keras_vit22b.layers.projections import InProjection
from keras_vit22b.layers.projections import OutProjection
from keras_vit22b.layers.projections import RowParallelDense
from keras_vit22b.layers.transformer_block import TransformerBlock
from keras_vit22b.layers.transformer_block import activate


@keras.saving.register_keras_serializable(package="keras_vit22b")
class SequentialBlock(TransformerBlock):
    """`y = x + attention(norm(x))`, then `y + mlp(mlp_norm(y))`.

    The MLP reads what attention wrote, so four matmuls must wait for each
    other where `ParallelBlock` has two.

    See `TransformerBlock` for arguments, call arguments and returns.

    Example:
    ```python
    block = keras_vit22b.layers.SequentialBlock(64, num_heads=4, mlp_dim=256)
    block(np.zeros((2, 16, 64))).shape  # (2, 16, 64)
    ```

    Reference: [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929)
    """

    num_dropouts = 5

    def __init__(self, hidden_dim, num_heads, mlp_dim, **kwargs):
        super().__init__(hidden_dim, num_heads, mlp_dim, **kwargs)
        dtype = self.dtype_policy
        norm = {"epsilon": self.epsilon, "dtype": dtype}
        self.norm = make_norm(self.norm_kind, name="norm", **norm)
        self.qkv_projection = InProjection(
            hidden_dim,
            num_heads,
            use_bias=self.use_qkv_bias,
            dtype=dtype,
            name="qkv_projection",
        )
        self.attention_out = OutProjection(
            hidden_dim,
            num_heads,
            use_bias=True,
            dtype=dtype,
            name="attention_out",
        )
        self.mlp_norm = make_norm(self.norm_kind, name="mlp_norm", **norm)
        self.mlp_in, self.mlp_out = make_mlp(hidden_dim, mlp_dim, dtype)

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.qkv_projection.build(input_shape)
        self._build_attention(input_shape)
        self.attention_out.build(
            (*input_shape[:2], self.num_heads, self.head_dim)
        )
        self.mlp_norm.build(input_shape)
        self.mlp_in.build(input_shape)
        self.mlp_out.build((*input_shape[:2], self.mlp_dim))
        self.attention_scale = self._add_layer_scale("attention_scale")
        self.mlp_scale = self._add_layer_scale("mlp_scale")
        self.built = True

    def _forward(self, inputs, seeds, return_attention):
        qkv, [attention_out, mlp_in, mlp_out] = call_and_gather(
            self.qkv_projection,
            self.norm(inputs),
            self.attention_out,
            self.mlp_in,
            self.mlp_out,
        )
        attended, maps = self._attend(
            *ops.split(qkv, 3, axis=-1), return_attention
        )
        branch = self.attention_out(attended, **attention_out)
        outputs = self._add_branch(inputs, branch, self.attention_scale, seeds)
        hidden = self.mlp_in(self.mlp_norm(outputs), **mlp_in)
        hidden = activate(hidden, self.activation)
        hidden = self._drop(hidden, self.dropout_rate, seeds)
        outputs = self._add_branch(
            outputs, self.mlp_out(hidden, **mlp_out), self.mlp_scale, seeds
        )
        return outputs, maps


def make_mlp(hidden_dim, mlp_dim, dtype):
    """Return the two dense layers of an MLP, without its activation."""
    bias = {"stddev": 1e-6}
    mlp_in = ColumnParallelDense(
        mlp_dim,
        bias_initializer=keras.initializers.RandomNormal(**bias),
        dtype=dtype,
        name="mlp_in",
    )
    mlp_out = RowParallelDense(
        hidden_dim,
        bias_initializer=keras.initializers.RandomNormal(**bias),
        dtype=dtype,
        name="mlp_out",
    )
    return mlp_in, mlp_out
