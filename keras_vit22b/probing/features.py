"""Frozen features of images, from any source of images."""

import itertools
import logging
import operator
import pathlib

import keras
import numpy as np
import tqdm

from keras_vit22b.distribution.padding import row_multiple
from keras_vit22b.distribution.padding import split_rows
from keras_vit22b.layers import TokenPooling
from keras_vit22b.models.image_folder import ImageFolder
from keras_vit22b.models.preprocessing import convert_images

logger = logging.getLogger(__name__)

PRESET = "preset"


def extract_features(
    backbone,
    images,
    *,
    blocks=None,
    pooling=None,
    normed=True,
    batch_size=32,
    image_converter=PRESET,
    return_labels=False,
    skip_unreadable=False,
    progress=False,
):
    """Return the frozen features of images.

    Args:
        backbone: a `ViT22BBackbone`.
        images: one of

            - an array `(n, height, width)` or `(n, height, width, channels)`,
              or a list of images of any sizes, with values of 0 to 255;
            - the path of a folder of images, one sub-folder a class, or an
              `ImageFolder`; images come in sorted order;
            - an iterable of batches, such as a `tf.data.Dataset`, a grain or
              torch loader: images, or tuples of images and labels.
        blocks: int or list of int. Blocks whose tokens are pooled and
            concatenated; negative ones count from the last. Defaults to
            `None`: the backbone's `"pooled_output"`.
        pooling: `"map"`, `"cls"` or `"mean"`. How tokens are pooled. Defaults
            to `None`: as the backbone does.
        normed: bool. Whether tokens of `blocks` go through the backbone's
            last norm. Defaults to `True`.
        batch_size: int. Images a step. The last step is padded, so that one
            compiled shape serves; on a mesh of devices all are, until images
            divide over them. Defaults to `32`.
        image_converter: a callable from images to the model's input. Defaults
            to `"preset"`: that of the preset. `None` for images that are
            converted already.
        return_labels: bool. Whether to return labels as well. Defaults to
            `False`.
        skip_unreadable: bool. Whether to leave out images of a folder that
            cannot be decoded, with a warning in the log, instead of stopping.
            Defaults to `False`.
        progress: bool. Whether to show a progress bar. Defaults to `False`.

    Returns:
        A float32 array `(n, d)`, or a pair of it and the labels `(n,)`.

    Raises:
        ValueError: if there are no images, an image holds NaN or cannot be
            decoded, or labels are asked for and absent.

    Example:
    ```python
    backbone = keras_vit22b.from_preset("vit1500k_patch7_28_fashion_glyphs")
    features = keras_vit22b.extract_features(backbone, "photos/")
    ```
    """
    batch_size = _as_int("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive. Received: {batch_size}")
    if not hasattr(backbone, "block_model"):
        raise ValueError(
            "extract_features takes a ViT22BBackbone; of a classifier, its "
            f"`backbone`. Received: {type(backbone).__name__}."
        )
    backbone.check_has_weights()
    image_converter = _choose_converter(backbone, image_converter)
    model = _feature_model(backbone, blocks, pooling, normed)
    samples, total = _samples(images, skip_unreadable)
    rows = batch_size + -batch_size % row_multiple()
    features, labels = [], []
    with tqdm.tqdm(
        total=total, unit=" images", disable=not progress, desc="features"
    ) as bar:
        for batch, batch_labels in _batches(samples, batch_size):
            inputs = convert_images(
                batch, image_converter, backbone.image_shape
            )
            padding = [(0, rows - len(batch))] + [(0, 0)] * 3
            inputs = split_rows(np.pad(inputs, padding))
            outputs = model.predict_on_batch(inputs)
            features.append(np.asarray(outputs, "float32")[: len(batch)])
            labels.extend(batch_labels)
            bar.update(len(batch))
    if not features:
        raise ValueError("There are no images to extract features from.")
    features = np.concatenate(features)
    if not np.isfinite(features).all():
        bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
        raise ValueError(
            f"Features of {len(bad)} images are not finite, first of image "
            f"{bad[0]}. In float16, try bfloat16 or float32."
        )
    if not return_labels:
        return features
    if any(label is None for label in labels):
        raise ValueError(
            "return_labels is True, but the images have no labels. A folder "
            "needs one sub-folder a class; a loader, (images, labels) tuples."
        )
    return features, np.asarray(labels)


def _choose_converter(backbone, image_converter):
    if image_converter is None or callable(image_converter):
        return image_converter
    if image_converter != PRESET:
        raise ValueError(
            "image_converter must be a callable, None or 'preset'. "
            f"Received: {image_converter!r}."
        )
    if backbone.image_converter is None:
        raise ValueError(
            "The backbone has no image_converter. Set one, or pass "
            "image_converter=None for images that are converted already."
        )
    return backbone.image_converter


