"""Patches, positions and their resizing."""

import numpy as np
import pytest
from keras import ops

from keras_vit22b.layers import PatchEmbedding
from keras_vit22b.layers import resize_position_embedding
from keras_vit22b.layers.patch_embedding import patch_grid


def keys_cubic(distance):
    """The cubic convolution kernel of Keys with a = -1/2."""
    x = np.abs(distance)
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def resize_matrix(old, new):
    """Weights `(new, old)` of antialiased bicubic along one axis."""
    step = old / new
    centres = (np.arange(new) + 0.5) * step - 0.5
    # When shrinking, the kernel is as wide as an output pixel.
    distance = (centres[:, None] - np.arange(old)) / max(step, 1)
    weights = keys_cubic(distance)
    return weights / weights.sum(1, keepdims=True)


def table_for(grid, width=3):
    generator = np.random.default_rng(4)
    return generator.normal(size=(grid[0] * grid[1], width)).astype("float32")


def test_resizing_to_the_same_grid_is_the_identity():
    table = table_for((3, 5))
    resized = resize_position_embedding(table, (3, 5), (3, 5))
    np.testing.assert_array_equal(resized, table)


@pytest.mark.parametrize(
    "old, new",
    [
        ((4, 4), (6, 6)),
        ((3, 5), (6, 7)),
        ((6, 8), (3, 2)),
        ((2, 8), (4, 4)),
        ((4, 2), (2, 4)),
        ((1, 4), (3, 3)),
    ],
)
def test_resizing_is_bicubic_in_two_dimensions(old, new):
    table = table_for(old)
    expected = np.einsum(
        "yr,xc,rcd->yxd",
        resize_matrix(old[0], new[0]),
        resize_matrix(old[1], new[1]),
        table.reshape(*old, 3),
    )
    resized = resize_position_embedding(table, old, new)
    np.testing.assert_allclose(resized, expected.reshape(-1, 3), atol=1e-5)


def test_shrinking_is_antialiased():
    # The finest pattern there is has no place in a grid a quarter as fine.
    rows, columns = np.mgrid[:16, :16]
    table = (-1.0) ** (rows + columns)
    resized = resize_position_embedding(
        table.reshape(-1, 1).astype("float32"), (16, 16), (4, 4)
    )
    assert np.abs(ops.convert_to_numpy(resized)).max() < 0.01


def test_positions_are_resized_in_float32():
    table = ops.cast(table_for((4, 4)), "bfloat16")
    resized = resize_position_embedding(table, (4, 4), (2, 2))
    assert "float32" in str(resized.dtype)


def test_tokens_are_patches_row_by_row():
    layer = PatchEmbedding(12, (2, 3))
    images = np.arange(2 * 4 * 9 * 2, dtype="float32").reshape(2, 4, 9, 2)
    layer.build(images.shape)
    assert layer.grid_size == (2, 3)
    layer.kernel.assign(np.eye(12))
    layer.position_embedding.assign(np.zeros((6, 12)))
    tokens = ops.convert_to_numpy(layer(images))
    assert tokens.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            patch = images[
                :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3
            ]
            np.testing.assert_array_equal(
                tokens[:, 3 * row + column], patch.reshape(2, 12)
            )


def test_prefix_is_class_token_then_registers(randomize):
    layer = PatchEmbedding(4, 2, class_token=True, num_registers=2)
    images = np.zeros((3, 4, 4, 1), "float32")
    layer.build(images.shape)
    randomize(layer)
    tokens = ops.convert_to_numpy(layer(images))
    assert tokens.shape == (3, 1 + 2 + 4, 4)
    class_token = layer.class_embedding + layer.class_position
    patches = layer.bias + layer.position_embedding
    for sample in tokens:
        np.testing.assert_allclose(sample[:1], class_token, rtol=1e-6)
        np.testing.assert_array_equal(sample[1:3], layer.registers.value)
        np.testing.assert_allclose(sample[3:], patches, rtol=1e-5)


def test_images_of_another_size_get_resized_positions(randomize):
    layer = PatchEmbedding(4, 2, grid_size=(2, 2), class_token=True)
    layer.build((None, 4, 4, 1))
    randomize(layer)
    tokens = layer(np.zeros((1, 4, 8, 1), "float32"))
    expected = layer.bias + resize_position_embedding(
        layer.position_embedding, (2, 2), (2, 4)
    )
    assert tuple(tokens.shape) == (1, 1 + 8, 4)
    np.testing.assert_allclose(tokens[0, 1:], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("patch_size", [14, np.int64(14), (14, 14), [14, 14]])
def test_patch_size_is_an_int_or_a_pair(patch_size):
    assert PatchEmbedding(4, patch_size).patch_size == (14, 14)


@pytest.mark.parametrize("patch_size", [0, -2, (4,), (4, 4, 4), 4.0, "44"])
def test_other_patch_sizes_are_refused(patch_size):
    with pytest.raises((TypeError, ValueError)):
        PatchEmbedding(4, patch_size)


def test_positions_start_near_unit_norm():
    layer = PatchEmbedding(256, 2)
    layer.build((None, 32, 32, 1))
    table = ops.convert_to_numpy(layer.position_embedding)
    np.testing.assert_allclose(
        np.linalg.norm(table, axis=1).mean(), 1, rtol=0.1
    )


def test_size_that_does_not_divide_names_the_nearest():
    with pytest.raises(ValueError) as error:
        patch_grid((222, 222, 3), 14)
    assert str(error.value) == (
        "image_shape (222, 222, 3) does not divide into 14 x 14 patches; the "
        "nearest that do are (224, 224, 3) and (210, 210, 3)."
    )


@pytest.mark.parametrize("shape", [(28, 28), (None, 28, 1), (28, 28, 1, 1)])
def test_size_that_is_not_fixed_is_an_error(shape):
    with pytest.raises(ValueError, match="fixed shape"):
        patch_grid(shape, 7)


def test_images_smaller_than_a_patch_are_an_error():
    with pytest.raises(ValueError, match=r"\(14, 14, 1\)"):
        PatchEmbedding(4, 14)(np.zeros((1, 8, 8, 1)))
