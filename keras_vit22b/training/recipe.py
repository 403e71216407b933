"""Training recipes: one frozen record builds all that `fit` needs."""

import dataclasses
import json
import pathlib

import keras
import numpy as np

from keras_vit22b.training.inception_crop import InceptionCrop
from keras_vit22b.training.losses import SigmoidCrossEntropy
from keras_vit22b.training.optimizers import SGD
from keras_vit22b.training.optimizers import AdamW
from keras_vit22b.training.optimizers import ScalingAdafactor
from keras_vit22b.training.schedule import OfBatches
from keras_vit22b.training.schedule import ReciprocalSquareRoot
from keras_vit22b.training.weight_decay import WeightDecay

RECIPE_FILE = "recipe.json"
OPTIMIZERS = {"adafactor": ScalingAdafactor, "adamw": AdamW, "sgd": SGD}
SCHEDULES = ("rsqrt", "cosine", "constant")
LOSSES = ("sigmoid", "softmax")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a classifier is trained. `print` it, or save it beside weights.

    Attributes:
        name: string.
        learning_rate: float. The peak.
        total_steps: int.
        batch_size: int. Images a step, of all devices.
        optimizer: `"adafactor"` (`ScalingAdafactor`), `"adamw"` or `"sgd"`
            with momentum 0.9. Defaults to `"adafactor"`.
        schedule: `"rsqrt"` (`ReciprocalSquareRoot`), `"cosine"` to zero, or
            `"constant"`, each after a linear warm-up. Defaults to `"rsqrt"`.
        warmup_steps: int. Defaults to `10_000`.
        cooldown_steps: int. Of `"rsqrt"`. Defaults to `0`.
        timescale: int. Of `"rsqrt"`. Defaults to `10_000`.
        weight_decay: `WeightDecay`, times the learning rate.
        clip_norm: float. Largest norm of all gradients together, or `None`.
            Defaults to `1.0`.
        loss: `"sigmoid"` (`SigmoidCrossEntropy`) or `"softmax"`. Defaults to
            `"sigmoid"`.
        head_bias: float. Start of the head's bias. Defaults to `-10.0`, which
            goes with thousands of classes.
        crop_area: pair of floats, or `None` for whole images. See
            `InceptionCrop`. Defaults to `(0.05, 1.0)`.
        flip: bool. Defaults to `True`.
        ema_momentum: float, of an average of the weights, or `None`. Defaults
            to `None`.
        accumulation_steps: int. Batches, of `batch_size` images together,
            whose gradients make one step. Defaults to `1`.
    """

    name: str
    learning_rate: float
    total_steps: int
    batch_size: int
    optimizer: str = "adafactor"
    schedule: str = "rsqrt"
    warmup_steps: int = 10_000
    cooldown_steps: int = 0
    timescale: int = 10_000
    weight_decay: WeightDecay = WeightDecay()
    clip_norm: float | None = 1.0
    loss: str = "sigmoid"
    head_bias: float = -10.0
    crop_area: tuple | None = (0.05, 1.0)
    flip: bool = True
    ema_momentum: float | None = None
    accumulation_steps: int = 1

    def __post_init__(self):
        for name, allowed in (
            ("optimizer", tuple(OPTIMIZERS)),
            ("schedule", SCHEDULES),
            ("loss", LOSSES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} must be {', '.join(map(repr, allowed[:-1]))} or "
                    f"{allowed[-1]!r}. Received: {value!r}."
                )
        for name in ("total_steps", "batch_size", "accumulation_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"{name} must be an integer of at least 1. Received: "
                    f"{value!r}."
                )
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into "
                f"accumulation_steps={self.accumulation_steps} batches."
            )
        for name, least in (
            ("warmup_steps", 0),
            ("cooldown_steps", 0),
            ("timescale", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}. Received: "
                    f"{value!r}."
                )
        cooldown = self.cooldown_steps * (self.schedule == "rsqrt")
        if self.warmup_steps + cooldown > self.total_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and cooldown_steps="
                f"{cooldown} do not fit into total_steps={self.total_steps}."
            )
        self._check_options()

    def _check_options(self):
        def number(value, low, high):
            is_number = isinstance(value, (int, float))
            return (
                is_number
                and not isinstance(value, bool)
                and (low < value <= high)
            )

        area = self.crop_area
        if isinstance(area, list):  # Of JSON.
            area = tuple(area)
            object.__setattr__(self, "crop_area", area)
        momentum = self.ema_momentum
        for name, good, wanted in (
            ("name", isinstance(self.name, str), "a string"),
            (
                "learning_rate",
                self.learning_rate == 0 or number(self.learning_rate, 0, 1e9),
                "a number of at least 0",
            ),
            ("flip", isinstance(self.flip, bool), "true or false"),
            ("head_bias", number(self.head_bias, -1e9, 1e9), "a number"),
            (
                "clip_norm",
                self.clip_norm is None or number(self.clip_norm, 0, 1e30),
                "a number above 0, or none",
            ),
            (
                "ema_momentum",
                momentum is None or (number(momentum, 0, 1) and momentum < 1),
                "a number between 0 and 1, or none",
            ),
            (
                "crop_area",
                area is None
                or (
                    isinstance(area, tuple)
                    and len(area) == 2
                    and all(number(side, 0, 1) for side in area)
                    and area[0] <= area[1]
                ),
                "(low, high) in (0, 1], or none",
            ),
            (
                "weight_decay",
                isinstance(self.weight_decay, WeightDecay),
                "a WeightDecay",
            ),
        ):
            if not good:
                raise ValueError(
                    f"{name} must be {wanted}. Received: "
                    f"{getattr(self, name)!r}."
                )

    def replace(self, **changes):
        """Return the recipe with other values."""
        return dataclasses.replace(self, **changes)

    def make_schedule(self):
        """Return the learning rate's schedule."""
        if self.schedule == "rsqrt":
            schedule = ReciprocalSquareRoot(
                self.learning_rate,
                warmup_steps=self.warmup_steps,
                timescale=self.timescale,
                total_steps=self.total_steps,
                cooldown_steps=self.cooldown_steps,
            )
        else:
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0,
                max(self.total_steps - self.warmup_steps, 1),
                alpha=0.0 if self.schedule == "cosine" else 1.0,
                warmup_target=self.learning_rate,
                warmup_steps=self.warmup_steps,
            )
        if self.accumulation_steps > 1:
            schedule = OfBatches(schedule, self.accumulation_steps)
        return schedule

    def make_optimizer(self):
        """Return the optimizer, with schedule, decay and clipping."""
        options = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        if self.ema_momentum is not None:
            # Keras averages after each batch.
            momentum = self.ema_momentum ** (1 / self.accumulation_steps)
            options |= {"use_ema": True, "ema_momentum": momentum}
        if self.accumulation_steps > 1:
            options["gradient_accumulation_steps"] = self.accumulation_steps
        return OPTIMIZERS[self.optimizer](
            self.make_schedule(),
            weight_decay=self.weight_decay,
            global_clipnorm=self.clip_norm,
            **options,
        )

    def make_loss(self, sparse=True):
        """Return the loss, of labels and logits.

        Args:
            sparse: bool. Whether labels are `(batch,)`, not multi-hot
                `(batch, classes)`. Defaults to `True`.
        """
        if self.loss == "sigmoid":
            return SigmoidCrossEntropy(sparse=sparse)
        if sparse:
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return keras.losses.CategoricalCrossentropy(from_logits=True)

    def make_augmentation(self, image_shape, seed=None):
        """Return a layer from images of any size to augmented ones.

        Args:
            image_shape: `(height, width, channels)` of the result.
            seed: int. Defaults to `None`.
        """
        return InceptionCrop(
            *image_shape[:2],
            area=self.crop_area or (1.0, 1.0),
            aspect=(3 / 4, 4 / 3) if self.crop_area else (1.0, 1.0),
            flip=self.flip,
            seed=seed,
        )

    def compile(self, classifier, *, sparse=True, **options):
        """Compile a new `ViT22BImageClassifier`, and set its head's bias.

        Args:
            classifier: a classifier whose `activation` is `None`.
            sparse: bool. Of `make_loss`. Defaults to `True`.
            **options: of `keras.Model.compile`, such as `metrics`.
        """
        activation = classifier.get_config().get("activation")
        if activation not in (None, "linear"):
            raise ValueError(
                f"The loss {self.loss!r} takes logits. Received a classifier "
                f"with activation={activation!r}; make it with None."
            )
        options.setdefault("metrics", ["accuracy"])
        classifier.compile(
            self.make_optimizer(), self.make_loss(sparse), **options
        )
        bias = classifier.head.bias
        bias.assign(np.full(bias.shape, self.head_bias, "float32"))

    def save(self, folder):
        """Write `recipe.json` into a folder, such as a preset's."""
        path = pathlib.Path(folder) / RECIPE_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        )
        partial.replace(path)

    @classmethod
    def load(cls, folder):
        """Read `recipe.json` from a folder.

        Raises:
            ValueError: if the file holds another thing than a recipe.
        """
        path = pathlib.Path(folder) / RECIPE_FILE
        try:
            values = json.loads(path.read_text())
            known = [field.name for field in dataclasses.fields(cls)]
            wrong = sorted(values.keys() ^ known)
            if wrong:
                raise ValueError(
                    f"expected the fields {', '.join(known)}; missing or "
                    f"unknown are {', '.join(wrong)}"
                )
            decay = WeightDecay(**values.pop("weight_decay"))
            return cls(weight_decay=decay, **values)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} holds no recipe: {error}") from error

    def __str__(self):
        lines = [f"recipe {self.name}"]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, WeightDecay):
                value = f"head {value.head:g}, body {value.body:g}" + "".join(
                    f", {pattern} {decay:g}" for pattern, decay in value.others
                )
            lines.append(f"  {field.name.replace('_', ' '):<19}{value}")
        return "\n".join(lines)


NO_DECAY = WeightDecay(head=0.0, body=0.0)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        # Steps, batch, rates and decay: ViT-22B, appendix. Optimizer,
        # clipping, bias and crop: the public recipe of the same lineage
        # (big_vision, train_vit_g), since the paper names none.
        Recipe(
            "vit22b",
            learning_rate=1e-3,
            total_steps=177_000,
            batch_size=65_536,
            cooldown_steps=30_000,
        ),
        # Dosovitskiy et al., 2021, appendix B.1.1, on ImageNet.
        Recipe(
            "fine_tune",
            learning_rate=0.01,
            total_steps=20_000,
            batch_size=512,
            optimizer="sgd",
            schedule="cosine",
            warmup_steps=500,
            weight_decay=NO_DECAY,
            loss="softmax",
            head_bias=0.0,
        ),
        # For models of about a million weights, on a laptop.
        Recipe(
            "proxy",
            learning_rate=1e-3,
            total_steps=2_000,
            batch_size=128,
            optimizer="adamw",
            warmup_steps=100,
            cooldown_steps=500,
            timescale=500,
            head_bias=-2.0,
            crop_area=(0.3, 1.0),
        ),
    )
}
