"""Frozen features of images, from any source of images."""

import numpy as np
import tqdm

from keras_vit22b.distribution.padding import row_multiple
from keras_vit22b.models.preprocessing import convert_images
from keras_vit22b.probing.extractor import PRESET
from keras_vit22b.probing.extractor import as_int
from keras_vit22b.probing.extractor import choose_converter
from keras_vit22b.probing.extractor import describe_converter
from keras_vit22b.probing.extractor import make_extractor
from keras_vit22b.probing.feature_store import FeatureStore
from keras_vit22b.probing.image_source import ImageSource
from keras_vit22b.probing.store_writer import StoreWriter

SHARD_BYTES = 256 * 1024 * 1024


def extract_features(
    model,
    images,
    *,
    blocks=None,
    pooling=None,
    normed=True,
    batch_size=32,
    image_converter=PRESET,
    labels=None,
    views=None,
    store=None,
    return_labels=False,
    skip_unreadable=False,
    progress=False,
):
    """Return the frozen features of images.

    Args:
        model: a `ViT22BBackbone`; or any Keras model or callable from images
            `(batch, height, width, channels)` to features `(batch, d)`, or to
            a dict of them.
        images: one of

            - an array `(n, height, width)` or `(n, height, width, channels)`,
              or a list of images of any sizes, with values of 0 to 255;
            - the path of a folder of images, one sub-folder a class, or an
              `ImageFolder`; images come in sorted order;
            - `LabelledImages`, of `read_images`;
            - an iterable of batches, such as a `tf.data.Dataset`, a grain or
              torch loader: images, or tuples of images and labels.
        blocks: int or list of int. Blocks whose tokens are pooled; negative
            ones count from the last. Defaults to `None`: the backbone's
            `"pooled_output"`.
        pooling: `"map"`, `"cls"` or `"mean"`, or a list of such. How tokens
            are pooled. Defaults to `None`: as the backbone does.
        normed: bool. Whether tokens of `blocks` go through the backbone's
            last norm. Defaults to `True`.
        batch_size: int. Images a step. The last step is padded, so that one
            compiled shape serves; on a mesh of devices all are, until images
            divide over them. Defaults to `32`.
        image_converter: a callable from images to the model's input. Defaults
            to `"preset"`: that of the preset. `None` for images that are
            converted already.
        labels: int array `(n,)`, of an array or list of images. Defaults to
            `None`.
        views: a `Views`: how often each image is cropped at random. Defaults
            to `None`: the image itself.
        store: path of a folder, for a `FeatureStore`: one set of features for
            each block and pooling. The same call goes on with one that was
            killed. Defaults to `None`: features are returned, those of several
            blocks and poolings concatenated.
        return_labels: bool. Whether to return labels as well; a store has them
            if there are any. Defaults to `False`.
        skip_unreadable: bool. Whether to leave out images of a folder that
            cannot be decoded, with a warning in the log, instead of stopping.
            Defaults to `False`.
        progress: bool. Whether to show a progress bar. Defaults to `False`.

    Returns:
        A float32 array `(n, d)`, or `(n, views, d)`; or a pair of it and the
        labels `(n,)`; or a `FeatureStore`.

    Raises:
        ValueError: if there are no images, an image holds NaN or cannot be
            decoded, labels are asked for and absent, or the folder of a store
            holds something else.

    Example:
    ```python
    backbone = keras_vit22b.from_preset("vit1500k_patch7_28_fashion_glyphs")
    features = keras_vit22b.extract_features(backbone, "photos/")
    ```
    """
    batch_size = as_int("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive. Received: {batch_size}")
    extractor = make_extractor(model, blocks, pooling, normed)
    converter = choose_converter(model, image_converter)
    source = ImageSource(images, labels, skip_unreadable)

    def run(first):
        return _extract(
            extractor, converter, views, source, batch_size, progress, first
        )

    if store is not None:
        manifest = {
            "model": extractor.describe(),
            "preprocessing": describe_converter(converter),
            "features": extractor.features,
            "views": {"count": 1} if views is None else views.describe(),
            "batch_size": batch_size,
            "images": source.describe(),
            "class_names": source.class_names,
        }
        return _fill_store(store, manifest, run)
    features, labels = [], []
    for _, batch, batch_labels in run(0):
        features.append(np.concatenate(list(batch.values()), axis=-1))
        labels.extend(batch_labels)
    if not features:
        raise ValueError("There are no images to extract features from.")
    features = np.concatenate(features)
    if not return_labels:
        return features
    if any(label is None for label in labels):
        raise ValueError(
            "return_labels is True, but the images have no labels. A folder "
            "needs one sub-folder a class; a loader, (images, labels) tuples."
        )
    return features, np.asarray(labels)


def _extract(extractor, converter, views, source, batch_size, progress, first):
    """Yield numbers, features by name and labels of a batch at a time.

    Args:
        first: int. The image of the source to begin with.
    """
    rows = batch_size + -batch_size % row_multiple()
    with tqdm.tqdm(
        total=source.count,
        initial=first,
        unit=" images",
        disable=not progress,
        desc="features",
    ) as bar:
        for numbers, images, labels in source.batches(batch_size, first):
            seen = [images] if views is None else views.crop(images, numbers)
            found = [
                extractor(
                    convert_images(view, converter, extractor.image_shape), rows
                )
                for view in seen
            ]
            features = {
                name: found[0][name]
                if views is None
                else np.stack([view[name] for view in found], axis=1)
                for name in found[0]
            }
            _check_finite(features, numbers)
            bar.update(numbers[-1] + 1 - bar.n)
            yield numbers, features, labels


def _check_finite(features, numbers):
    for name, values in features.items():
        good = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if not good.all():
            raise ValueError(
                f"Features {name!r} of image {numbers[np.argmin(good)]} are "
                "not finite. In float16, try bfloat16 or float32."
            )


def _fill_store(path, manifest, run):
    """Write the shards that are missing, and return the store."""
    with StoreWriter(path, manifest) as writer:
        if not writer.complete:
            held = []
            for batch in run(writer.done):
                held.append(batch)
                size = sum(values.nbytes for values in held[0][1].values())
                if len(held) * size >= SHARD_BYTES:
                    writer.add(held)
                    held = []
            if held:
                writer.add(held)
            writer.finish()
    return FeatureStore(path)
