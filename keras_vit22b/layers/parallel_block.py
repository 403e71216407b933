"""The block of ViT-22B: attention and MLP side by side.

Reference: ViT-22B, section 2, https://arxiv.org/abs/2302.05442
"""

import keras
from keras import ops

from keras_vit22b.layers.normalization import make_norm
from keras_vit22b.layers.on_mesh import call_and_gather
from keras_vit22b.layers.projections import InProjection
from keras_vit22b.layers.projections import OutProjection
from keras_vit22b.layers.transformer_block import TransformerBlock
from keras_vit22b.layers.transformer_block import activate


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ParallelBlock(TransformerBlock):
    """`x + attention(norm(x)) + mlp(norm(x))` in two matmuls.

    Both branches read the same normalized input, so their input projections
    are one matmul and their output projections, summed, are another. The MLP
    has an input bias; one output bias serves both branches.

    See `TransformerBlock` for arguments, call arguments and returns.

    Example:
    ```python
    block = keras_vit22b.layers.ParallelBlock(64, num_heads=4, mlp_dim=256)
    block(np.zeros((2, 16, 64))).shape  # (2, 16, 64)
    ```

    Reference: [Dehghani et al., 2023](https://arxiv.org/abs/2302.05442)
    """

    num_dropouts = 3

    def __init__(self, hidden_dim, num_heads, mlp_dim, **kwargs):
        super().__init__(hidden_dim, num_heads, mlp_dim, **kwargs)
        sizes = (hidden_dim, num_heads, mlp_dim)
        self.norm = make_norm(
            self.norm_kind,
            epsilon=self.epsilon,
            dtype=self.dtype_policy,
            name="norm",
        )
        self.in_projection = InProjection(
            *sizes, dtype=self.dtype_policy, name="in_projection"
        )
        self.out_projection = OutProjection(
            *sizes,
            use_bias=True,
            dtype=self.dtype_policy,
            name="out_projection",
        )

    def build(self, input_shape):
        share = self.mlp_dim // self.num_heads
        self.norm.build(input_shape)
        self.in_projection.build(input_shape)
        self._build_attention(input_shape)
        self.out_projection.build(
            (*input_shape[:2], self.num_heads, self.head_dim + share)
        )
        self.mlp_bias = self.add_weight(
            name="mlp_bias",
            shape=(self.num_heads, share),
            initializer=keras.initializers.RandomNormal(stddev=1e-6),
        )
        self.qkv_bias = None
        if self.use_qkv_bias:
            self.qkv_bias = self.add_weight(
                name="qkv_bias",
                shape=(self.num_heads, 3 * self.head_dim),
                initializer="zeros",
            )
        self.layer_scale = self._add_layer_scale("layer_scale")
        self.built = True

    def _forward(self, inputs, seeds, return_attention):
        projected, [out] = call_and_gather(
            self.in_projection, self.norm(inputs), self.out_projection
        )
        qkv, hidden = ops.split(projected, [3 * self.head_dim], axis=-1)
        if self.qkv_bias is not None:
            qkv = qkv + ops.cast(self.qkv_bias, qkv.dtype)
        attended, maps = self._attend(
            *ops.split(qkv, 3, axis=-1), return_attention
        )
        # Cast here, since torch recomputes outside the autocast scope.
        hidden = hidden + ops.cast(self.mlp_bias, hidden.dtype)
        hidden = activate(hidden, self.activation)
        hidden = self._drop(hidden, self.dropout_rate, seeds)
        branches = self.out_projection(
            ops.concatenate([attended, hidden], axis=-1), **out
        )
        return self._add_branch(inputs, branches, self.layer_scale, seeds), maps
