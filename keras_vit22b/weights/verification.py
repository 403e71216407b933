"""Check or list what a preset folder holds, without building a model."""

import hashlib
import math
import pathlib

from keras_vit22b.weights import preset_config
from keras_vit22b.weights import preset_files
from keras_vit22b.weights.preset_folder import PresetFolder

CHUNK = 16 * 1024 * 1024
# Formats that can run code, or read other files, when they are loaded.
FORBIDDEN = {
    ".bin", ".ckpt", ".h5", ".hdf5", ".joblib", ".keras", ".npy", ".npz",
    ".pkl", ".pickle", ".pt", ".pth",
}  # fmt: skip


def verify_folder(path):
    """Check a preset folder: JSON, tensors, index and every file's sha256.

    Args:
        path: path of the folder.

    Returns:
        A dict with the numbers of `"tensors"`, `"files"` and `"bytes"`.

    Raises:
        ValueError: if anything is wrong; all faults are named.
    """
    faults, tensors, sizes = [], {}, {}
    with PresetFolder(pathlib.Path(path)) as folder:
        for check in (
            preset_config.read_backbone,
            preset_config.read_converter,
        ):
            try:
                check(folder)
            except ValueError as error:
                faults.append(str(error))
        try:
            shards = preset_files.open_weights(folder)
            preset_config.check_size(folder, shards)
            tensors = shards.specs
            faults += _wrong_hashes(folder, set(shards.files.values()), sizes)
        except ValueError as error:
            faults.append(str(error))
        faults += [
            f"{file.name} may run code when it is loaded"
            for file in sorted(folder.path.iterdir())
            if file.suffix.lower() in FORBIDDEN
        ]
    if faults:
        raise ValueError(
            f"{path} is not a sound preset:\n  " + "\n  ".join(faults)
        )
    return {
        "tensors": len(tensors),
        "files": len(sizes),
        "bytes": sum(sizes.values()),
    }


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
        digest, sizes[name] = hashlib.sha256(), 0
        try:
            with folder.open(name) as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    sizes[name] += len(chunk)
        except FileNotFoundError:
            faults.append(f"{name} has a sha256, but does not exist")
            continue
        if name not in expected:
            faults.append(f"{name} has no sha256")
        elif digest.hexdigest() != expected[name]:
            faults.append(
                f"{name} has sha256 {digest.hexdigest()}, expected "
                f"{expected[name]}"
            )
    return faults
