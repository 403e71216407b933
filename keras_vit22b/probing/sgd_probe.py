"""Linear heads by SGD: every rate and set of features in one pass."""

import dataclasses

import keras
import numpy as np
from scipy.special import softmax

from keras_vit22b.probing.rows import FittedProbe
from keras_vit22b.probing.rows import check_classes
from keras_vit22b.probing.rows import check_finite
from keras_vit22b.probing.rows import check_rows
from keras_vit22b.probing.rows import split

# Batches to which learning rates refer, as in DINOv2.
REFERENCE_BATCH = 256
FEATURES = "features"


@dataclasses.dataclass(frozen=True)
class SGDProbe:
    """A linear classifier by SGD, the best of many on held-out images.

    One head for each learning rate and set of features; all see the same
    batches, start alike and do not touch each other, so that one alone would
    end the same. The rate falls to zero as a cosine; no weight decay. What is
    held out chooses, and is not trained on.

    Defaults are those of DINOv2, but for what chooses: there, the test images.

    Attributes:
        learning_rates: tuple of float, for batches of 256 images: the rate is
            times `batch_size / 256`. Defaults to 13 from 1e-5 to 0.1.
        epochs: int. Defaults to `10`.
        batch_size: int, at most the images there are. What is left of an epoch
            is left out. Defaults to `1024`.
        momentum: float. Defaults to `0.9`.
        held_out: float. Share of the images that chooses. Defaults to `0.1`.
        seed: int. Of weights, of the images held out, and of order. Defaults
            to `0`.

    Reference:
        [Oquab et al., 2023](https://arxiv.org/abs/2304.07193), and [Dehghani
        et al., 2023](https://arxiv.org/abs/2302.05442), who train for as many
        epochs with crops and flips, which are views here.
    """

    learning_rates: tuple = (
        *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
        *(1e-2, 2e-2, 5e-2, 1e-1),
    )
    epochs: int = 10
    batch_size: int = 1024
    momentum: float = 0.9
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self):
        rates = self.learning_rates
        rates = tuple(rates) if isinstance(rates, (tuple, list)) else (rates,)
        object.__setattr__(self, "learning_rates", rates)
        if not rates or not all(0 < rate < np.inf for rate in rates):
            raise ValueError(
                f"learning_rates must be positive. Received: {rates!r}."
            )
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name} must be a positive int. Received: {value!r}."
                )
        if not 0 < self.held_out < 1:
            raise ValueError(
                "held_out must lie between 0 and 1. Received: "
                f"{self.held_out!r}."
            )

    def fit(self, features, labels):
        """Train all heads and keep the best.

        Args:
            features: `(n, d)`, or `(n, views, d)`, of which each epoch takes
                the next view; or a dict of such. Arrays, or what gives arrays
                for slices and for arrays of rows.
            labels: `(n,)`, integers or strings.

        Returns:
            A probe with `predict`, `predict_proba` and `score`, which take
            features of the same sets, of one view.

        Raises:
            ValueError: if shapes disagree, a feature is not finite, or there
                are fewer than two classes.
        """
        several = isinstance(features, dict)
        sets = dict(features) if several else {FEATURES: features}
        for name, rows in sets.items():
            sets[name], labels = check_rows(rows, labels, views=True)
        classes, indices = check_classes(labels)
        train, held = split(len(indices), self.held_out, self.seed)
        model = self._train(sets, indices, train, len(classes))
        correct = self._count(model, sets, indices, held)
        names = [(name, rate) for name in sets for rate in self.learning_rates]
        best = int(np.argmax(correct))  # Of equal ones the first.
        name, rate = names[best]
        layer = model.get_layer(f"heads_{list(sets).index(name)}")
        column = self.learning_rates.index(rate)
        kernel, bias = (
            keras.ops.convert_to_numpy(v.value) for v in layer.weights
        )
        return FittedSGDProbe(
            classes,
            sets[name],
            kernel[:, column],
            bias[column],
            chosen=name,
            learning_rate=rate,
            held_out=[
                {
                    "features": name,
                    "learning_rate": rate,
                    "accuracy": count / len(held),
                }
                for (name, rate), count in zip(names, correct.tolist())
            ],
        )

    def _train(self, sets, indices, train, num_classes):
        inputs, logits = {}, []
        for i, (name, rows) in enumerate(sets.items()):
            inputs[name] = keras.Input((rows.shape[-1],), name=f"features_{i}")
            heads = keras.layers.EinsumDense(
                "bd,dhc->bhc",
                (len(self.learning_rates), num_classes),
                bias_axes="hc",
                name=f"heads_{i}",
                dtype="float32",
            )
            logits.append(heads(inputs[name]))
            # All rates start from the same weights, as DINOv2's are drawn.
            start = np.random.default_rng(self.seed).normal(
                0, 0.01, (rows.shape[-1], 1, num_classes)
            )
            heads.kernel.assign(np.broadcast_to(start, heads.kernel.shape))
        model = keras.Model(
            list(inputs.values()), keras.ops.concatenate(logits, axis=1)
        )
        batch_size = min(self.batch_size, len(train))
        steps = self.epochs * (len(train) // batch_size)
        largest = max(self.learning_rates)
        # Without decay, a rate and a factor of the loss are the same.
        factors = np.tile(self.learning_rates, len(sets)) / largest
        model.compile(
            keras.optimizers.SGD(
                keras.optimizers.schedules.CosineDecay(
                    largest * batch_size / REFERENCE_BATCH, steps
                ),
                momentum=self.momentum,
            ),
            _weighted_loss(factors.astype("float32")),
        )
        for epoch in range(self.epochs):
            generator = np.random.default_rng([self.seed, epoch])
            order = generator.permutation(train)
            for first in range(0, len(train) - batch_size + 1, batch_size):
                # Sorted, since disks like that and sums do not care.
                batch = np.sort(order[first : first + batch_size])
                model.train_on_batch(
                    [_read(f, batch, epoch) for f in sets.values()],
                    indices[batch],
                )
        return model

    def _count(self, model, sets, indices, held):
        """Return how many held-out images each head has right, `(heads,)`."""
        correct = 0
        for start in range(0, len(held), self.batch_size):
            rows = held[start : start + self.batch_size]
            inputs = [_read(features, rows, 0) for features in sets.values()]
            found = np.asarray(model.predict_on_batch(inputs)).argmax(-1)
            correct = correct + (found == indices[rows][:, None]).sum(axis=0)
        return correct


class FittedSGDProbe(FittedProbe):
    """What `SGDProbe.fit` returns.

    Attributes:
        kernel: float32 array `(d, c)`.
        bias: float32 array `(c,)`.
        features: string. Set of features that was chosen.
        learning_rate: float. That was chosen.
        held_out: list of dict, one a head: `"features"`, `"learning_rate"` and
            its `"accuracy"` on what was held out.
    """

    def __init__(
        self,
        classes,
        features,
        kernel,
        bias,
        *,
        chosen,
        learning_rate,
        held_out,
    ):
        super().__init__(classes, features)
        self.kernel, self.bias = kernel, bias
        self.features, self.learning_rate = chosen, learning_rate
        self.held_out = held_out

    def predict_proba(self, features):
        if isinstance(features, dict):
            features = features[self.features]
        return super().predict_proba(features)

    def score(self, features, labels):
        if isinstance(features, dict):
            features = features[self.features]
        return super().score(features, labels)

    def _probabilities(self, rows):
        return softmax(rows @ self.kernel + self.bias, axis=1)


def _read(features, rows, epoch):
    """Return rows of the epoch's view, as float32."""
    if len(features.shape) == 3:
        rows_of = rows, epoch % features.shape[1]
    else:
        rows_of = rows
    found = np.asarray(features[rows_of], "float32")
    check_finite(found, rows)
    return found


def _weighted_loss(factors):
    """Return a loss: the sum over heads of `factor * cross-entropy`."""

    def loss(labels, logits):
        labels = keras.ops.reshape(labels, (-1, 1))
        labels = keras.ops.repeat(labels, len(factors), axis=1)
        losses = keras.ops.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
        return keras.ops.sum(losses * factors, axis=1)

    return loss
