"""Measure what AttentionMonitor adds to a training step.

    python tools/benchmark_monitor.py

trains a proxy without and with a look at attention after every step, in turn,
and prints what one look costs, as a share of 100 steps. Two minutes on two
cores.
"""

import argparse
import json
import statistics
import time

import keras
import numpy as np

from keras_vit22b import ViT22BBackbone
from keras_vit22b import ViT22BImageClassifier
from keras_vit22b.models import VARIANTS
from keras_vit22b.training import RECIPES
from keras_vit22b.training import AttentionMonitor

EVERY = 100
LIMIT = 0.02


def measure(model, images, labels, batch_size, callbacks):
    """Return the seconds of a step."""
    start = time.perf_counter()
    model.fit(
        images,
        labels,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return (time.perf_counter() - start) * batch_size / len(images)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="vit1500k_patch7_28")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=32, help="looked at")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = VARIANTS[arguments.variant].backbone_config()
    model = ViT22BImageClassifier(ViT22BBackbone(**config), 10, compile=False)
    RECIPES["proxy"].compile(model)
    generator = np.random.default_rng(0)
    count = arguments.steps * arguments.batch_size
    images = generator.normal(size=(count, *model.backbone.image_shape))
    images = images.astype("float32")
    labels = generator.integers(0, 10, count)
    monitor = AttentionMonitor(images[: arguments.images], every=1)
    plain, watched = [], []
    for callbacks in ([], [monitor]):  # These compile.
        measure(model, images, labels, arguments.batch_size, callbacks)
    for _ in range(arguments.rounds):
        for times, callbacks in ((plain, []), (watched, [monitor])):
            times.append(
                measure(model, images, labels, arguments.batch_size, callbacks)
            )
    step = statistics.median(plain)
    look = statistics.median(watched) - step
    print(
        json.dumps(
            {
                "backend": keras.config.backend(),
                "seconds_per_step": step,
                "seconds_per_look": look,
                f"cost_every_{EVERY}_steps": look / (EVERY * step),
                "limit": LIMIT,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
