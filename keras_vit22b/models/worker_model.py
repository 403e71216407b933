"""A Keras model that several TensorFlow workers train together."""

import keras
from keras import ops


class WorkerModel(keras.Model):
    """A model whose `fit` and `evaluate` work on several workers.

    Under `tf.distribute.MultiWorkerMirroredStrategy` Keras 3.15 fails twice
    (https://github.com/keras-team/keras/issues/20585): it averages the first
    batch over the workers to learn its shape, and it averages the scalars that
    a step returns along their first axis. Here the shape is that of a local
    batch, and the scalars get an axis.

    Place it last among the base classes.
    """

    def fit(self, *args, **kwargs):
        if self._has_replicas() and self.optimizer.gradient_accumulation_steps:
            raise ValueError(
                "gradient_accumulation_steps="
                f"{self.optimizer.gradient_accumulation_steps} fails in Keras "
                "under tf.distribute. Take larger batches, which TensorFlow "
                "cuts over the replicas, or the JAX backend."
            )
        return super().fit(*args, **kwargs)

    def train_step(self, *args):
        return self._with_axis(super().train_step(*args))

    def test_step(self, *args):
        return self._with_axis(super().test_step(*args))

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # A private name of Keras, of its TensorFlow backend alone.
        if iterator is not None and self._has_workers():
            _, _, batches = next(iter(iterator))
            local = self.distribute_strategy.experimental_local_results
            data_batch = keras.tree.map_structure(
                lambda value: local(value)[0], next(batches)
            )
            iterator = None
        super()._maybe_symbolic_build(iterator, data_batch)

    def _with_axis(self, logs):
        if not self._has_workers():
            return logs
        return {n: ops.expand_dims(value, 0) for n, value in logs.items()}

    def _has_replicas(self):
        if keras.config.backend() != "tensorflow":
            return False
        return self.distribute_strategy.num_replicas_in_sync > 1

    def _has_workers(self):
        if keras.config.backend() != "tensorflow":
            return False
        import tensorflow as tf

        strategy = self.distribute_strategy
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return False
        jobs = strategy.cluster_resolver.cluster_spec().as_dict()
        return sum(len(jobs.get(job, ())) for job in ("chief", "worker")) > 1
