"""A Keras model that takes batches of any size on a mesh."""

import math

import keras
from keras import ops

from keras_vit22b.distribution.padding import padded_data
from keras_vit22b.distribution.padding import row_multiple
from keras_vit22b.distribution.process_shares import check_sharded_by_keras


class PaddedModel(keras.Model):
    """A model whose `fit`, `evaluate` and `predict` pad batches on a mesh.

    Where the rows of a batch do not divide over the devices, rows are added
    that count nowhere: a loss that is a mean is the mean over real rows,
    metrics leave the others out and `predict` cuts them off. Numbers are those
    of one device.

    Keras gives no weights to `metrics`, so on a mesh they become
    `weighted_metrics`, with weights of zero and one.

    Place it last among the base classes, so that it sees what they make of
    the data.
    """

    def compile(self, *args, metrics=None, weighted_metrics=None, **kwargs):
        if row_multiple() > 1 and metrics:
            if weighted_metrics:
                raise ValueError(
                    "On a mesh, where rows that fill a batch are left out by "
                    "weight, give metrics or weighted_metrics, but not both."
                )
            metrics, weighted_metrics = None, metrics
            self._metrics_take_weights = False
        else:
            self._metrics_take_weights = True
        super().compile(
            *args, metrics=metrics, weighted_metrics=weighted_metrics, **kwargs
        )

    def fit(self, x=None, y=None, batch_size=None, **kwargs):
        check_sharded_by_keras()
        if row_multiple() == 1:
            return super().fit(x, y, batch_size, **kwargs)
        sample_weight = kwargs.pop("sample_weight", None)
        validation = kwargs.pop("validation_data", None)
        split = kwargs.pop("validation_split", None)
        shuffle = kwargs.pop("shuffle", True)
        if split and validation is None:
            data = (x, y, sample_weight)
            first = math.floor(len(x) * (1 - split))
            x, y, sample_weight = _slice(data, slice(None, first))
            validation = _slice(data, slice(first, None))
        if validation is not None:
            kwargs["validation_data"] = padded_data(
                *keras.utils.unpack_x_y_sample_weight(validation),
                batch_size=kwargs.pop("validation_batch_size", None)
                or batch_size,
                steps=kwargs.get("validation_steps"),
            )
        data = padded_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=kwargs.get("steps_per_epoch"),
            shuffle=shuffle is True,
            class_weight=kwargs.pop("class_weight", None),
        )
        # Keras shuffles the batches of a PyDataset, as "batch" asks for.
        by_batch = isinstance(x, keras.utils.PyDataset) or shuffle == "batch"
        return super().fit(data, shuffle=bool(shuffle) and by_batch, **kwargs)

    def evaluate(
        self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs
    ):
        check_sharded_by_keras()
        # Within `fit` Keras has the validation data at hand already.
        if row_multiple() == 1 or kwargs.get("_use_cached_eval_dataset"):
            return super().evaluate(
                x,
                y,
                batch_size=batch_size,
                sample_weight=sample_weight,
                **kwargs,
            )
        data = padded_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=kwargs.get("steps"),
        )
        return super().evaluate(data, **kwargs)

    def predict(self, x, batch_size=None, **kwargs):
        if row_multiple() == 1:
            return super().predict(x, batch_size, **kwargs)
        data = padded_data(
            x, batch_size=batch_size, steps=kwargs.get("steps"), predict=True
        )
        outputs, real = super().predict(data, **kwargs)
        return keras.tree.map_structure(lambda array: array[real], outputs)

    def predict_step(self, *args):
        outputs = super().predict_step(*args)
        _, real, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
        if row_multiple() == 1 or real is None:
            return outputs
        outputs, state = outputs
        return (outputs, real), state

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if sample_weight is not None and row_multiple() > 1:
            real, sample_weight = _split_weights(sample_weight)
            if _divides_by_rows(self.loss):
                sample_weight = sample_weight / ops.mean(real)
        return super().compute_loss(
            x, y, y_pred, sample_weight, training=training
        )

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if sample_weight is not None and row_multiple() > 1:
            real, weights = _split_weights(sample_weight)
            sample_weight = weights if self._metrics_take_weights else real
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def train_step(self, *args):
        return self._count_real_rows(args, super().train_step(*args))

    def test_step(self, *args):
        return self._count_real_rows(args, super().test_step(*args))

    def _count_real_rows(self, args, outputs):
        """Let a batch count in the epoch's mean loss by its real rows.

        Keras counts the rows of the images, whatever their weights.
        """
        weights = keras.utils.unpack_x_y_sample_weight(args[-1])[2]
        if row_multiple() == 1 or weights is None:
            return outputs
        logs, (*state, metrics) = outputs
        share = ops.mean(_split_weights(weights)[0])
        tracker = self.metrics[0]
        metrics = list(metrics)
        for i, variable in enumerate(self.metrics_variables):
            if any(variable is v for v in tracker.variables):
                before = args[0][-1][i]
                metrics[i] = before + share * (metrics[i] - before)
        mapping = list(zip(self.metrics_variables, metrics))
        with keras.StatelessScope(state_mapping=mapping):
            logs = {**logs, tracker.name: tracker.result()}
        return logs, (*state, metrics)


def _slice(arrays, rows):
    return tuple(
        keras.tree.map_structure(
            lambda a: None if a is None else a[rows], array
        )
        for array in arrays
    )


def _split_weights(weights):
    """Return 1 in real rows and 0 in added ones, and weights without NaN."""
    real = ops.logical_not(ops.isnan(weights))
    weights = ops.where(real, weights, ops.zeros_like(weights))
    return ops.cast(real, weights.dtype), weights


def _divides_by_rows(loss):
    """Return whether a loss is summed and divided by the number of rows."""
    loss = keras.tree.flatten(loss)[0]
    return getattr(loss, "reduction", "mean") in ("mean", "sum_over_batch_size")
