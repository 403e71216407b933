"""Models as functions from images to named features."""

import hashlib
import json
import operator

import keras
import numpy as np

from keras_vit22b.distribution.padding import split_rows
from keras_vit22b.layers import TokenPooling
from keras_vit22b.weights.state_check import check_state

PRESET = "preset"
POOLED = "pooled_output"


def make_extractor(model, blocks=None, pooling=None, normed=True):
    """Return the extractor of a model, whatever it is.

    Args:
        model, blocks, pooling, normed: as in `extract_features`.
    """
    if hasattr(model, "block_model"):
        model.check_has_weights()
        return BackboneExtractor(model, blocks, pooling, normed)
    if hasattr(getattr(model, "backbone", None), "block_model"):
        raise ValueError(
            "extract_features takes a ViT22BBackbone; of a classifier, its "
            f"`backbone`. Received: {type(model).__name__}."
        )
    if not callable(model):
        raise ValueError(
            "extract_features takes a ViT22BBackbone, a Keras model or a "
            f"callable. Received: {type(model).__name__}."
        )
    if blocks is not None or pooling is not None:
        raise ValueError(
            "blocks and pooling are those of a ViT22BBackbone. Received: "
            f"{type(model).__name__}; let it return a dict of features."
        )
    return CallableExtractor(model)


class BackboneExtractor:
    """Features of a `ViT22BBackbone`.

    Attributes:
        image_shape: tuple of int.
        features: dict from name to a dict of `"block"`, `"pooling"` and
            `"normed"`.
    """

    def __init__(self, backbone, blocks, pooling, normed):
        self.image_shape = backbone.image_shape
        self._backbone = backbone
        self._model, self.features = _feature_model(
            backbone, blocks, pooling, normed
        )

    def __call__(self, images, rows):
        """Return `{name: (n, d)}`, float32, of at most `rows` images."""
        outputs = self._model.predict_on_batch(_pad(images, rows))
        outputs = {name: outputs[name] for name in self.features}
        return _cut(outputs, len(images))

    def describe(self):
        """Return a dict by which to tell the model from others."""
        return {
            **_describe(self._backbone),
            "source": self._backbone.source,
            "image_shape": list(self.image_shape),
        }


class CallableExtractor:
    """Features of any Keras model or callable.

    Attributes:
        image_shape: `None`: any.
        features: `None`: not known before it is called.
    """

    image_shape = None
    features = None

    def __init__(self, model):
        self._model = model

    def __call__(self, images, rows):
        padded = _pad(images, rows)
        if isinstance(self._model, keras.Model):
            outputs = self._model.predict_on_batch(padded)
        else:
            outputs = self._model(padded)
        if not isinstance(outputs, dict):
            outputs = {"features": outputs}
        outputs = _cut(outputs, len(images))
        for name, values in outputs.items():
            if values.ndim != 2 or len(values) != len(images):
                raise ValueError(
                    f"The model must give features (batch, d). Received shape "
                    f"{values.shape} for {name!r}, of {len(images)} images."
                )
        return outputs

    def describe(self):
        name = getattr(self._model, "__name__", type(self._model).__name__)
        if not isinstance(self._model, keras.Model):
            return {"name": name}
        return {"name": name, **_describe(self._model)}


def _describe(model):
    """Return dtype, backend and a digest of a Keras model's weights."""
    weights = {v.path: v for v in model.weights}
    records, _ = check_state(weights)
    text = json.dumps(sorted(records.items()))
    return {
        "dtype": model.dtype_policy.name,
        "backend": keras.config.backend(),
        "weights": hashlib.sha256(text.encode()).hexdigest(),
    }


def _pad(images, rows):
    padding = [(0, rows - len(images))] + [(0, 0)] * (images.ndim - 1)
    return split_rows(np.pad(images, padding))


def _cut(outputs, count):
    found = {}
    for name, values in outputs.items():
        values = keras.ops.convert_to_numpy(values)
        found[name] = values[:count].astype("float32", copy=False)
    return found


def choose_converter(model, image_converter):
    """Return the callable that `extract_features` is to convert images by."""
    if image_converter is None or callable(image_converter):
        return image_converter
    if image_converter != PRESET:
        raise ValueError(
            "image_converter must be a callable, None or 'preset'. "
            f"Received: {image_converter!r}."
        )
    converter = getattr(model, "image_converter", None)
    if converter is None:
        raise ValueError(
            "The model has no image_converter. Pass one, or "
            "image_converter=None for images that are converted already."
        )
    return converter


def describe_converter(converter):
    """Return what a converter does, as JSON; `None` if there is none."""
    if converter is None:
        return None
    if not hasattr(converter, "get_config"):
        return {"name": getattr(converter, "__name__", repr(converter))}
    keys = ("name", "trainable", "dtype", "bounding_box_format")
    config = converter.get_config()
    return {k: v for k, v in config.items() if k not in keys}


def _listed(values):
    return values if isinstance(values, (list, tuple)) else [values]


def _feature_model(backbone, blocks, pooling, normed):
    """Return a model from images to named features, made once a backbone."""
    if blocks is not None:
        blocks = tuple(as_int("blocks", block) for block in _listed(blocks))
    poolings = tuple(_listed(pooling))
    key = (blocks, poolings, normed)
    # Past Keras' tracking: the model is no part of the backbone.
    models = backbone.__dict__.setdefault("_feature_models", {})
    if key not in models:
        models[key] = _make_feature_model(backbone, *key)
    return models[key]


def _make_feature_model(backbone, blocks, poolings, normed):
    if blocks == ():
        raise ValueError("blocks is empty; name at least one block, or None.")
    if not poolings:
        raise ValueError("pooling is empty; name at least one, or None.")
    last = backbone.num_layers - 1
    tokens = {None: backbone.output["sequence_output"]}
    if blocks is not None:
        outputs = backbone.block_model(blocks, normed=normed).output
        tokens = {
            i % backbone.num_layers: outputs[f"block_{i % backbone.num_layers}"]
            for i in blocks
        }
    features, outputs = {}, {}
    for block, of_block in tokens.items():
        for pooling in poolings:
            pooling = pooling or backbone.pooling
            _check_pooling(backbone, pooling)
            if block is None and pooling == backbone.pooling:
                name, values = POOLED, backbone.output[POOLED]
            else:
                where = "output" if block is None else f"block_{block}"
                name = f"{where}.{pooling}"
                values = _pool(backbone, of_block, pooling)
            features[name] = {
                "block": last if block is None else block,
                "pooling": pooling,
                "normed": normed if block is not None else True,
            }
            outputs[name] = values
    return keras.Model(backbone.input, outputs), features


def _check_pooling(backbone, pooling):
    has = {"map": backbone.pooling == "map", "cls": backbone.pooling == "cls"}
    if not has.get(pooling, pooling == "mean"):
        usable = [p for p in ("map", "cls") if has[p]] + ["mean"]
        raise ValueError(
            f"This backbone cannot pool by {pooling!r}; it can by "
            f"{' or '.join(map(repr, usable))}."
        )


def _pool(backbone, tokens, pooling):
    prefix = backbone.num_prefix_tokens
    if pooling == "map":
        return backbone.pooler(tokens[:, prefix:])
    pool = TokenPooling(pooling, num_prefix_tokens=prefix, dtype="float32")
    return pool(tokens)


def as_int(name, value):
    """Return an int, or raise an error that names the argument."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name} must be an int. Received: {value!r}."
        ) from None
