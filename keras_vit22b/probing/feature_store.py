"""Features on disk: safetensors shards and a manifest of how they were made.

    features-00000.safetensors ...   rows of each set of features, and labels
    manifest.json                    written last, so that it says "complete"
    manifest.partial.json            until then

Each shard is written under another name first, so what is there is whole, and
an extraction that was killed goes on after the last shard.
"""

import json
import pathlib
import typing

import numpy as np

from keras_vit22b.weights.preset_folder import hash_file
from keras_vit22b.weights.preset_folder import listed
from keras_vit22b.weights.safetensors_file import SafetensorsFile

MANIFEST = "manifest.json"
PARTIAL = "manifest.partial.json"
FORMAT = 1
LABELS, INDEX = "labels", "index"
# What two stores must share for one probe to take both.
SHARED = ("model", "preprocessing", "features")


class FeatureStore:
    """Features of images on disk, read when they are asked for.

    Args:
        path: path of a folder that `extract_features(..., store=path)` wrote.

    Attributes:
        manifest: dict. How the features were made.
        features: dict from name to `StoredFeatures`, `(n, d)` or `(n, views,
            d)`.
        labels: int array `(n,)`, or `None`.
        index: int array `(n,)`. Which image of the source each row is.
        class_names: list of strings, empty where they are not known.

    Raises:
        ValueError: if there is no complete store, or a shard is missing, of
            another size, or not as the manifest says.

    Example:
    ```python
    store = keras_vit22b.probing.FeatureStore("features/train")
    probe = keras_vit22b.probing.RidgeProbe()
    fitted = probe.fit(store.features["pooled_output"], store.labels)
    ```
    """

    def __init__(self, path):
        self.path = pathlib.Path(path).expanduser()
        self.manifest = _read_manifest(self.path)
        self.class_names = self.manifest["class_names"]
        shards = [
            Shard.open(self.path / record["file"], record["rows"])
            for record in self.manifest["shards"]
        ]
        _check_shards(self.manifest, shards)
        self.features = {
            name: StoredFeatures(name, shards, self.manifest)
            for name in self.manifest["features"]
        }
        self.index = np.concatenate([shard.read(INDEX) for shard in shards])
        self.labels = None
        if all(LABELS in shard.specs for shard in shards):
            self.labels = np.concatenate([s.read(LABELS) for s in shards])

    def __len__(self):
        return len(self.index)

    def verify(self):
        """Compare every shard's sha256 with the manifest; reads all bytes.

        Raises:
            ValueError: if one differs; it names the shards that do.
        """
        wrong = []
        for record in self.manifest["shards"]:
            with (self.path / record["file"]).open("rb") as file:
                found = hash_file(file)
            if found != record["sha256"]:
                wrong.append(
                    f"{record['file']}: sha256 {found}, expected "
                    f"{record['sha256']}"
                )
        if wrong:
            raise ValueError(
                f"{self.path} has changed since it was written:{listed(wrong)}"
            )


class StoredFeatures:
    """One set of features of a store, as an array that is read in parts.

    Attributes:
        shape: `(n, d)`, or `(n, views, d)`.
        dtype: float32.
        origin: dict. What features must share to be used together.
    """

    dtype = np.dtype("float32")

    def __init__(self, name, shards, manifest):
        self.name = name
        self._shards = shards
        self._starts = np.cumsum([0] + [shard.rows for shard in shards])
        size = shards[0].specs[name].shape[-1]
        views = manifest["views"]["count"]
        count = int(self._starts[-1])
        self.shape = (count, size) if views == 1 else (count, views, size)
        self.origin = {key: manifest[key] for key in SHARED}
        self.origin["features"] = {name: manifest["features"][name]}

    def __len__(self):
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key):
        """Return rows, or of rows one view.

        Args:
            key: slice, or array of ints; or a pair of it and a view.
        """
        rows, *view = key if isinstance(key, tuple) else (key,)
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise IndexError(
                "Stored features take a slice or an array of ints, and a "
                f"view. Received: {key!r}."
            )
        rows = np.where(rows < 0, rows + len(self), rows)
        if len(rows) and not (0 <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"Row out of range of {len(self)}.")
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        order = np.argsort(rows, kind="stable")
        bounds = np.searchsorted(rows[order], self._starts)
        for shard, first, low, high in zip(
            self._shards, self._starts, bounds, bounds[1:]
        ):
            if high > low:
                places = order[low:high]
                found[places] = shard.read_rows(self.name, rows[places] - first)
        return found[:, view[0]] if view else found


