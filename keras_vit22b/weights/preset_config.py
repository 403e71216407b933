"""The JSON of a preset: data, read into known fields of known types.

Nothing in it names code to run.
"""

import json
import math

import keras

from keras_vit22b.weights.tensor_names import POSITION_EMBEDDING
from keras_vit22b.weights.tensor_shapes import tensor_shapes

CONFIG_FILE = "config.json"
CONVERTER_FILE = "image_converter.json"
PREPROCESSOR_FILE = "preprocessor.json"
METADATA_FILE = "metadata.json"
CARD_FILE = "README.md"

# Key of config.json, beside keras-hub's own, for a classifier's head.
HEAD = "head"
PACKAGE = "keras_vit22b"
# Keys of a file that describes a class.
TOP_LEVEL = {"module", "class_name", "config", "registered_name", HEAD}


def write_json(path, value):
    """Write a JSON object to a file."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def serialize(instance):
    """Return keras-hub's JSON form of a model or preprocessing layer."""
    config = keras.saving.serialize_keras_object(instance)
    return _without(config, ("build_config", "compile_config"))


def _without(value, keys):
    if isinstance(value, dict):
        return {k: _without(v, keys) for k, v in value.items() if k not in keys}
    return value


def _is_int(low, high):
    return lambda v: type(v) is int and low <= v <= high


def _is_rate(v):
    return _is_number(v) and 0 <= v < 1


def _is_number(v):
    return type(v) in (int, float) and abs(v) < math.inf


def _is_list_of(check, *lengths):
    return lambda v: (
        isinstance(v, list) and len(v) in lengths and all(map(check, v))
    )


def _is_one_of(*values):
    def check(v):
        return any(type(v) is type(w) and v == w for w in values)

    check.expected = " or ".join(map(repr, values))
    return check


def _is_bool(v):
    return isinstance(v, bool)


def _is_string(v):
    return isinstance(v, str) and len(v) <= 200


def _is_text(v):
    return isinstance(v, str) and len(v) <= 100_000


def _is_strings(v):
    return isinstance(v, list) and all(map(_is_string, v))


def _is_dict(v):
    return isinstance(v, dict)


def _or(*checks):
    return lambda v: any(check(v) for check in checks)


def _is_none(v):
    return v is None


_PATCH = _is_int(1, 1024)
_COLORS = _or(_is_none, _is_number, _is_list_of(_is_number, 1, 3))

