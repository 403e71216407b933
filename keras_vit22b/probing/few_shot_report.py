"""The few-shot probe as a report: a JSON record and a picture."""

import dataclasses
import importlib.metadata
import pathlib

import keras
import numpy as np

from keras_vit22b import __version__
from keras_vit22b.models import ViT22BBackbone
from keras_vit22b.models.image_folder import ImageFolder
from keras_vit22b.probing.extractor import describe_converter
from keras_vit22b.probing.features import extract_features
from keras_vit22b.probing.few_shot import plot_few_shot
from keras_vit22b.weights.preset_config import write_json
from keras_vit22b.weights.preset_folder import replacing_file

PIXEL_SIZE = (32, 32)
PACKAGES = (
    "keras",
    "keras-hub",
    "numpy",
    "pillow",
    "scikit-learn",
)


def run_few_shot(
    preset,
    images,
    protocol,
    *,
    output=None,
    batch_size=64,
    skip_unreadable=False,
    progress=False,
):
    """Probe a preset's frozen features against raw pixels.

    Args:
        preset: string or path. As in `from_preset`.
        images: path of a folder, one sub-folder a class; `None` for
            scikit-learn's digits.
        protocol: a `FewShot`.
        output: path of a folder for `probe.json` and `probe.png`. Defaults to
            `None`: nothing is written.
        batch_size: int. Defaults to `64`.
        skip_unreadable: bool. Defaults to `False`.
        progress: bool. Whether to show a progress bar. Defaults to `False`.

    Returns:
        The record: a dict that is JSON.
    """
    data = _digits() if images is None else _folder(images)
    # What can fail does so before the features are extracted.
    protocol.check_counts(data["labels"], data["class_names"])
    if output is not None:
        output = pathlib.Path(output)
        output.mkdir(parents=True, exist_ok=True)
    backbone = ViT22BBackbone.from_preset(preset)
    features, labels = extract_features(
        backbone,
        data["source"],
        batch_size=batch_size,
        return_labels=True,
        skip_unreadable=skip_unreadable,
        progress=progress,
    )
    pixels = data["pixels"](backbone, skip_unreadable)
    accuracies = {
        "frozen features": protocol.evaluate(
            features, labels, data["class_names"]
        ),
        "raw pixels": protocol.evaluate(pixels, labels, data["class_names"]),
    }
    record = {
        "preset": backbone.source,
        "data": {
            "name": data["name"],
            "images": len(labels),
            "skipped": len(data["labels"]) - len(labels),
            "classes": len(np.unique(labels)),
            "pixels": pixels.shape[1],
        },
        "features": {"dimension": features.shape[1], "of": "pooled_output"},
        "preprocessing": describe_converter(backbone.image_converter),
        "protocol": dataclasses.asdict(protocol),
        "accuracy": {
            name: {str(k): _summary(v) for k, v in scores.items()}
            for name, scores in accuracies.items()
        },
        "backend": keras.backend.backend(),
        "dtype": backbone.dtype_policy.name,
        "packages": _versions(),
    }
    if output is not None:
        with replacing_file(output / "probe.png") as temporary:
            title = f"Linear probe on {data['name']}"
            plot_few_shot(accuracies, temporary, title=title)
        with replacing_file(output / "probe.json") as temporary:
            write_json(temporary, record)
    return record


def card_metrics(record):
    """Return a probe's accuracies as the `metrics` of a model's card.

    Args:
        record: dict. What `run_few_shot` returns, and probe.json holds.

    Returns:
        A list of dicts, one a number of labels.

    Raises:
        ValueError: if the record is none of a probe.
    """
    try:
        features, pixels = record["accuracy"].values()
        name = record["data"]["name"]
        return [
            {
                "task_type": "image-classification",
                "dataset_type": name,
                "dataset_name": name,
                "metric_type": "accuracy",
                "metric_name": (
                    f"linear probe, {shots}-shot "
                    f"(raw pixels: {pixels[shots]['mean']:.3f})"
                ),
                "metric_value": round(scores["mean"], 4),
            }
            for shots, scores in features.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "Expected the record of `keras-vit22b probe`, probe.json. "
            f"{type(error).__name__}: {error}."
        ) from None


def _digits():
    """scikit-learn's digits: 1,797 pictures of handwriting, 8 x 8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype("float32")
    return {
        "name": "scikit-learn's digits",
        "class_names": [str(n) for n in digits.target_names],
        "labels": digits.target,
        "source": iter([(images, digits.target)]),
        "pixels": lambda *_: digits.data,
    }


def _folder(path):
    folder = ImageFolder(path)
    if folder.labels is None:
        raise ValueError(
            f"{str(path)!r} has no sub-folders. A probe needs one a class."
        )
    return {
        "name": folder.path.name or str(folder.path),
        "class_names": folder.class_names,
        "labels": folder.labels,
        "source": folder,
        "pixels": lambda *options: _folder_pixels(folder, *options),
    }


def _folder_pixels(folder, backbone, skip_unreadable):
    """Return what the backbone sees, at `PIXEL_SIZE`, flat."""
    config = backbone.image_converter.get_config()
    converter = type(backbone.image_converter).from_config(
        {**config, "image_size": PIXEL_SIZE}
    )
    rows = []
    for index in range(len(folder)):
        try:
            image = folder[index]
        except ValueError:
            if skip_unreadable:
                continue
            raise
        converted = converter(image[None])
        rows.append(keras.ops.convert_to_numpy(converted).reshape(-1))
    return np.stack(rows)


def _summary(values):
    return {
        "mean": float(np.mean(values)),
        # Of the sample: its divisor is the number of seeds less one.
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
        "values": values,
    }


def _versions():
    versions = {"keras-vit22b": __version__}
    for package in (*PACKAGES, keras.backend.backend()):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions
