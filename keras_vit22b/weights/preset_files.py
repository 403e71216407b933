"""Preset folders: where they are, and the JSON they hold.

A preset's JSON is data. It is read into known fields of known types and
bounds; nothing in it names code to run.
"""

import difflib
import json
import math
import pathlib

import keras

from keras_vit22b.weights.tensor_files import WEIGHTS_FILE
from keras_vit22b.weights.tensor_files import replacing

CONFIG_FILE = "config.json"
CONVERTER_FILE = "image_converter.json"
PREPROCESSOR_FILE = "preprocessor.json"
PREPROCESSING_FILES = (CONVERTER_FILE, PREPROCESSOR_FILE)
METADATA_FILE = "metadata.json"
CARD_FILE = "README.md"
# keras_hub.models.Backbone.from_preset asks for this index, even for one file.
INDEX_FILE = "model.weights.json"

# Key of config.json, beside keras-hub's own, for a classifier's head.
HEAD = "head"
PACKAGE = "keras_vit22b"
NO_WEIGHTS = (
    "Preset {name!r} has no weights: the weights of ViT-22B were never "
    "released, and this package ships none for it. What works: "
    "load_weights=False for random weights, the path of a folder that "
    "save_to_preset wrote, or {shipped} for weights that ship."
)


def builtin_folder():
    """Return the folder of built-in presets."""
    package = pathlib.Path(__file__).resolve().parent.parent
    inside = package / "presets"
    return inside if inside.is_dir() else package.parent / "presets"


def builtin_presets():
    """Return `{name: metadata}` of the built-in presets, largest first.

    To what metadata.json says, it adds `"has_weights"`.
    """
    metadata = {
        folder.name: {
            **read_json(folder / METADATA_FILE),
            "has_weights": (folder / WEIGHTS_FILE).is_file(),
        }
        for folder in builtin_folder().iterdir()
        if (folder / METADATA_FILE).is_file()
    }
    return dict(
        sorted(metadata.items(), key=lambda m: -m[1]["parameter_count"])
    )


def resolve_handle(handle):
    """Return the folder that a handle names.

    Args:
        handle: string or path. The name of a built-in preset, or a folder.

    Raises:
        ValueError: if it is neither; near names are offered.
    """
    text = str(handle)
    if "://" in text:
        raise ValueError(
            f"Cannot load {text!r}: this version reads built-in presets and "
            "folders. Download the repository and pass its folder."
        )
    folder = pathlib.Path(text).expanduser()
    builtin = builtin_folder() / text
    if len(folder.parts) == 1 and (builtin / CONFIG_FILE).is_file():
        return builtin
    if folder.is_dir():
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(
                f"Folder {text!r} is not a preset: it has no {CONFIG_FILE}. "
                "save_to_preset writes such a folder."
            )
        return folder
    names = list(builtin_presets())
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.4) or names
    raise ValueError(
        f"Unknown preset {text!r}: neither a built-in name nor a folder. "
        f"Nearest names: {', '.join(near)}."
    )


def weights_path(folder):
    """Return the path of a preset's weights.

    Raises:
        ValueError: if the folder holds none.
    """
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return path
    if folder.parent == builtin_folder():
        shipped = [n for n, m in builtin_presets().items() if m["has_weights"]]
        raise ValueError(
            NO_WEIGHTS.format(
                name=folder.name, shipped=" or ".join(map(repr, shipped))
            )
        )
    raise ValueError(
        f"Folder {str(folder)!r} has no {WEIGHTS_FILE}. Pass "
        "load_weights=False for random weights."
    )


def read_json(path):
    """Read a JSON object from a file, with a clear error."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"Cannot read {path}: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return value


def write_json(path, value):
    """Write a JSON object to a file, all or nothing."""
    with replacing(path) as temporary:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        pathlib.Path(temporary).write_text(text, encoding="utf-8")


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
    return lambda v: any(type(v) is type(w) and v == w for w in values)


def _is_bool(v):
    return isinstance(v, bool)


def _is_string(v):
    return isinstance(v, str) and len(v) <= 200


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
    "pooling": _is_string,
    "norm": _is_string,
    "qk_norm": _or(_is_none, _is_string),
    "block": _is_string,
    "activation": _is_string,
    "use_qkv_bias": _is_bool,
    "epsilon": _is_rate,
    "num_registers": _is_int(0, 1024),
    "layer_scale": _or(_is_none, _is_number),
    "pre_norm": _is_bool,
    "final_norm": _is_string,
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
    "activation": _or(_is_none, _is_string),
    "dropout": _is_rate,
    "class_names": _or(
        _is_none, lambda v: isinstance(v, list) and all(map(_is_string, v))
    ),
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
# Written by Keras and keras-hub, and not ours to set.
_IGNORED = ("dtype", "bounding_box_format")


def read_fields(
    path, section, fields, *, class_name=None, required=(), optional=False
):
    """Read one section of a preset's JSON into known fields.

    Args:
        path: path of the JSON file.
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
    content = read_json(path)
    registered = content.get("registered_name")
    if class_name is not None and registered != f"{PACKAGE}>{class_name}":
        raise ValueError(
            f"{path} describes {registered!r}, expected "
            f"'{PACKAGE}>{class_name}'."
        )
    values = content.get(section)
    if values is None and optional:
        return None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {section!r} must be an object.")
    values = {k: v for k, v in values.items() if k not in _IGNORED}
    faults = [
        f"unknown field {k!r}" if k not in fields else f"{k} = {v!r}"
        for k, v in values.items()
        if k not in fields or not fields[k](v)
    ] + [f"missing field {k!r}" for k in required if k not in values]
    if faults:
        raise ValueError(f"{path} is not valid: {', '.join(faults)}.")
    return values