BACKBONE_FIELDS = {
    "image_shape": _is_list_of(_is_int(1, 65536), 3),
    "patch_size": _or(_PATCH, _is_list_of(_PATCH, 2)),
    "num_layers": _is_int(1, 1024),
    "num_heads": _is_int(1, 1024),
    "hidden_dim": _is_int(1, 131072),
    "mlp_dim": _is_int(1, 1048576),
    "pooling": _is_one_of("map", "cls", "mean"),
    "norm": _is_one_of("rms", "layer"),
    "qk_norm": _is_one_of("rms", "layer", None),
    "block": _is_one_of("parallel", "sequential"),
    "activation": _is_one_of("gelu_tanh", "gelu"),
    "use_qkv_bias": _is_bool,
    "epsilon": _is_rate,
    "num_registers": _is_int(0, 1024),
    "layer_scale": _or(_is_none, _is_number),
    "pre_norm": _is_bool,
    "final_norm": _is_one_of("tokens", "pooled"),
    "dropout_rate": _is_rate,
    "drop_path_rate": _is_rate,
    "remat": _is_bool,
    "name": _is_string,
    "trainable": _is_bool,
}
BACKBONE_REQUIRED = (
    "image_shape",
    "patch_size",
    "num_layers",
    "num_heads",
    "hidden_dim",
    "mlp_dim",
)
HEAD_FIELDS = {
    "num_classes": _is_int(1, 10_000_000),
    "activation": _is_one_of(None, "linear", "sigmoid", "softmax"),
    "dropout": _is_rate,
    "class_names": _or(_is_none, _is_strings),
}
CONVERTER_FIELDS = {
    "image_size": _or(_is_none, _is_list_of(_is_int(1, 65536), 2)),
    "channels": _is_one_of(1, 3),
    "convert_channels": _is_bool,
    "scale": _COLORS,
    "offset": _COLORS,
    "crop_to_aspect_ratio": _is_bool,
    "pad_to_aspect_ratio": _is_bool,
    "interpolation": _is_one_of(
        "nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"
    ),
    "antialias": _is_bool,
    "name": _is_string,
    "trainable": _is_bool,
}
METADATA_FIELDS = {
    "keras_version": _is_string,
    "keras_hub_version": _is_string,
    "keras_vit22b_version": _is_string,
    "parameter_count": _is_int(0, 10**18),
    "dtype": _is_string,
    "tasks": _is_strings,
    "sha256": _is_dict,
    "card": _is_dict,
}
METADATA_REQUIRED = ("keras_vit22b_version", "parameter_count", "dtype")
# weights/card.py says what they mean.
CARD_FIELDS = {
    "license": _is_string,
    "training_data": _is_text,
    "limits": _is_text,
    "metrics": lambda v: isinstance(v, list) and len(v) <= 1000,
}
METRIC_FIELDS = {
    "task_type": _is_string,
    "dataset_type": _is_string,
    "dataset_name": _is_string,
    "metric_type": _is_string,
    "metric_value": _is_number,
    "metric_name": _is_string,
}
METRIC_REQUIRED = tuple(METRIC_FIELDS)[:-1]
# Written by Keras and keras-hub, and not ours to set.
_IGNORED = ("dtype", "bounding_box_format")


def read_fields(
    folder,
    name,
    section,
    fields,
    *,
    class_name=None,
    required=(),
    optional=False,
):
    """Read one section of a preset's JSON into known fields.

    Args:
        folder: an open `PresetFolder`.
        name: string. Of the JSON file.
        section: string. Key of the section, such as `"config"`.
        fields: dict from field name to a check of its value.
        class_name: string. The registered class the file must name. Defaults
            to `None`: any.
        required: names of fields that must be there. Defaults to none.
        optional: bool. Whether the section may be absent. Defaults to `False`.

    Returns:
        A dict of the fields, or `None` if an optional section is absent.

    Raises:
        ValueError: if a field is unknown or missing, or its value out of
            bounds.
    """
    content, path = folder.read_json(name), folder.path / name
    if class_name is not None:
        _check_class(path, content, class_name)
    values = content.get(section)
    if values is None and optional:
        return None
    return _check_fields(path, section, values, fields, required)


def _check_class(path, content, class_name):
    """Raise unless a file describes a class, and says nothing else."""
    registered = content.get("registered_name")
    if registered != f"{PACKAGE}>{class_name}":
        raise ValueError(
            f"{path} describes {registered!r}, expected "
            f"'{PACKAGE}>{class_name}'."
        )
    module = content.get("module", PACKAGE)
    if str(module).split(".")[0] != PACKAGE:
        raise ValueError(f"{path} names module {module!r}, not {PACKAGE}.")
    if content.get("class_name", class_name) != class_name:
        raise ValueError(
            f"{path} names class {content['class_name']!r}, not {class_name}."
        )
    unknown = set(content) - TOP_LEVEL
    if unknown:
        raise ValueError(
            f"{path} is not valid: unknown field "
            f"{', '.join(map(repr, sorted(unknown)))}."
        )


def check_preprocessor(folder):
    """Raise unless preprocessor.json, for stock keras-hub, is as we write it.

    Args:
        folder: an open `PresetFolder`.
    """
    if folder.has(PREPROCESSOR_FILE):
        _check_class(
            folder.path / PREPROCESSOR_FILE,
            folder.read_json(PREPROCESSOR_FILE),
            "ViT22BImageClassifierPreprocessor",
        )


