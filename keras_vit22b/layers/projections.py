"""The two matmuls of a block, with kernels grouped by head.

Head `h` owns one slice of each kernel, `[q_h | k_h | v_h | mlp_h]` going in
and `[attention_h | mlp_h]` coming out, so that one axis, the heads, shards
both branches and no split crosses a device.

Reference: ViT-22B, section 2, https://arxiv.org/abs/2302.05442
"""

import keras
import numpy as np
from keras import ops

from keras_vit22b.layers.on_mesh import active_mesh
from keras_vit22b.layers.on_mesh import kernel_and_axes


@keras.saving.register_keras_serializable(package="keras_vit22b")
class FusedGlorotUniform(keras.initializers.RandomUniform):
    """Glorot-uniform for a kernel that holds several branches side by side.

    Each branch gets the limit `sqrt(6 / (fan_in + fan_out))` that it would
    have unfused.

    Args:
        branches: list of `(size, fan_in, fan_out)` along `axis`.
        axis: int. Where the branches lie side by side.
        seed: int or `keras.random.SeedGenerator`. Defaults to `None`.
    """

    def __init__(self, branches, axis, seed=None):
        super().__init__(minval=-1.0, maxval=1.0, seed=seed)
        self.branches = [tuple(b) for b in branches]
        self.axis = axis

    def __call__(self, shape, dtype=None):
        limits = np.concatenate(
            [
                np.full(size, np.sqrt(6.0 / (fan_in + fan_out)), "float32")
                for size, fan_in, fan_out in self.branches
            ]
        )
        broadcast = [1] * len(shape)
        broadcast[self.axis] = -1
        unit = super().__call__(shape, dtype=dtype)
        return unit * ops.cast(limits.reshape(broadcast), unit.dtype)

    def get_config(self):
        config = super().get_config()
        for key in ("minval", "maxval"):
            config.pop(key)
        config.update({"branches": self.branches, "axis": self.axis})
        return config


class _OnMesh:
    """A linear layer of Keras whose matmul a mesh may run.

    On a mesh that offers to (`keras_vit22b.distribution.device_mesh`), what
    goes in or comes out is exchanged between devices beside the matmul; the
    numbers stay the same. Quantized layers keep Keras' own matmul.

    `gathered`, a call argument, is the kernel as another layer gathered it.
    """

    def quantize(self, mode=None, type_check=True, config=None):
        # Keras quantizes no subclass unless told that it may.
        super().quantize(mode, type_check=False, config=config)

    def _finish(self, outputs):
        if self.bias is not None:
            outputs = ops.add(outputs, self.bias)
        return outputs if self.activation is None else self.activation(outputs)


class _In(_OnMesh):
    """From whole tokens to units that are shared out.

    With `later` and `later_axes`, kernels of other layers, it also returns
    these gathered; see `keras_vit22b.layers.on_mesh.call_and_gather`.
    """

    def call(
        self,
        inputs,
        training=None,
        gathered=None,
        later=None,
        later_axes=None,
    ):
        mesh = active_mesh()
        if mesh is None:
            return super().call(inputs, training=training)
        outputs, kernels = mesh.all_gather_matmul(
            ops.convert_to_tensor(inputs),
            *kernel_and_axes(self),
            later=later or (),
            later_axes=later_axes or (),
            gathered=gathered,
        )
        outputs = self._finish(outputs)
        return outputs if later is None else (outputs, kernels)


class _Out(_OnMesh):
    """From units that are shared out to whole tokens."""

    def call(self, inputs, training=None, gathered=None):
        mesh = active_mesh()
        if mesh is None:
            return super().call(inputs, training=training)
        return self._finish(
            mesh.matmul_reduce_scatter(
                ops.convert_to_tensor(inputs),
                *kernel_and_axes(self),
                gathered=gathered,
            )
        )


class ColumnParallelDense(_In, keras.layers.Dense):
    """`keras.layers.Dense` for tokens, whose units a mesh may share out."""


class RowParallelDense(_Out, keras.layers.Dense):
    """`keras.layers.Dense` for tokens, whose inputs a mesh may share out."""


