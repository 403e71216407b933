"""Check or list what a preset folder holds, without building a model."""

import math
import pathlib

from keras_vit22b.layers.patch_embedding import patch_grid
from keras_vit22b.weights import preset_config
from keras_vit22b.weights import preset_files
from keras_vit22b.weights.preset_folder import OWN_NAMES
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.preset_folder import hash_file
from keras_vit22b.weights.preset_folder import listed
from keras_vit22b.weights.tensor_loading import is_float
from keras_vit22b.weights.tensor_loading import shape_faults
from keras_vit22b.weights.tensor_shapes import scale_shapes
from keras_vit22b.weights.tensor_shapes import tensor_shapes

# Formats that can run code, or read other files, when they are loaded.
FORBIDDEN = {
    ".bin", ".ckpt", ".h5", ".hdf5", ".joblib", ".keras", ".npy", ".npz",
    ".pkl", ".pickle", ".pt", ".pth",
}  # fmt: skip


def verify_folder(path):
    """Check a preset folder: JSON, tensors, index and every file's sha256.

    Each tensor that the config describes must be there, with its shape, and no
    other.

    Args:
        path: path of the folder.

    Returns:
        A dict with the numbers of `"tensors"`, `"files"` and `"bytes"`.

    Raises:
        ValueError: if anything is wrong; all faults are named.
    """
    with PresetFolder(pathlib.Path(path)) as folder:
        return _verify(folder)


def verify_preset(handle, **hub_options):
    """Check what a handle of `from_preset` names, as `verify_folder` does.

    Args:
        handle: string or path.
        **hub_options: of `open_preset`, for the Hub alone.
    """
    with preset_files.open_preset(handle, **hub_options) as folder:
        return _verify(folder)


def _verify(folder):
    faults, sizes = [], {}

    def attempt(check, *arguments):
        try:
            return check(*arguments)
        except ValueError as error:
            faults.append(str(error))

    backbone = attempt(preset_config.read_backbone, folder)
    # A folder without a config has said so.
    head = backbone and attempt(preset_config.read_head, folder)
    attempt(preset_config.read_converter, folder)
    attempt(preset_config.check_preprocessor, folder)
    attempt(preset_config.read_metadata, folder)
    shards = attempt(preset_files.open_weights, folder)
    if backbone and shards:
        faults += attempt(_shape_faults, backbone, head, shards) or []
    if shards:
        names = set(shards.files.values())
        faults += attempt(_wrong_hashes, folder, names, sizes) or []
        faults += [
            f"{file.name} is not among the files of weights"
            for file in sorted(folder.path.glob("*.safetensors"))
            if file.name not in names
        ]
    for file in sorted(folder.path.iterdir()):
        if file.suffix.lower() in FORBIDDEN:
            faults.append(f"{file.name} may run code when it is loaded")
        elif OWN_NAMES.fullmatch(file.name) or file.name == "README.md":
            # A link may lead out of the folder.
            attempt(lambda name: folder.open(name).close(), file.name)
    if faults:
        raise ValueError(
            f"{folder.source} is not a sound preset:"
            + listed(list(dict.fromkeys(faults)))
        )
    return {
        "tensors": len(shards.specs),
        "files": len(sizes),
        "bytes": sum(sizes.values()),
    }


def _shape_faults(backbone, head, shards):
    num_classes = head["num_classes"] if head else None
    shapes = tensor_shapes(**backbone, num_classes=num_classes)
    shapes |= scale_shapes(shapes, shards.specs)
    grid = patch_grid(backbone["image_shape"], backbone["patch_size"])
    faults = shape_faults(shards.specs, shapes, shards.grid_size(grid))
    return faults + [
        f"{name} is {spec.dtype}, expected floats"
        for name, spec in shards.specs.items()
        if not is_float(spec.dtype) and f"{name}_scale" not in shards.specs
    ]


def list_tensors(folder):
    """List a preset's tensors from the headers alone.

    Args:
        folder: an open `PresetFolder`.

    Returns:
        A list of dicts with `"name"`, `"dtype"`, `"shape"`, `"bytes"` and
        `"file"`, in the order of the files.
    """
    shards = preset_files.open_weights(folder)
    return [
        {
            "name": name,
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "bytes": math.prod(spec.shape) * spec.dtype.itemsize,
            "file": shards.files[name],
        }
        for name, spec in shards.specs.items()
    ]


def _wrong_hashes(folder, names, sizes):
    """Return faults; fill `sizes` with the bytes of each file."""
    faults = []
    expected = folder.read_json(preset_config.METADATA_FILE).get("sha256")
    if not isinstance(expected, dict):
        faults.append(f"{preset_config.METADATA_FILE} has no sha256 of files")
        expected = {}
    for name in sorted(names | expected.keys()):
        try:
            with folder.open(name) as file:
                found = hash_file(file)
                sizes[name] = file.tell()
        except FileNotFoundError:
            faults.append(f"{name} has a sha256, but does not exist")
            continue
        if name not in expected:
            faults.append(f"{name} has no sha256")
        elif found != expected[name]:
            faults.append(
                f"{name} has sha256 {found}, expected {expected[name]}"
            )
    return faults
