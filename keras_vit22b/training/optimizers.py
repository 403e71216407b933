"""The optimizers of recipes: decay by name, and the lineage's Adafactor."""

import math

import keras
from keras import ops

from keras_vit22b.distribution.sharding import TABLE
from keras_vit22b.training.weight_decay import DecaysByName

_INTO_HEADS = next(row for row in TABLE if row.name == "into_heads.kernel")


@keras.saving.register_keras_serializable(package="keras_vit22b")
class AdamW(DecaysByName, keras.optimizers.Adam):
    """`keras.optimizers.Adam` with decoupled weight decay by name.

    Args:
        learning_rate: float or schedule. Defaults to `0.001`.
        weight_decay: `WeightDecay`. Defaults to `WeightDecay()`.
        **kwargs: of `keras.optimizers.Adam`.

    Raises:
        ValueError: by `build`, if no rule fits a weight.

    Example:
    ```python
    decay = keras_vit22b.training.WeightDecay(head=3.0, body=0.03)
    classifier.compile(keras_vit22b.training.AdamW(1e-3, weight_decay=decay))
    ```
    """

    def update_step(self, gradient, variable, learning_rate):
        self._decay_weight(variable, learning_rate)
        super().update_step(gradient, variable, learning_rate)


@keras.saving.register_keras_serializable(package="keras_vit22b")
class SGD(DecaysByName, keras.optimizers.SGD):
    """`keras.optimizers.SGD` with decoupled weight decay by name.

    Args:
        learning_rate: float or schedule. Defaults to `0.001`.
        weight_decay: `WeightDecay`. Defaults to `WeightDecay()`.
        **kwargs: of `keras.optimizers.SGD`.
    """

    def update_step(self, gradient, variable, learning_rate):
        self._decay_weight(variable, learning_rate)
        super().update_step(gradient, variable, learning_rate)


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ScalingAdafactor(DecaysByName, keras.optimizers.Optimizer):
    """The Adafactor of the scaling-ViT lineage.

    A gradient `g` is divided by the root of its running mean square, and
    momentum is taken of the quotient. At step `t = 1, 2, ...`

        b = min(beta_2_cap, 1 - t ** -decay_exponent)
        v = b v + (1 - b) (g^2 + epsilon)
        m = momentum m + (1 - momentum) g / sqrt(v)
        w -= learning_rate (m + decay w)

    A kernel is seen as a matrix, and of its `v` the means `r` of rows and `c`
    of columns are kept, from which `v = r c / mean(r)`. With `m` in bfloat16
    the optimizer takes half as many bytes as the weights in float32, a quarter
    of what AdamW does. Keras' own Adafactor has no momentum, no cap, clips
    updates and factors the last two dimensions.

    Args:
        learning_rate: float or schedule. Defaults to `0.001`.
        weight_decay: `WeightDecay`. Defaults to `WeightDecay()`.
        momentum: float. Defaults to `0.9`; `0.0` keeps none.
        momentum_dtype: string. Defaults to `"bfloat16"`.
        decay_exponent: float. Defaults to `0.8`.
        beta_2_cap: float. Defaults to `0.999`.
        min_factored_dim: int. A matrix with a shorter side is not factored.
            Defaults to `32`.
        epsilon: float. Defaults to `1e-30`.
        **kwargs: of `keras.optimizers.Optimizer`.

    Raises:
        ValueError: by `build`, if no rule of `weight_decay` fits a weight.

    Reference: [Zhai et al., 2022](https://arxiv.org/abs/2106.04560), section
    3.5; [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235)
    """

    def __init__(
        self,
        learning_rate=0.001,
        weight_decay=None,
        *,
        momentum=0.9,
        momentum_dtype="bfloat16",
        decay_exponent=0.8,
        beta_2_cap=0.999,
        min_factored_dim=32,
        epsilon=1e-30,
        name="scaling_adafactor",
        **kwargs,
    ):
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            name=name,
            **kwargs,
        )
        self.momentum = momentum
        self.momentum_dtype = momentum_dtype
        self.decay_exponent = decay_exponent
        self.beta_2_cap = beta_2_cap
        self.min_factored_dim = min_factored_dim
        self.epsilon = epsilon

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._views = [
            matrix_view(v.path, v.shape, self.min_factored_dim)
            for v in variables
        ]
        self._squares, self._momentums = [], []
        for variable, view in zip(variables, self._views):
            name = variable.path.replace("/", "_")
            # As Keras does it, a slot shaped as its weight is split as it.
            like = {
                "shape": variable.shape,
                "layout": getattr(variable, "_layout", None),
            }
            slots = {"square": like}
            if view is not None:
                rows, columns = view
                slots = {
                    "row_square": {"shape": (rows,)},
                    "column_square": {"shape": (columns,)},
                }
            self._squares.append(
                [
                    self.add_variable(
                        dtype="float32", name=f"{name}_{slot}", **options
                    )
                    for slot, options in slots.items()
                ]
            )
            momentum = None
            if self.momentum:
                momentum = self.add_variable(
                    dtype=self.momentum_dtype, name=f"{name}_momentum", **like
                )
            self._momentums.append(momentum)

    def update_step(self, gradient, variable, learning_rate):
        self._decay_weight(variable, learning_rate)
        index = self._get_variable_index(variable)
        update = self._normalize(index, ops.cast(gradient, "float32"))
        momentum = self._momentums[index]
        if momentum is not None:
            update = (1.0 - self.momentum) * update
            update += self.momentum * ops.cast(momentum, "float32")
            self.assign(momentum, ops.cast(update, momentum.dtype))
        update = ops.cast(learning_rate, "float32") * update
        self.assign_sub(variable, ops.cast(update, variable.dtype))

    def _normalize(self, index, gradient):
        step = ops.cast(self.iterations + 1, "float32")
        beta_2 = 1.0 - ops.power(step, -self.decay_exponent)
        beta_2 = ops.minimum(beta_2, self.beta_2_cap)

        def average(variable, value):
            mean = beta_2 * variable + (1.0 - beta_2) * value
            self.assign(variable, mean)
            return mean

        view, squares = self._views[index], self._squares[index]
        square = ops.square(gradient) + self.epsilon
        if view is None:
            return gradient * ops.rsqrt(average(squares[0], square))
        square = ops.reshape(square, view)
        rows = average(squares[0], ops.mean(square, axis=1))
        columns = average(squares[1], ops.mean(square, axis=0))
        rows = ops.rsqrt(rows / ops.mean(rows))[:, None]
        update = ops.reshape(gradient, view) * rows * ops.rsqrt(columns)
        return ops.reshape(update, ops.shape(gradient))

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "momentum": self.momentum,
                "momentum_dtype": self.momentum_dtype,
                "decay_exponent": self.decay_exponent,
                "beta_2_cap": self.beta_2_cap,
                "min_factored_dim": self.min_factored_dim,
                "epsilon": self.epsilon,
            }
        )
        return config


def matrix_view(path, shape, least):
    """Return `(rows, columns)` as which a weight is factored, or `None`.

    A kernel into heads `(d, heads, f)` is `(d, heads * f)`; of any other all
    dimensions but the last are rows, as of one out of heads `(heads, f, d)`.

    Args:
        path: string. Of the variable.
        shape: tuple of int.
        least: int. The shortest side that is worth it.
    """
    if len(shape) < 2:
        return None
    first = 1 if _INTO_HEADS.matches(path) else len(shape) - 1
    rows, columns = math.prod(shape[:first]), math.prod(shape[first:])
    return (rows, columns) if min(rows, columns) >= least else None
