"""See attention entropy collapse coming, while a model trains."""

import importlib.util
import logging
import math
import pathlib
import warnings

import keras
import numpy as np

from keras_vit22b.distribution.padding import row_multiple
from keras_vit22b.training.checkpoints import steps_taken
from keras_vit22b.training.training_log import append_record
from keras_vit22b.training.training_log import check_every
from keras_vit22b.training.training_log import kept_records

logger = logging.getLogger(__name__)


class AttentionMonitor(keras.callbacks.Callback):
    """Watch the attention of every block and head on a held batch.

    Attention collapses where logits grow: a softmax over `T` tokens falls from
    an entropy of `log T` nats towards none, its gradient vanishes, and the
    loss stalls or diverges. Logits tell hundreds of steps before the loss.

    Every `every` steps a forward pass of `images` gives, per block and head,
    mean and least entropy, the largest logit, and the norms of queries and
    keys. No more than 64 queries' logits are in memory. The logs of each epoch
    get `attention_entropy` (the least mean entropy of any head, as a share of
    `log T`) and `attention_logit` (the largest of any head).

    Args:
        images: float array `(n, height, width, channels)`, as the backbone
            takes them: converted already. On a mesh `n` must divide over the
            devices.
        every: int. Steps. Defaults to `100`.
        max_logit: float. From which to warn. Defaults to `100.0`, at which
            peers clip queries and keys (https://arxiv.org/abs/2507.20534).
        min_entropy: float. Mean entropy of a head, as a share of `log T`,
            under which to warn. Defaults to `0.05`.
        stop: bool. Whether a warning ends training. Defaults to `False`.
        path: path of a file, which gets a line of JSON each time. A run that
            goes on from a checkpoint first drops what lies after it. Defaults
            to `None`.
        plot: path of a PNG, drawn after each epoch. Defaults to `None`.
        log_dir: path for TensorBoard's events; needs tensorboard and
            TensorFlow. Defaults to `None`.

    Attributes:
        records: list of dicts: `"step"`, and for each field of
            `layers.AttentionStatistics` an array `(blocks, heads)`.
        warned: list of strings. The warnings so far.

    Raises:
        ValueError: if `images` are not converted; in `fit`, if the model has
            no `ViT22BBackbone`, takes other images, or `images` do not divide
            over the devices.

    Example:
    ```python
    converter = classifier.backbone.image_converter
    monitor = keras_vit22b.training.AttentionMonitor(
        converter(images[:32]), stop=True, plot="attention.png"
    )
    classifier.fit(images, labels, callbacks=[monitor])
    ```
    """

    def __init__(
        self,
        images,
        *,
        every=100,
        max_logit=100.0,
        min_entropy=0.05,
        stop=False,
        path=None,
        plot=None,
        log_dir=None,
    ):
        super().__init__()
        check_every(every)
        for name, value, high in (
            ("max_logit", max_logit, math.inf),
            ("min_entropy", min_entropy, 1),
        ):
            if not 0 <= value < high:
                raise ValueError(
                    f"{name} must be at least 0 and below {high}. Received: "
                    f"{value!r}."
                )
        if plot is not None and pathlib.Path(plot).suffix != ".png":
            raise ValueError(
                f"plot must be the path of a PNG. Received: {str(plot)!r}."
            )
        if log_dir is not None and not importlib.util.find_spec("tensorboard"):
            raise ImportError(
                "log_dir writes events for TensorBoard: pip install tensorboard"
            )
        self.images = _check_images(images)
        self.every = every
        self.max_logit = max_logit
        self.min_entropy = min_entropy
        self.stop = stop
        self.path = None if path is None else pathlib.Path(path)
        self.plot_path = plot
        self.log_dir = log_dir
        self.records, self.warned = [], []
        self._crossed = set()
        self._watched = self._statistics = self._writer = None

    def on_train_begin(self, logs=None):
        backbone = getattr(self.model, "backbone", self.model)
        if not hasattr(backbone, "attention_model"):
            raise ValueError(
                "AttentionMonitor needs a ViT22BBackbone or a model with one "
                f"as `backbone`. Received: {type(self.model).__name__}."
            )
        if self.images.shape[1:] != tuple(backbone.image_shape):
            raise ValueError(
                f"The backbone takes images {tuple(backbone.image_shape)}. "
                f"Received: {self.images.shape[1:]}; its image_converter "
                "resizes them."
            )
        if len(self.images) % row_multiple():
            raise ValueError(
                f"{len(self.images)} images do not divide over the "
                f"{row_multiple()} devices that share a batch."
            )
        self._advice = "" if backbone.qk_norm else "qk_norm='rms', "
        patches = math.prod(backbone.patch_embedding.grid_size)
        self.tokens = patches + backbone.num_prefix_tokens
        self._crossed = set()
        if self._watched is not backbone:
            self._watched, self.records = backbone, []
            self._statistics = _compiled(backbone.attention_model())
        self._step = steps_taken(self.model.optimizer)
        if self.log_dir is not None:
            import tensorflow as tf

            self._writer = tf.summary.create_file_writer(str(self.log_dir))
        if self.path is not None:
            self.records = [
                {name: np.asarray(value) for name, value in record.items()}
                for record in kept_records(self.path, self._step)
            ]
        if not self.records or self.records[-1]["step"] < self._step:
            self._record()

    def on_epoch_begin(self, epoch, logs=None):
        self._steps_before = self._step

    def on_train_batch_end(self, batch, logs=None):
        # Several at once, with steps_per_execution.
        before, self._step = self._step, self._steps_before + batch + 1
        if self._step // self.every > before // self.every:
            self._record()

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["attention_entropy"] = float(self._entropy_share().min())
            logs["attention_logit"] = float(
                self.records[-1]["largest_logit"].max()
            )
        if self.plot_path is not None:
            self.plot(self.plot_path)

    def on_train_end(self, logs=None):
        if self.plot_path is not None:
            self.plot(self.plot_path)
        if self._writer is not None:
            self._writer.close()

    def _record(self):
        # `self.model` also brings JAX's weights up to date.
        values = self._statistics(self.model, self.images)
        record = {"step": self._step, **values}
        self.records.append(record)
        logger.info(
            "step %d: largest logit %.3g, least entropy %.2f log T",
            self._step,
            record["largest_logit"].max(),
            self._entropy_share().min(),
        )
        self._warn(record)
        if self.path is not None:
            append_record(
                self.path,
                {name: np.asarray(v).tolist() for name, v in record.items()},
            )
        if self._writer is not None:
            self._write_events(record)

    def _entropy_share(self, record=None):
        record = self.records[-1] if record is None else record
        return record["mean_entropy"] / math.log(self.tokens)

    def _warn(self, record):
        logits, shares = record["largest_logit"], self._entropy_share(record)
        # NaN crosses, too.
        for name, bad, values, worst in (
            (
                "largest logit",
                ~(logits <= self.max_logit),
                logits,
                f"over {self.max_logit:g}",
            ),
            (
                "mean entropy",
                ~(shares >= self.min_entropy),
                shares,
                f"of log T, under {self.min_entropy:g}",
            ),
        ):
            if not bad.any():
                continue
            if self.stop:
                self.model.stop_training = True
            if name in self._crossed:
                continue
            self._crossed.add(name)
            block, head = np.argwhere(bad)[0]
            message = (
                f"Attention of block {block}, head {head} is near collapse at "
                f"step {self._step}: {name} {values[block, head]:.3g} {worst}. "
                f"{self._advice}a lower learning rate or a longer warm-up "
                "prevent it."
            )
            self.warned.append(message)
            warnings.warn(message, stacklevel=2)

    def _write_events(self, record):
        import tensorflow as tf

        with self._writer.as_default(step=self._step):
            for name, values in record.items():
                if name == "step":
                    continue
                for block, heads in enumerate(values):
                    tf.summary.scalar(
                        f"attention/{name}/block_{block}",
                        _WORST[name](heads),
                    )
        self._writer.flush()

    def plot(self, path):
        """Draw entropy and largest logit of each block against the step.

        Args:
            path: path of a PNG.
        """
        from matplotlib.figure import Figure

        steps = [record["step"] for record in self.records]
        shares = np.array([self._entropy_share(r) for r in self.records])
        logits = np.array([r["largest_logit"] for r in self.records])
        figure = Figure(figsize=(7, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        blocks = shares.shape[1]
        colors = [f"C{i}" for i in range(blocks)]
        if blocks > 10:
            import matplotlib

            scale = matplotlib.colormaps["viridis"]
            colors = [scale(i / (blocks - 1)) for i in range(blocks)]
        for block, color in enumerate(colors):
            label = f"block {block}"
            above.plot(
                steps, shares[:, block].min(-1), color=color, label=label
            )
            below.plot(
                steps, logits[:, block].max(-1), color=color, label=label
            )
        above.axhline(self.min_entropy, color="gray", linestyle=":")
        above.set(ylabel="mean entropy / log T,\nlowest head", ylim=(0, 1.02))
        below.axhline(self.max_logit, color="gray", linestyle=":")
        below.set(ylabel="largest logit", xlabel="step", yscale="log")
        if blocks <= 10:
            above.legend(fontsize="small", ncols=2)
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _check_images(images):
    """Return images as an array, if they are ones that a backbone takes."""
    images = np.asarray(images)
    if images.ndim != 4 or not images.size or images.dtype.kind != "f":
        raise ValueError(
            "images must be floats (n, height, width, channels), such as "
            "image_converter(images) gives. Received: "
            f"{images.dtype} {images.shape}."
        )
    if not np.isfinite(images).all():
        raise ValueError("images hold NaN or infinite values.")
    return images


# Of a block's heads, the one to look at.
_WORST = {
    "mean_entropy": np.min,
    "min_entropy": np.min,
    "largest_logit": np.max,
    "query_norm": np.max,
    "key_norm": np.max,
}


def _compiled(statistics):
    """Return a function of the trained model and images.

    Args:
        statistics: `keras.Model`, which shares the trained model's weights.
    """
    backend = keras.config.backend()
    if backend == "jax":
        import jax

        @jax.jit
        def forward(trainable, others, images):
            return statistics.stateless_call(trainable, others, images)[0]

        def call(images):
            return forward(
                [v.value for v in statistics.trainable_variables],
                [v.value for v in statistics.non_trainable_variables],
                images,
            )

    elif backend == "tensorflow":
        import tensorflow as tf

        call = tf.function(statistics)
    else:
        import torch

        def call(images):
            with torch.no_grad():
                return statistics(images)

    def values(model, images):
        del model  # Asked for, so that its weights are up to date.
        return {
            name: keras.ops.convert_to_numpy(value)
            for name, value in call(images).items()
        }

    return values
