"""Presets by handle: where they are, and whether they have weights."""

import difflib
import pathlib

from keras_vit22b.weights.hub import is_hub_handle
from keras_vit22b.weights.hub import open_hub_preset
from keras_vit22b.weights.preset_config import CONFIG_FILE
from keras_vit22b.weights.preset_config import METADATA_FILE
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.shards import INDEX_FILE
from keras_vit22b.weights.shards import WEIGHTS_FILE
from keras_vit22b.weights.shards import Shards

NO_WEIGHTS = (
    "Preset {name!r} has no weights: those of ViT-22B were never released, "
    "and none ship for this size. What works: load_weights=False for random "
    "weights; hf://org/name or the path of a folder for weights that "
    "save_to_preset wrote; {shipped} for weights that ship."
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
    metadata = {}
    for path in builtin_folder().iterdir():
        if (path / METADATA_FILE).is_file():
            with PresetFolder(path) as folder:
                metadata[path.name] = {
                    **folder.read_json(METADATA_FILE),
                    "has_weights": _has_weights(folder),
                }
    return dict(
        sorted(metadata.items(), key=lambda m: -m[1]["parameter_count"])
    )


def open_preset(handle, **hub_options):
    """Return the open `PresetFolder` that a handle names.

    Args:
        handle: string or path. The name of a built-in preset, a folder, or
            `hf://org/name[@revision]`.
        **hub_options: `revision`, `token`, `cache_dir`, `local_files_only`,
            for the Hub alone.

    Raises:
        ValueError: if it is none of these; near names are offered.
    """
    if is_hub_handle(handle):
        return open_hub_preset(handle, **hub_options)
    used = [k for k, v in hub_options.items() if v not in (None, False)]
    if used:
        raise ValueError(
            f"{', '.join(used)} is for handles of the form hf://org/name. "
            f"Received: {str(handle)!r}."
        )
    path = _find_folder(handle)
    # A built-in preset is its name, wherever the package lies.
    source = path.name if path.parent == builtin_folder() else str(path)
    return PresetFolder(path, source=source)


def _find_folder(handle):
    text = str(handle)
    if "://" in text:
        raise ValueError(
            f"Cannot load {text!r}: expected a built-in name, a folder, or "
            "hf://org/name."
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


def open_weights(folder):
    """Return the `Shards` of a preset.

    Args:
        folder: an open `PresetFolder`.

    Raises:
        ValueError: if it holds none, or broken ones.
    """
    if _has_weights(folder):
        return Shards(folder)
    if folder.path.parent == builtin_folder():
        shipped = [n for n, m in builtin_presets().items() if m["has_weights"]]
        raise ValueError(
            NO_WEIGHTS.format(
                name=folder.path.name,
                shipped=" or ".join(map(repr, shipped)),
            )
        )
    raise ValueError(
        f"Preset {folder.source!r} has neither {WEIGHTS_FILE} nor "
        f"{INDEX_FILE}. Pass load_weights=False for random weights."
    )


def _has_weights(folder):
    return folder.has(WEIGHTS_FILE) or folder.has(INDEX_FILE)
