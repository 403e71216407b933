"""A feature store is written shard by shard, and goes on after a kill."""

import contextlib
import json
import pathlib

import numpy as np

from keras_vit22b.probing.feature_store import FORMAT
from keras_vit22b.probing.feature_store import INDEX
from keras_vit22b.probing.feature_store import LABELS
from keras_vit22b.probing.feature_store import MANIFEST
from keras_vit22b.probing.feature_store import PARTIAL
from keras_vit22b.probing.feature_store import Shard
from keras_vit22b.probing.feature_store import differences
from keras_vit22b.weights.preset_config import write_json
from keras_vit22b.weights.preset_folder import SUFFIX
from keras_vit22b.weights.preset_folder import hash_file
from keras_vit22b.weights.preset_folder import listed
from keras_vit22b.weights.preset_folder import only_writer
from keras_vit22b.weights.preset_folder import replacing_file
from keras_vit22b.weights.safetensors_file import write_safetensors


class StoreWriter:
    """Writes a store shard by shard, or goes on where one was.

    A context: within it, no other process can write to the folder.

    Args:
        path: path of a folder, made if need be.
        manifest: dict, without `"shards"`; `"features"` may be `None`, not
            known yet.

    Attributes:
        done: int. Images of the source that are done.
        complete: bool. Whether there is nothing left to write.

    Raises:
        ValueError: if the folder holds a store that was made differently, or
            files that are none of one.
    """

    def __init__(self, path, manifest):
        self.path = pathlib.Path(path).expanduser()
        # As it comes back from a file: tuples are lists there.
        self.manifest = json.loads(json.dumps({"format": FORMAT, **manifest}))
        self.done, self._shards = 0, []
        self._held = contextlib.ExitStack()

    def __enter__(self):
        known = self._known()
        if known is None and self.path.is_dir() and any(self.path.iterdir()):
            raise ValueError(
                f"{self.path} holds other files. Take a new folder."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(only_writer(self.path))
        if known is None:
            self._write(PARTIAL, self.manifest)
        else:
            self._check(known)
        # Of a process that was killed.
        for path in self.path.glob(f".*{SUFFIX}"):
            path.unlink()
        while (path := self._shard_path(len(self._shards))).exists():
            self._shards.append(Shard.open(path))
            self.done = int(self._shards[-1].metadata["stop"])
        return self

    def __exit__(self, *_):
        self._held.close()

    @property
    def complete(self):
        return (self.path / MANIFEST).exists()

    def _known(self):
        for name in (MANIFEST, PARTIAL):
            try:
                return json.loads((self.path / name).read_text("utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"Cannot read {self.path / name}: {error}."
                ) from None
        return None

    def _check(self, known):
        ours = dict(self.manifest)
        known = {k: v for k, v in known.items() if k in ours}
        if ours["features"] is None:
            ours.pop("features"), known.pop("features", None)
        if lines := differences(known, ours):
            raise ValueError(
                f"{self.path} holds features that were made differently; "
                f"there and here:{listed(lines)}\nTake another folder."
            )

    def _shard_path(self, number):
        return self.path / f"features-{number:05d}.safetensors"

    def _write(self, name, content):
        with replacing_file(self.path / name) as temporary:
            write_json(temporary, content)

    def add(self, batches):
        """Write the next shard.

        Args:
            batches: list of tuples: numbers of the images in the source,
                features by name, each a float32 array `(rows, d)` or `(rows,
                views, d)`, and labels, which may be `None`.

        Raises:
            ValueError: if some labels are no integers, or missing.
        """
        numbers, features, labels = zip(*batches)
        numbers = [n for batch in numbers for n in batch]
        tensors = {
            name: np.concatenate([batch[name] for batch in features])
            for name in features[0]
        }
        tensors[INDEX] = np.asarray(numbers, "int64")
        labels = _as_labels([x for batch in labels for x in batch])
        if labels is not None:
            tensors[LABELS] = labels
        path = self._shard_path(len(self._shards))
        with replacing_file(path) as temporary, temporary.open("wb") as file:
            write_safetensors(
                file,
                [
                    (name, array.dtype, array.shape, lambda array=array: array)
                    for name, array in tensors.items()
                ],
                {"stop": str(numbers[-1] + 1)},
            )
        self._shards.append(Shard.open(path))

    def finish(self):
        """Write the manifest.

        Raises:
            ValueError: if there is no shard.
        """
        if not self._shards:
            raise ValueError("There are no images to extract features from.")
        records = []
        for shard in self._shards:
            with shard.path.open("rb") as file:
                sha256 = hash_file(file)
            records.append(
                {"file": shard.path.name, "rows": shard.rows, "sha256": sha256}
            )
        manifest = {**self.manifest, "shards": records}
        if manifest["features"] is None:
            names = sorted(self._shards[0].specs.keys() - {LABELS, INDEX})
            manifest["features"] = {name: {} for name in names}
        self._write(MANIFEST, manifest)
        (self.path / PARTIAL).unlink(missing_ok=True)


def _as_labels(labels):
    """Return labels as int64, or `None` if there are none."""
    missing = sum(label is None for label in labels)
    if missing == len(labels):
        return None
    values = np.asarray(labels)
    if missing or values.dtype.kind not in "iub":
        raise ValueError(
            "A store keeps labels that are integers, of all images or none. "
            f"Received: {labels[0]} first, {missing} missing."
        )
    return values.astype("int64")
