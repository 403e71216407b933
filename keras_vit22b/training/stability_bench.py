"""One small model of a stability laboratory, trained again and again."""

import dataclasses
import math
import time

import keras
import numpy as np

from keras_vit22b.models.labelled_images import load_fashion_mnist

DATASETS = ("digits", "fashion_mnist")
# On CPUs Keras leaves out XLA, with which TensorFlow's steps are twice as fast.
JIT_COMPILE = True if keras.backend.backend() == "tensorflow" else "auto"


@dataclasses.dataclass(frozen=True)
class StabilityProtocol:
    """How every model of a laboratory is made and trained.

    AdamW (betas 0.9 and 0.95, no decay), gradients clipped to norm 1, linear
    warm-up, then cosine to zero.

    Attributes:
        dataset: `"digits"` (scikit-learn's, 8 x 8 pixels, 32 patches) or
            `"fashion_mnist"` (28 x 28, 28 patches). Defaults to `"digits"`.
        steps: int. Defaults to `120`.
        batch_size: int. Defaults to `32`.
        warmup_steps: int. Defaults to `40`.
        num_layers: int. Defaults to `3`.
        hidden_dim: int. Defaults to `64`; the MLP has 4 times as many.
        num_heads: int. Defaults to `4`.
        validation_images: int. Held out, for the final loss. Defaults to
            `256`.
        every: int. Steps between two looks at attention. Defaults to `10`.
        monitor_images: int. Looked at. Defaults to `32`.
    """

    dataset: str = "digits"
    steps: int = 120
    batch_size: int = 32
    warmup_steps: int = 40
    num_layers: int = 3
    hidden_dim: int = 64
    num_heads: int = 4
    validation_images: int = 256
    every: int = 10
    monitor_images: int = 32

    def __post_init__(self):
        if self.dataset not in DATASETS:
            raise ValueError(
                f"dataset must be {' or '.join(map(repr, DATASETS))}. "
                f"Received: {self.dataset!r}."
            )
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{field.name} must be an integer of at least 1. "
                    f"Received: {value!r}."
                )

        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps must be fewer than steps, {self.steps}. "
                f"Received: {self.warmup_steps}."
            )

    def learning_rates(self, peak):
        """Return the rate of each step, a list of float."""
        decay = max(self.steps - self.warmup_steps, 1)
        return [
            peak
            * min((step + 1) / self.warmup_steps, 1)
            * (1 + math.cos(math.pi * max(step - self.warmup_steps, 0) / decay))
            / 2
            for step in range(self.steps)
        ]


def load_images(dataset):
    """Return images `(n, height, width, 1)` in [-1, 1], labels, patch size.

    Raises:
        OSError: if Fashion-MNIST is not in Keras' cache and cannot be loaded.
    """
    if dataset == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images / 8.0 - 1.0, digits.target
        patch = (1, 2)
    else:
        images, labels = load_fashion_mnist()
        images, patch = images / 127.5 - 1.0, (4, 7)
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order, ..., None].astype("float32")
    return images, labels[order].astype("int32"), patch