class Shard(typing.NamedTuple):
    """One file: its path, its number of rows, and where tensors lie."""

    path: pathlib.Path
    rows: int
    specs: dict
    metadata: dict

    @classmethod
    def open(cls, path, rows=None):
        try:
            file = path.open("rb")
        except OSError as error:
            raise ValueError(f"Cannot open {path}: {error.strerror}.") from None
        with SafetensorsFile(file, str(path)) as opened:
            specs, metadata = opened.specs, opened.metadata
        if INDEX not in specs:
            raise ValueError(f"{path} is no shard of a feature store.")
        found = specs[INDEX].shape[0]
        if rows not in (None, found):
            raise ValueError(f"{path} has {found} rows, expected {rows}.")
        return cls(path, found, specs, metadata)

    def read(self, tensor):
        with SafetensorsFile(self.path.open("rb"), str(self.path)) as file:
            return file.read(tensor)

    def read_rows(self, tensor, rows):
        """Return some rows, ascending, without mapping the file.

        Pages of a map would count as memory of the process.
        """
        spec = self.specs[tensor]
        size = (spec.stop - spec.start) // self.rows
        found = np.empty((len(rows), *spec.shape[1:]), spec.dtype)
        view = memoryview(found).cast("B")
        # Rows that follow one another are read at once.
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        with self.path.open("rb", buffering=0) as file:
            for low, high in zip([0, *cuts], [*cuts, len(rows)]):
                file.seek(spec.start + int(rows[low]) * size)
                part = view[low * size : high * size]
                while part:
                    count = file.readinto(part)
                    if not count:
                        raise ValueError(
                            f"{self.path} ended while it was read."
                        )
                    part = part[count:]
        return found


def _read_manifest(path):
    try:
        text = (path / MANIFEST).read_text("utf-8")
    except FileNotFoundError:
        hint = (
            "its extraction has not ended; the same call goes on with it"
            if (path / PARTIAL).exists()
            else "extract_features(..., store=) writes one"
        )
        raise ValueError(
            f"{path} holds no complete feature store: {hint}."
        ) from None
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r}, not {FORMAT}")
        for key in (*SHARED, "views", "class_names"):
            manifest[key]
        if not manifest["shards"]:
            raise ValueError("it lists no shards")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path / MANIFEST} is no manifest of a feature store: {error!r}."
        ) from None
    return manifest


def _check_shards(manifest, shards):
    """Raise unless all shards hold the same features, one row an image."""
    views = manifest["views"]["count"]
    for shard in shards:
        for name in manifest["features"]:
            first, spec = (s.specs.get(name) for s in (shards[0], shard))
            if (
                spec is None
                or spec.dtype != "float32"
                or spec.shape[:-1] != ((shard.rows, views)[: 1 + (views > 1)])
                or spec.shape[-1] != first.shape[-1]
            ):
                raise ValueError(
                    f"{shard.path} has no float32 features {name!r} of "
                    f"{shard.rows} rows and {views} views: {spec}."
                )


def differences(ours, theirs, path=""):
    """Return where two manifests differ, as lines.

    Args:
        ours: a value of JSON.
        theirs: another.
        path: string. Where they are. Defaults to `""`.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            line
            for key in sorted(ours.keys() | theirs.keys())
            for line in differences(
                ours.get(key), theirs.get(key), f"{path}.{key}" if path else key
            )
        ]
    if ours == theirs:
        return []
    return [f"{path}: {ours!r} and {theirs!r}"]


def check_same_origin(ours, theirs):
    """Raise unless features were made alike.

    Args:
        ours: `StoredFeatures.origin`, or `None` for an array.
        theirs: that of others, to be used with them.

    Raises:
        ValueError: if both are known and differ. It says where.
    """
    if ours is None or theirs is None:
        return
    if lines := differences(ours, theirs):
        raise ValueError(
            f"These features were made differently:{listed(lines)}"
        )
