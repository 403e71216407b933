"""The processes and devices that train one model together."""

import keras
import numpy as np

from keras_vit22b.distribution.process_shares import process_shares


class Workers:
    """What this process reads and writes, of a distribution or strategy.

    Args:
        model: `keras.Model`, made under it.

    Attributes:
        first: bool. Whether this process writes what one must write.
        writes_state: bool. Whether it writes checkpoints: on JAX all do, each
            what it holds.
        share: `(index, count)`. Of a batch, as `distribution.data_share`.
        whole_batches: bool. Whether only whole batches can be given.
        strategy: `tf.distribute.Strategy` of several replicas, or `None`.

    Raises:
        ValueError: if Keras would shard the data of several processes.
    """

    def __init__(self, model):
        self.first = self.writes_state = True
        self.share = (0, 1)
        self.strategy = None
        self.whole_batches = False
        backend = keras.config.backend()
        if backend == "jax":
            self._join_distribution()
        elif backend == "tensorflow":
            self._join_strategy(model.distribute_strategy)

    def _join_distribution(self):
        import jax

        distribution = keras.distribution.distribution()
        if distribution is None or jax.process_count() == 1:
            return
        if distribution.auto_shard_dataset:
            raise ValueError(
                "Each process reads its own part of the data. Pass "
                "auto_shard_dataset=False to the distribution."
            )
        shares = process_shares(
            distribution.device_mesh, distribution.batch_dim_name
        )
        self.share = shares[jax.process_index()]
        self.first = jax.process_index() == 0
        self.whole_batches = True

    def _join_strategy(self, strategy):
        if strategy.num_replicas_in_sync == 1:
            return
        self.strategy = strategy
        self.whole_batches = True
        resolver = strategy.cluster_resolver
        if resolver is not None:
            self.first = not resolver.task_id
            self.writes_state = self.first

    def check_recipe(self, recipe):
        """Raise if several TensorFlow workers cannot train by a recipe."""
        strategy = self.strategy
        if strategy is None or strategy.cluster_resolver is None:
            return
        if recipe.optimizer == "adafactor":
            raise ValueError(
                "TensorFlow sends no bfloat16 between workers, which momentum "
                "of optimizer='adafactor' is. Take optimizer='adamw'."
            )

    def load(self, batches):
        """Return what `fit` takes.

        Args:
            batches: a function from a share to a `grain.IterDataset`.
        """
        if self.strategy is None or self.strategy.cluster_resolver is None:
            return batches(self.share)
        return self.strategy.distribute_datasets_from_function(
            lambda context: _as_tf_dataset(
                batches(
                    (context.input_pipeline_id, context.num_input_pipelines)
                ),
                context.num_replicas_in_sync // context.num_input_pipelines,
            )
        )


def _as_tf_dataset(batches, replicas):
    import tensorflow as tf

    signature = keras.tree.map_structure(
        lambda array: tf.TensorSpec(array.shape, array.dtype),
        keras.tree.map_structure(np.asarray, next(iter(batches))),
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: batches, output_signature=signature
    )
    rows = keras.tree.flatten(signature)[0].shape[0]
    return dataset.rebatch(rows // replicas) if replicas > 1 else dataset
