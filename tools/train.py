"""Train a classifier, on one device or many; run it again to go on.

    python tools/train.py --data digits --output results/train
    python tools/train.py --data photos/ --preset vit22b_patch14_224 \\
        --recipe vit22b --batch 128 --model 8 --fsdp --output run

Data: "digits" (scikit-learn's), "fashion_mnist", a folder with one sub-folder a
class, a .csv file of "path" and "label", an .npz file of "images" and "labels",
or a folder that `save_to_disk` of Hugging Face's datasets wrote. Images hold
values of 0 to 255.

Devices: one; with --batch and --model a mesh of all JAX devices, over several
processes with --address, --processes and --process; with --data-parallel Keras'
own data parallelism (JAX) or `tf.distribute` (TensorFlow: MirroredStrategy, or
MultiWorkerMirroredStrategy where TF_CONFIG is set).

Recipes are vit22b, fine_tune and proxy, of keras_vit22b.training.RECIPES; their
fields are set as in --set total_steps=500 learning_rate=3e-3.

The folder of --output gets recipe.json, log.jsonl, checkpoints/, with
--monitor-every attention.jsonl and attention.png, and at the end preset/. A run
that was killed goes on from its last checkpoint, also on another mesh. To cool
a run down that has no end:

    python tools/train.py --data digits --start results/train --cool-down 500 \\
        --output results/cooled
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def parse_arguments(arguments=None):
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True)
    add("--output", required=True, help="folder of the run")
    add("--preset", default="vit250k_patch7_28")
    add("--random", action="store_true", help="weights of a preset with some")
    add("--recipe", help="name, or folder of a recipe.json; default: proxy")
    add("--set", nargs="*", default=[], metavar="NAME=JSON", help="of recipe")
    add("--validation", type=float, default=0.1, help="part held out")
    add("--dtype", help="such as mixed_bfloat16")
    add("--remat", action="store_true", help="recompute blocks")
    add("--seed", type=int, default=0)
    add("--every", type=int, default=500, help="steps between checkpoints")
    add("--keep", type=int, default=3, help="of the last checkpoints")
    add("--log-every", type=int, default=50, help="steps")
    add("--monitor-every", type=int, default=0, help="steps; 0: no monitor")
    add("--start", help="folder of another run, from whose last step to go on")
    add("--cool-down", type=int, metavar="STEPS", help="down to a rate of zero")
    add("--batch", type=int, help="devices that share the batch")
    add("--model", type=int, help="devices that share the heads")
    add("--fsdp", action="store_true", help="weights over the batch too")
    add("--data-parallel", action="store_true")
    add("--cpus", type=int, help="TensorFlow: cut the CPU into devices")
    add("--address", help="host:port of process 0")
    add("--processes", type=int)
    add("--process", type=int)
    add("--peak-flops", type=float, help="of a device, where not known")
    options = parser.parse_args(arguments)
    if (options.batch is None) != (options.model is None):
        parser.error("give both --batch and --model, or neither")
    for name in ("batch", "model", "cool_down", "cpus"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.batch and options.data_parallel:
        parser.error("give a mesh or --data-parallel, but not both")
    if options.cool_down and not options.start:
        parser.error("--cool-down needs --start, the run to cool down")
    if not 0 <= options.validation < 1:
        parser.error("--validation must be from 0 to below 1")
    return options


def distribute(options):
    """Set up devices; return a `tf.distribute.Strategy`, or `None`."""
    import keras

    backend = keras.config.backend()
    if options.processes is not None:
        from keras_vit22b import distribution

        distribution.initialize(
            options.address, options.processes, options.process
        )
    if options.batch:
        from keras_vit22b import ViT22BImageClassifier
        from keras_vit22b import distribution

        mesh = distribution.device_mesh(
            batch=options.batch, model=options.model
        )
        layout_map = ViT22BImageClassifier.get_layout_map(
            mesh, fsdp=options.fsdp
        )
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=layout_map,
                batch_dim_name="batch",
                auto_shard_dataset=False,
            )
        )
    elif options.data_parallel and backend == "jax":
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(auto_shard_dataset=False)
        )
    elif options.data_parallel:
        return make_strategy(options)
    return None


def make_strategy(options):
    """Return a strategy of all GPUs, or of parts of the CPU."""
    import tensorflow as tf

    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if not options.cpus:
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * options.cpus
    )
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(options.cpus)]
    )


def make_recipe(options, step):
    """Return the recipe, with what --set and --cool-down change.

    Args:
        options: of `parse_arguments`.
        step: int. Of the run that --start names, or `0`.
    """
    from keras_vit22b.training import RECIPES
    from keras_vit22b.training import Recipe

    if options.recipe is None and options.start is not None:
        recipe = Recipe.load(options.start)
    elif options.recipe in (None, *RECIPES):
        recipe = RECIPES[options.recipe or "proxy"]
    elif pathlib.Path(options.recipe).is_dir():
        recipe = Recipe.load(options.recipe)
    else:
        raise ValueError(
            f"--recipe must be {', '.join(RECIPES)} or a folder with a "
            f"recipe.json. Received: {options.recipe!r}."
        )
    changes = {}
    if options.cool_down:
        changes = {
            "schedule": "rsqrt",
            "total_steps": step // recipe.accumulation_steps
            + options.cool_down,
            "cooldown_steps": options.cool_down,
        }
    for text in options.set:
        name, _, value = text.partition("=")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    try:
        return recipe.replace(**changes)
    except TypeError as error:
        fields = ", ".join(f.name for f in dataclasses.fields(Recipe))
        raise ValueError(
            f"--set cannot make a recipe: {error}. Its fields are {fields}."
        ) from error


def make_model(options, class_names, num_classes):
    """Return a classifier with a new head."""
    import keras

    import keras_vit22b

    keras.utils.set_random_seed(options.seed)
    if options.dtype:
        keras.config.set_dtype_policy(options.dtype)
    known = keras_vit22b.presets().get(options.preset)
    has_weights = known is None or known["has_weights"]
    model = keras_vit22b.ViT22BImageClassifier.from_preset(
        options.preset,
        load_weights=has_weights and not options.random,
        num_classes=num_classes,
        class_names=class_names or None,
    )
    if options.remat:
        model.backbone.remat = True
        for block in model.backbone.blocks:
            block.remat = True
    return model


def peak_flops(options):
    """Return the FLOP/s of all devices, or `None` where it is not known."""
    import keras

    from keras_vit22b.planning.chips import chip_of_device

    if keras.config.backend() != "jax":
        return options.peak_flops
    import jax

    chip = chip_of_device(jax.devices()[0])
    each = options.peak_flops or (chip and chip.peak_flops)
    return each and each * jax.device_count()


def count_classes(labels):
    """Return how many classes there are."""
    if labels.ndim == 2 and labels.shape[1] > 1:
        return labels.shape[1]  # Multi-hot.
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels):
        raise ValueError(
            "labels must be integers (n,), or multi-hot (n, classes). "
            f"Received {labels.dtype} of shape {labels.shape}."
        )
    if labels.min() < 0:
        raise ValueError(f"labels start at 0. Received: {labels.min()}.")
    return int(labels.max()) + 1


def split(images, labels, part, seed):
    """Return `(images, labels)` to train on, and those held out."""
    import numpy as np

    from keras_vit22b.models.labelled_images import SomeImages

    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images have {len(labels)} labels.")
    order = np.random.default_rng(seed).permutation(len(labels))
    held = round(part * len(labels))
    if held == len(labels):
        raise ValueError(
            f"--validation {part} holds out all of {held} images. Take less."
        )
    return [
        (SomeImages(images, indices), labels[indices])
        for indices in (np.sort(order[held:]), np.sort(order[:held]))
    ]


def main(arguments=None):
    options = parse_arguments(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)  # That of orbax.
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if not options.process:
        logging.getLogger("keras_vit22b.training").setLevel(logging.INFO)
    try:
        run(options)
    except (ArithmeticError, ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the checkpoint")


def run(options):
    """Do what the command line asks for."""
    strategy = distribute(options)
    from keras_vit22b import training
    from keras_vit22b.models.labelled_images import read_images
    from keras_vit22b.training.workers import Workers

    data = read_images(options.data)
    images, labels, class_names = data.images, data.labels, data.class_names
    if labels is None:
        raise ValueError(f"{options.data} has no labels.")
    num_classes = count_classes(labels)
    output = pathlib.Path(options.output).expanduser()
    start, step = None, 0
    if options.start:
        start = pathlib.Path(options.start).expanduser() / "checkpoints"
        step = max(training.Checkpoints(start, writes=False).steps, default=0)
    recipe = make_recipe(options, step)
    if options.cool_down and (output / "recipe.json").exists():
        # The run that it started from may have gone on since.
        recipe = training.Recipe.load(output)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model(options, class_names, num_classes)
    image_shape = model.backbone.image_shape
    converter = model.backbone.image_converter
    train_part, held = split(images, labels, options.validation, options.seed)
    data = training.TrainingData(
        *train_part,
        image_shape,
        converter=converter,
        augmentation=recipe.make_augmentation(image_shape),
        seed=options.seed,
    )
    validation = None
    if len(held[1]):
        validation = training.TrainingData(
            *held, image_shape, converter=converter
        )
    callbacks = []
    if options.monitor_every:
        probe, _ = next(iter((validation or data).in_order(32)))
        callbacks.append(
            training.AttentionMonitor(
                probe,
                every=options.monitor_every,
                path=None if options.process else output / "attention.jsonl",
                plot=None if options.process else output / "attention.png",
            )
        )
    training.train(
        model,
        recipe,
        data,
        output,
        validation=validation,
        every=options.every,
        keep=options.keep,
        log_every=options.log_every,
        peak_flops=peak_flops(options),
        callbacks=callbacks,
        start=start,
    )
    workers = Workers(model)
    if workers.writes_state:
        model.save_to_preset(output / "preset")
    if workers.first:
        recipe.save(output / "preset")
        logging.getLogger("keras_vit22b.training").info(
            "wrote %s", output / "preset"
        )


if __name__ == "__main__":
    main()