class _GroupedProjection(keras.layers.EinsumDense):
    """What both projections share: sizes in, Keras' machinery kept."""

    def __init__(
        self, hidden_dim, num_heads, mlp_dim=0, *, use_bias=False, **kwargs
    ):
        check_divides(hidden_dim, num_heads, mlp_dim)
        self._sizes = {
            "hidden_dim": hidden_dim,
            "num_heads": num_heads,
            "mlp_dim": mlp_dim,
            "use_bias": use_bias,
        }
        super().__init__(
            **self._einsum(hidden_dim, num_heads, mlp_dim, use_bias), **kwargs
        )

    def get_config(self):
        config = super().get_config()
        for key in self._einsum(**self._sizes):
            config.pop(key)
        config.update(self._sizes)
        return config


@keras.saving.register_keras_serializable(package="keras_vit22b")
class InProjection(_In, _GroupedProjection):
    """Queries, keys, values and the MLP's input from one matmul.

    Args:
        hidden_dim: int. Width `d` of a token.
        num_heads: int. Must divide `hidden_dim` and `mlp_dim`.
        mlp_dim: int. `0` for attention alone. Defaults to `0`.
        use_bias: bool. Defaults to `False`.
        **kwargs: `keras.layers.EinsumDense` arguments, but those that the
            sizes settle: equation, shapes, bias axes and kernel initializer.

    Call arguments:
        inputs: tensor `(batch, tokens, hidden_dim)`.

    Returns:
        A tensor `(batch, tokens, num_heads, 3 * head_dim + mlp_dim /
        num_heads)`; each head holds `[q | k | v | mlp]`.
    """

    @staticmethod
    def _einsum(hidden_dim, num_heads, mlp_dim, use_bias):
        head_dim, share = hidden_dim // num_heads, mlp_dim // num_heads
        return {
            "equation": "btd,dhf->bthf",
            "output_shape": (None, num_heads, 3 * head_dim + share),
            "bias_axes": "hf" if use_bias else None,
            "kernel_initializer": FusedGlorotUniform(
                [
                    (3 * head_dim, hidden_dim, hidden_dim),
                    (share, hidden_dim, max(mlp_dim, 1)),
                ],
                axis=2,
            ),
        }


@keras.saving.register_keras_serializable(package="keras_vit22b")
class OutProjection(_Out, _GroupedProjection):
    """Attention and the MLP back to the width, summed by one matmul.

    Args:
        hidden_dim: int. Width `d` of a token.
        num_heads: int. Must divide `hidden_dim` and `mlp_dim`.
        mlp_dim: int. `0` for attention alone. Defaults to `0`.
        use_bias: bool. Defaults to `False`.
        **kwargs: `keras.layers.EinsumDense` arguments, but those that the
            sizes settle: equation, shapes, bias axes and kernel initializer.

    Call arguments:
        inputs: tensor `(batch, tokens, num_heads, head_dim + mlp_dim /
            num_heads)`; each head holds `[attention | mlp]`.

    Returns:
        A tensor `(batch, tokens, hidden_dim)`.
    """

    @staticmethod
    def _einsum(hidden_dim, num_heads, mlp_dim, use_bias):
        head_dim, share = hidden_dim // num_heads, mlp_dim // num_heads
        return {
            "equation": "bthf,hfd->btd",
            "output_shape": (None, hidden_dim),
            "bias_axes": "d" if use_bias else None,
            "kernel_initializer": FusedGlorotUniform(
                [
                    (head_dim, hidden_dim, hidden_dim),
                    (share, max(mlp_dim, 1), hidden_dim),
                ],
                axis=1,
            ),
        }


def check_divides(hidden_dim, num_heads, mlp_dim):
    """Raise if the heads do not divide the widths."""
    if num_heads < 1 or hidden_dim < 1 or mlp_dim < 0:
        raise ValueError(
            "num_heads and hidden_dim must be positive and mlp_dim not "
            f"negative. Received: {num_heads}, {hidden_dim} and {mlp_dim}."
        )
    for name, value in (("hidden_dim", hidden_dim), ("mlp_dim", mlp_dim)):
        if value % num_heads:
            below = value // num_heads * num_heads
            near = [v for v in (below, below + num_heads) if v > 0]
            raise ValueError(
                f"{name} {value} does not divide by num_heads {num_heads}; "
                f"the nearest that do are {' and '.join(map(str, near))}."
            )
