"""Batches of any size on a mesh: rows are added until they divide.

Keras fails on a batch that does not divide over the devices
(https://github.com/keras-team/keras/issues/21167). Rows added here repeat the
last one. They are told from real ones by a weight that is not a number, which
`models/padded_model.py` turns into zero.
"""

import copy
import functools
import math
import types

import keras
import numpy as np


def row_multiple():
    """Return the number by which batches must divide: that of devices.

    One, so that nothing is added, without a `keras.distribution` in force and
    where several processes hold the model: they agree on batches by Keras'
    own sharding of data.
    """
    distribution = keras.distribution.distribution()
    if keras.config.backend() != "jax" or distribution is None:
        return 1
    if distribution.num_processes > 1:
        return 1
    return int(distribution.device_mesh.devices.size)


def split_rows(batch):
    """Place a padded batch on the mesh, each device having some rows.

    Keras' `predict_on_batch` would let every device compute every row.
    """
    if row_multiple() == 1:
        return batch
    layout = keras.distribution.distribution().get_data_layout(batch.shape)
    return keras.distribution.distribute_tensor(batch, layout)


def padded_data(
    x,
    y=None,
    sample_weight=None,
    *,
    batch_size=None,
    steps=None,
    shuffle=False,
    class_weight=None,
    predict=False,
):
    """Return data whose batches divide over the devices.

    Args:
        x: what `keras.Model.fit` takes.
        y: labels, where `x` is arrays.
        sample_weight: weights `(n,)`, where `x` is arrays.
        batch_size: int. Where `x` is arrays. Defaults to 32.
        steps: int. Batches an epoch. Defaults to all.
        shuffle: bool. Whether arrays are shuffled each epoch. Defaults to
            `False`.
        class_weight: dict from class to weight. Defaults to `None`.
        predict: bool. Whether batches are for `predict`. Defaults to `False`.

    Returns:
        A data set whose batches are `pad_batch`'s.

    Raises:
        ValueError: if `x` is a loader that cannot be mapped.
    """
    pad = functools.partial(
        pad_batch,
        multiple=row_multiple(),
        class_weight=class_weight,
        predict=predict,
    )
    if isinstance(x, keras.utils.PyDataset):
        return _PaddedDataset(x, pad)
    if isinstance(x, types.GeneratorType):
        return (pad(batch) for batch in x)
    if hasattr(x, "collate_fn"):
        loader = copy.copy(x)  # A torch DataLoader.
        loader.collate_fn = functools.partial(_collate, pad, x.collate_fn)
        return loader
    if hasattr(x, "element_spec"):
        return _map_tensors(x, pad, predict)
    if hasattr(x, "map") and not hasattr(x, "__array__"):
        return x.map(pad)  # A grain MapDataset or IterDataset.
    if not all(hasattr(a, "shape") for a in keras.tree.flatten(x)):
        raise ValueError(
            "On a mesh data must be arrays, a tf.data.Dataset, a grain "
            "MapDataset or IterDataset, a torch DataLoader, a PyDataset or a "
            f"generator. Received: {type(x).__name__}."
        )
    return _ArrayBatches((x, y, sample_weight), batch_size, steps, shuffle, pad)


def pad_batch(batch, *, multiple, class_weight=None, predict=False):
    """Add copies of the last row until the rows divide by `multiple`.

    Args:
        batch: `x`, `(x, y)` or `(x, y, sample_weight)`; arrays.
        multiple: int.
        class_weight: dict from class to weight. Defaults to `None`.
        predict: bool. Defaults to `False`.

    Returns:
        NumPy arrays `(x, y, sample_weight)`; the weights are float32, NaN in
        added rows. With `predict`, `(x, real)`: bools, false in added rows.

    Raises:
        ValueError: if there are no labels, or weights of both kinds.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    rows = keras.tree.flatten(x)[0].shape[0]
    index = np.arange(rows + -rows % multiple)
    real = index < rows
    index = np.minimum(index, rows - 1)

    def pad(values):
        return keras.tree.map_structure(lambda a: np.asarray(a)[index], values)

    if predict:
        return pad(x), real
    if y is None:
        raise ValueError("The data have no labels; on a mesh fit needs them.")
    if class_weight is not None:
        if weights is not None:
            raise ValueError(
                "Give class_weight or sample weights, but not both."
            )
        weights = _weights_of_classes(np.asarray(y), class_weight)
    if weights is None:
        weights = np.ones(rows)
    weights = pad(weights).astype("float32").reshape(len(index))
    weights[rows:] = np.nan
    return pad(x), pad(y), weights


def _weights_of_classes(y, class_weight):
    one_hot = y.ndim > 1 and y.shape[-1] > 1
    classes = y.argmax(-1) if one_hot else y.reshape(len(y))
    return np.array([class_weight.get(int(c), 1.0) for c in classes])


def _collate(pad, collate, samples):
    import torch

    return keras.tree.map_structure(torch.as_tensor, pad(collate(samples)))


def _map_tensors(dataset, pad, predict):
    """Map `pad` over a `tf.data.Dataset`, which keeps its length."""
    import tensorflow as tf

    def padded(*batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        kept = (x,) if predict else (x, y)
        tensors = tf.nest.flatten(kept)
        last = tf.bool if predict else tf.float32

        def run(*arrays):
            return tf.nest.flatten(pad(tf.nest.pack_sequence_as(batch, arrays)))

        outputs = tf.numpy_function(
            run, tf.nest.flatten(batch), [*(t.dtype for t in tensors), last]
        )
        for output, tensor in zip(outputs, [*tensors, tf.zeros(1)]):
            output.set_shape([None, *tensor.shape[1:]])
        return tf.nest.pack_sequence_as((*kept, None), outputs)

    return dataset.map(padded, num_parallel_calls=tf.data.AUTOTUNE)


class _PaddedDataset(keras.utils.PyDataset):
    """A `PyDataset` with padded batches."""

    def __init__(self, dataset, pad):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._pad = pad

    @property
    def num_batches(self):
        return self._dataset.num_batches

    def __getitem__(self, index):
        return self._pad(self._dataset[index])

    def on_epoch_begin(self):
        self._dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._dataset.on_epoch_end()


class _ArrayBatches(keras.utils.PyDataset):
    """Padded batches of arrays."""

    def __init__(self, arrays, batch_size, steps, shuffle, pad):
        super().__init__()
        self._arrays = keras.tree.map_structure(
            lambda a: None if a is None else np.asarray(a), arrays
        )
        lengths = {
            len(a) for a in keras.tree.flatten(self._arrays) if a is not None
        }
        if len(lengths) != 1:
            raise ValueError(
                "Images, labels and weights must be as many. Received: "
                f"{sorted(lengths)}."
            )
        rows = lengths.pop()
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"batch_size must be at least 1. Received: {batch_size}."
            )
        # As Keras does.
        self._batch_size = batch_size or (
            math.ceil(rows / steps) if steps else 32
        )
        self._order = np.arange(rows)
        self._shuffle = shuffle
        self._pad = pad

    @property
    def num_batches(self):
        return math.ceil(len(self._order) / self._batch_size)

    def on_epoch_begin(self):
        if self._shuffle:
            np.random.shuffle(self._order)

    def __getitem__(self, index):
        start = index * self._batch_size
        rows = self._order[start : start + self._batch_size]
        batch = keras.tree.map_structure(
            lambda a: None if a is None else a[rows], self._arrays
        )
        return self._pad(batch)
