"""What is particular to TensorFlow: arrays as tensors, without a copy."""

import tensorflow as tf

from keras_vit22b.weights.safetensors_file import ALIGNMENT


def as_tensor(array):
    """Return an array as a tensor; the two share memory where they can.

    Args:
        array: NumPy array that nobody writes to afterwards.
    """
    dtype = tf.as_dtype(array.dtype)
    # TensorFlow can bitcast to these, and to no float8.
    shares = dtype in (tf.float32, tf.float16, tf.bfloat16)
    if (
        not shares
        or array.ctypes.data % ALIGNMENT
        or not array.flags.c_contiguous
    ):
        return tf.convert_to_tensor(array)
    bits = array.view(f"uint{8 * array.itemsize}")
    return tf.bitcast(
        tf.experimental.dlpack.from_dlpack(bits.__dlpack__()), dtype
    )
