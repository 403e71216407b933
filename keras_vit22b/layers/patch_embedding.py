"""Patches to tokens, with learned 2-D positions.

Reference: Dosovitskiy et al., 2021, https://arxiv.org/abs/2010.11929
"""

import numbers

import keras
from keras import ops

from keras_vit22b.layers.on_mesh import shard_tokens


@keras.saving.register_keras_serializable(package="keras_vit22b")
class PatchEmbedding(keras.layers.Layer):
    """Cut images into patches, project them and add positions.

    Tokens come in the order `[class token, registers, patches]`; patches are
    row-major. The position table belongs to one grid of patches. Images with
    another grid get the table resized by `resize_position_embedding`.

    Args:
        hidden_dim: int. Width `d` of a token.
        patch_size: int or `(height, width)`. Pixels of a patch.
        grid_size: `(rows, columns)` of patches the position table is made
            for. Defaults to the grid of the images the layer is built on.
        class_token: bool. Whether to prepend a learned token with a position
            of its own. Defaults to `False`.
        num_registers: int. Learned tokens without position. Defaults to `0`.
        **kwargs: `keras.layers.Layer` arguments, such as `name` and `dtype`.

    Call arguments:
        images: float tensor `(batch, height, width, channels)`.

    Returns:
        Tokens of shape `(batch, prefix + rows * columns, hidden_dim)`, where
        `prefix` is `class_token + num_registers`.

    Raises:
        ValueError: if the image size does not divide into patches.

    Example:
    ```python
    layer = keras_vit22b.layers.PatchEmbedding(64, 14)
    layer(np.zeros((2, 224, 224, 3))).shape  # (2, 256, 64)
    ```

    Reference: [Dosovitskiy et al., 2021](https://arxiv.org/abs/2010.11929)
    """

    def __init__(
        self,
        hidden_dim,
        patch_size,
        *,
        grid_size=None,
        class_token=False,
        num_registers=0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.hidden_dim = hidden_dim
        self.patch_size = as_pair(patch_size)
        self.grid_size = None if grid_size is None else as_pair(grid_size)
        self.class_token = class_token
        self.num_registers = num_registers

    @property
    def num_prefix_tokens(self):
        """int. Tokens before the first patch."""
        return int(self.class_token) + self.num_registers

    def build(self, input_shape):
        grid_size = patch_grid(input_shape[1:], self.patch_size)
        if self.grid_size is None:
            self.grid_size = grid_size
        rows, columns = self.grid_size
        width = self.hidden_dim
        near_unit_norm = keras.initializers.RandomNormal(stddev=width**-0.5)
        self.kernel = self.add_weight(
            name="kernel",
            shape=(
                self.patch_size[0] * self.patch_size[1] * input_shape[-1],
                width,
            ),
            initializer="lecun_normal",
        )
        self.bias = self.add_weight(
            name="bias", shape=(width,), initializer="zeros"
        )
        self.position_embedding = self.add_weight(
            name="position_embedding",
            shape=(rows * columns, width),
            initializer=near_unit_norm,
        )
        if self.class_token:
            self.class_embedding = self.add_weight(
                name="class_token", shape=(1, width), initializer="zeros"
            )
            self.class_position = self.add_weight(
                name="class_position",
                shape=(1, width),
                initializer=near_unit_norm.clone(),
            )
        if self.num_registers:
            self.registers = self.add_weight(
                name="registers",
                shape=(self.num_registers, width),
                initializer=keras.initializers.RandomNormal(stddev=1e-6),
            )
        self.built = True

    def call(self, images):
        rows, columns = patch_grid(images.shape[1:], self.patch_size)
        height, width = self.patch_size
        channels = images.shape[-1]
        patches = ops.reshape(
            images, (-1, rows, height, columns, width, channels)
        )
        patches = ops.transpose(patches, (0, 1, 3, 2, 4, 5))
        patches = ops.reshape(
            patches, (-1, rows * columns, height * width * channels)
        )
        tokens = ops.matmul(patches, self.kernel) + self.bias
        positions = resize_position_embedding(
            self.position_embedding, self.grid_size, (rows, columns)
        )
        tokens = tokens + ops.cast(positions, tokens.dtype)
        if not self.num_prefix_tokens:
            return shard_tokens(tokens)
        prefix = []
        if self.class_token:
            prefix.append(
                ops.convert_to_tensor(self.class_embedding)
                + self.class_position
            )
        if self.num_registers:
            prefix.append(ops.convert_to_tensor(self.registers))
        prefix = ops.expand_dims(ops.concatenate(prefix, axis=0), 0)
        prefix = ops.tile(
            ops.cast(prefix, tokens.dtype), (ops.shape(tokens)[0], 1, 1)
        )
        return shard_tokens(ops.concatenate([prefix, tokens], axis=1))

    def compute_output_shape(self, input_shape):
        rows, columns = patch_grid(input_shape[1:], self.patch_size)
        tokens = self.num_prefix_tokens + rows * columns
        return (input_shape[0], tokens, self.hidden_dim)

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "hidden_dim": self.hidden_dim,
                "patch_size": self.patch_size,
                "grid_size": self.grid_size,
                "class_token": self.class_token,
                "num_registers": self.num_registers,
            }
        )
        return config