def _as_int(name, value):
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name} must be an int. Received: {value!r}."
        ) from None


def _feature_model(backbone, blocks, pooling, normed):
    """Return a model from images to `(batch, d)`, made once a backbone."""
    if blocks is not None:
        listed = blocks if isinstance(blocks, (list, tuple)) else [blocks]
        blocks = tuple(_as_int("blocks", block) for block in listed)
    key = (blocks, pooling, normed)
    # Past Keras' tracking: the model is no part of the backbone.
    models = backbone.__dict__.setdefault("_feature_models", {})
    if key not in models:
        models[key] = _make_feature_model(backbone, *key)
    return models[key]


def _make_feature_model(backbone, blocks, pooling, normed):
    if blocks is None:
        if pooling in (None, backbone.pooling):
            return keras.Model(backbone.input, backbone.output["pooled_output"])
        tokens = [backbone.output["sequence_output"]]
    elif not blocks:
        raise ValueError("blocks is empty; name at least one block, or None.")
    else:
        outputs = backbone.block_model(blocks, normed=normed).output
        tokens = [outputs[f"block_{i % backbone.num_layers}"] for i in blocks]
    pooling = pooling or backbone.pooling
    has = {"map": backbone.pooling == "map", "cls": backbone.pooling == "cls"}
    if not has.get(pooling, pooling == "mean"):
        usable = [p for p in ("map", "cls") if has[p]] + ["mean"]
        raise ValueError(
            f"This backbone cannot pool by {pooling!r}; it can by "
            f"{' or '.join(map(repr, usable))}."
        )
    prefix = backbone.num_prefix_tokens
    if pooling == "map":
        pooled = [backbone.pooler(t[:, prefix:]) for t in tokens]
    else:
        pool = TokenPooling(pooling, num_prefix_tokens=prefix, dtype="float32")
        pooled = [pool(t) for t in tokens]
    if len(pooled) > 1:
        pooled = [keras.ops.concatenate(pooled, axis=-1)]
    return keras.Model(backbone.input, pooled[0])


def _samples(images, skip_unreadable):
    """Return an iterator over `(image, label or None)` and its length."""
    if isinstance(images, (str, pathlib.Path)):
        images = ImageFolder(images)
    if isinstance(images, ImageFolder):
        return _folder_samples(images, skip_unreadable), len(images)
    if isinstance(images, (list, tuple)):
        return ((np.asarray(x), None) for x in images), len(images)
    if hasattr(images, "shape"):
        _check_batch(images, "An array of images")
        return ((np.asarray(x), None) for x in images), len(images)
    if hasattr(images, "__iter__"):
        return _loader_samples(images), None
    raise ValueError(
        "images must be an array, a list, a folder or an iterable of batches. "
        f"Received: {type(images).__name__}."
    )


def _check_batch(images, what):
    """Raise unless an array is images, rather than one image."""
    shape = tuple(images.shape)
    one = len(shape) == 3 and shape[-1] in (1, 3)
    if len(shape) not in (3, 4) or one:
        raise ValueError(
            f"{what} must be (n, height, width) or (n, height, width, "
            f"channels). Received shape {shape}"
            + ("; one image needs a batch axis." if one else ".")
        )


def _folder_samples(folder, skip_unreadable):
    for index in range(len(folder)):
        try:
            image = folder[index]
        except ValueError as error:
            if not skip_unreadable:
                raise ValueError(
                    f"{error}. skip_unreadable leaves such images out."
                ) from error
            logger.warning("%s; left out.", error)
            continue
        label = None if folder.labels is None else folder.labels[index]
        yield image, label


def _loader_samples(loader):
    for element in loader:
        if isinstance(element, dict):
            raise ValueError(
                "A loader must give images or (images, labels). Received a "
                f"dict with keys {sorted(element)}."
            )
        labels = None
        if isinstance(element, (tuple, list)) and _is_labelled(element):
            element, labels = element[:2]
        if not isinstance(element, (tuple, list)):
            element = np.asarray(element)
            _check_batch(element, "A batch of a loader")
        yield from zip(
            map(np.asarray, element), _check_labels(labels, len(element))
        )


def _is_labelled(element):
    """Tell (images, labels, ...) from a list of images."""
    return len(element) > 1 and (
        isinstance(element, tuple) or np.ndim(element[1]) < 2
    )


def _check_labels(labels, count):
    if labels is None:
        return [None] * count
    labels = np.asarray(labels)
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise ValueError(
            f"{count} images need labels of shape ({count},). Received shape "
            f"{labels.shape}; of one-hot labels, take the argmax."
        )
    return labels


def _batches(samples, batch_size):
    while batch := list(itertools.islice(samples, batch_size)):
        images, labels = zip(*batch)
        yield images, labels
