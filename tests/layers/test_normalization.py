"""Norms by name, with statistics in float32."""

import numpy as np
import pytest
from keras import ops

from keras_vit22b.layers.normalization import make_norm


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_are_float32_in_half_precision(kind, dtype):
    # Squares of a thousand overflow float16, and their sum loses bits in
    # bfloat16.
    x = np.array([[1000.0, 1008.0, -992.0, 24.0] * 16], "float32")
    centred = x - x.mean() if kind == "layer" else x
    expected = centred / np.sqrt((centred**2).mean() + 1e-6)
    output = make_norm(kind, dtype=dtype)(ops.cast(x, dtype))
    output = ops.convert_to_numpy(ops.cast(output, "float32"))
    np.testing.assert_allclose(output, expected, atol=0.01)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="'rms' or 'layer'.*'batch'"):
        make_norm("batch")