def resize_position_embedding(table, old_grid, new_grid):
    """Resize a position table from one grid of patches to another.

    Antialiased bicubic, in float32; the identity when the grids are equal.

    Args:
        table: tensor `(old_rows * old_columns, hidden_dim)`, row-major.
        old_grid: `(rows, columns)` that `table` is made for.
        new_grid: `(rows, columns)` wanted.

    Returns:
        A tensor of shape `(new_rows * new_columns, hidden_dim)`: `table`
        itself when the grids are equal, float32 otherwise.
    """
    table = ops.convert_to_tensor(table)
    if tuple(old_grid) == tuple(new_grid):
        return table
    width = table.shape[-1]
    grid = ops.reshape(ops.cast(table, "float32"), (1, *old_grid, width))
    grid = ops.image.resize(
        grid,
        tuple(new_grid),
        interpolation="bicubic",
        antialias=True,
        data_format="channels_last",
    )
    return ops.reshape(grid, (new_grid[0] * new_grid[1], width))


def patch_grid(image_shape, patch_size):
    """Return the `(rows, columns)` of patches in an image.

    Args:
        image_shape: `(height, width, channels)` in pixels.
        patch_size: int or `(height, width)` in pixels.

    Raises:
        ValueError: if a side is unknown or does not divide.
    """
    patch_size = as_pair(patch_size)
    sides = tuple(image_shape[:2])
    if len(image_shape) != 3 or any(s is None for s in sides):
        raise ValueError(
            "Images need a fixed shape (height, width, channels). "
            f"Received: {tuple(image_shape)}."
        )
    if any(s < p or s % p for s, p in zip(sides, patch_size)):
        down = [max(s // p, 1) * p for s, p in zip(sides, patch_size)]
        up = [-(-s // p) * p for s, p in zip(sides, patch_size)]
        near = [(*up, *image_shape[2:])]
        if down != up:
            near.append((*down, *image_shape[2:]))
        raise ValueError(
            f"image_shape {tuple(image_shape)} does not divide into "
            f"{patch_size[0]} x {patch_size[1]} patches; the nearest that "
            f"do are {' and '.join(str(n) for n in near)}."
        )
    return tuple(s // p for s, p in zip(sides, patch_size))


def as_pair(value):
    """Return `value` as a pair of ints; one int stands for both."""
    is_int = isinstance(value, numbers.Integral)
    pair = (value, value) if is_int else tuple(value)
    if len(pair) != 2 or any(
        not isinstance(v, numbers.Integral) or v < 1 for v in pair
    ):
        raise ValueError(
            f"Expected a positive int or a pair of them. Received: {value!r}."
        )
    return int(pair[0]), int(pair[1])