class Bench:
    """A model of one variant, compiled once and trained again and again.

    Seed and learning rate are values that the compiled program is given, so
    that many runs cost one compilation.

    Args:
        qk_norm: `"rms"`, `"layer"` or `None`.
        block: `"parallel"` or `"sequential"`.
        protocol: `StabilityProtocol`.
        data: of `load_images`. Defaults to `None`: loaded.
    """

    def __init__(self, qk_norm, block, protocol, data=None):
        self.qk_norm = qk_norm
        self.block = block
        self.protocol = protocol
        self.images, self.labels, self.patch = data or load_images(
            protocol.dataset
        )
        self.model = self._new_model()
        self.model.compile(
            keras.optimizers.Adam(beta_2=0.95, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=JIT_COMPILE,
        )
        self.model.optimizer.build(self.model.trainable_variables)
        self._unstepped = [
            keras.ops.convert_to_numpy(v)
            for v in self.model.optimizer.variables
        ]
        self._attention = self.model.backbone.attention_model()

    def _new_model(self):
        from keras_vit22b.models import ViT22BBackbone
        from keras_vit22b.models import ViT22BImageClassifier

        backbone = ViT22BBackbone(
            self.images.shape[1:],
            self.patch,
            num_layers=self.protocol.num_layers,
            num_heads=self.protocol.num_heads,
            hidden_dim=self.protocol.hidden_dim,
            mlp_dim=4 * self.protocol.hidden_dim,
            block=self.block,
            qk_norm=self.qk_norm,
            # What a class token knows, it knows by attention.
            pooling="cls",
        )
        return ViT22BImageClassifier(backbone, 10, compile=False)

    def train(self, learning_rate, seed):
        """Train once, from new weights.

        Args:
            learning_rate: float. The peak.
            seed: int. Of weights and order of images.

        Returns:
            A dict: the setting; `"losses"`, one a step; `"initial_loss"` and
            `"final_loss"`, on held-out images; `"watched"`, a list of dicts
            with `"step"`, `"largest_logit"` and `"entropy"` (the least mean
            entropy of any head, as a share of `log T`); and `"seconds"`.
        """
        start = time.perf_counter()
        protocol, held = self.protocol, self.protocol.validation_images
        # Not of the model's seed: all see the same images in the same order.
        order = np.random.default_rng(seed).integers(
            held, len(self.images), protocol.steps * protocol.batch_size
        )
        keras.utils.set_random_seed(seed)
        self.model.set_weights(self._new_model().get_weights())
        for variable, value in zip(
            self.model.optimizer.variables, self._unstepped
        ):
            variable.assign(value)
        validation = {
            "x": self.images[:held],
            "y": self.labels[:held],
            "batch_size": held,
            "verbose": 0,
        }
        initial = float(self.model.evaluate(**validation))
        log = _Log(
            protocol.learning_rates(learning_rate), self._look, protocol.every
        )
        self.model.fit(
            self.images[order],
            self.labels[order],
            batch_size=protocol.batch_size,
            shuffle=False,
            verbose=0,
            callbacks=[log],
        )
        return {
            "qk_norm": self.qk_norm,
            "learning_rate": learning_rate,
            "block": self.block,
            "seed": seed,
            "initial_loss": initial,
            "final_loss": float(self.model.evaluate(**validation)),
            "losses": log.losses,
            "watched": log.watched,
            "seconds": time.perf_counter() - start,
        }

    def _look(self):
        seen = self._attention.predict_on_batch(
            self.images[: self.protocol.monitor_images]
        )
        backbone = self.model.backbone
        tokens = (
            math.prod(backbone.patch_embedding.grid_size)
            + backbone.num_prefix_tokens
        )
        return {
            "largest_logit": float(np.max(seen["largest_logit"])),
            "entropy": float(np.min(seen["mean_entropy"]) / math.log(tokens)),
        }


class _Log(keras.callbacks.Callback):
    """Sets the rate of each step, keeps its loss, looks at attention.

    A rate that is set is a variable; a schedule would be compiled into the
    program. Keras' own loss is the mean of an epoch so far.
    """

    def __init__(self, learning_rates, look, every):
        super().__init__()
        self.learning_rates = learning_rates
        self.look = look
        self.every = every
        self.losses, self.watched = [], []

    def on_train_begin(self, logs=None):
        self.watched.append({"step": 0, **self.look()})

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = self.learning_rates[batch]
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        model = self.model  # Asked for, so that JAX's weights are up to date.
        lost = not math.isfinite(self.losses[-1])
        if lost:
            model.stop_training = True
        last = lost or batch + 1 == len(self.learning_rates)
        if last or (batch + 1) % self.every == 0:
            self.watched.append({"step": batch + 1, **self.look()})