def check_json(files):
    """Raise unless a preset's JSON can be written, and read back.

    Args:
        files: dict from file name to content, as `preset_json` makes it.
    """
    for name, content in files.items():
        try:
            files[name] = json.loads(json.dumps(content, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} cannot be written: {error}.") from None
    config = files[CONFIG_FILE]
    _check_fields(CONFIG_FILE, "config", config["config"], BACKBONE_FIELDS)
    if HEAD in config:
        _check_fields(CONFIG_FILE, HEAD, config[HEAD], HEAD_FIELDS)
    if CONVERTER_FILE in files:
        converter = files[CONVERTER_FILE]["config"]
        _check_fields(CONVERTER_FILE, "config", converter, CONVERTER_FIELDS)
    check_card(METADATA_FILE, files[METADATA_FILE].get("card", {}))


def check_card(path, card):
    """Raise unless `card` has known fields of known types."""
    _check_fields(path, "card", card, CARD_FIELDS)
    for metric in card.get("metrics", []):
        _check_fields(path, "metrics", metric, METRIC_FIELDS, METRIC_REQUIRED)


def _check_fields(path, section, values, fields, required=()):
    """Return the known fields of a section, or raise naming all faults."""
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {section!r} must be an object.")
    values = {
        k: v for k, v in values.items() if k in fields or k not in _IGNORED
    }
    faults = [f"unknown field {k!r}" for k in values if k not in fields]
    for name, check in fields.items():
        if name in values and not check(values[name]):
            expected = getattr(check, "expected", None)
            faults.append(
                f"{name} = {values[name]!r}"
                + (f", expected {expected}" if expected else "")
            )
    faults += [f"missing field {k!r}" for k in required if k not in values]
    if faults:
        raise ValueError(f"{path} is not valid: {', '.join(faults)}.")
    return values


def read_backbone(folder):
    """Return the arguments of `ViT22BBackbone` that a preset states."""
    return read_fields(
        folder,
        CONFIG_FILE,
        "config",
        BACKBONE_FIELDS,
        class_name="ViT22BBackbone",
        required=BACKBONE_REQUIRED,
    )


def read_head(folder):
    """Return a classifier's settings that a preset states, or `None`."""
    return read_fields(
        folder,
        CONFIG_FILE,
        HEAD,
        HEAD_FIELDS,
        required=("num_classes",),
        optional=True,
    )


def read_converter(folder):
    """Return the arguments of `ViT22BImageConverter`, or `None`."""
    if not folder.has(CONVERTER_FILE):
        return None
    return read_fields(
        folder,
        CONVERTER_FILE,
        "config",
        CONVERTER_FIELDS,
        class_name="ViT22BImageConverter",
    )


def read_metadata(folder):
    """Return what a preset's metadata.json says."""
    path = folder.path / METADATA_FILE
    metadata = _check_fields(
        path,
        "metadata",
        folder.read_json(METADATA_FILE),
        METADATA_FIELDS,
        METADATA_REQUIRED,
    )
    check_card(path, metadata.get("card", {}))
    return metadata


def check_size(folder, shards):
    """Raise if the config describes more than the weights hold.

    A hostile config would otherwise make the model, and the memory it takes,
    as large as it likes.
    """
    sizes = {
        name: math.prod(shape)
        for name, shape in tensor_shapes(**read_backbone(folder)).items()
    }
    # Positions are resized to the config's grid, so they may exceed those that
    # are stored.
    positions = sizes.pop(POSITION_EMBEDDING)
    described = max(positions, sum(sizes.values()))
    stored = sum(math.prod(spec.shape) for spec in shards.specs.values())
    if described > stored:
        raise ValueError(
            f"{folder.path / CONFIG_FILE} describes at least {described:,} "
            f"numbers, but the weights hold {stored:,}."
        )
