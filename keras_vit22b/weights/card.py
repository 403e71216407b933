"""The card of a preset: what a reader on the Hub sees first.

What no file says of itself comes from the `card` of a save or a push: a dict
with any of

- `"license"`: an identifier of the Hub, such as `"apache-2.0"`;
- `"training_data"`, `"limits"`: Markdown;
- `"metrics"`: a list of dicts with the arguments of
  `huggingface_hub.EvalResult`: `"task_type"`, `"dataset_type"`,
  `"dataset_name"`, `"metric_type"`, `"metric_value"` and, if wanted,
  `"metric_name"`. `keras_vit22b.probing.card_metrics` makes them.

It is kept in metadata.json.
"""

import hashlib
import re

from keras_vit22b.layers.patch_embedding import as_pair
from keras_vit22b.weights import preset_config

NOT_STATED = "Not stated."
BODY = """
# {title}

A vision transformer of ViT-22B's kind (https://arxiv.org/abs/2302.05442), saved
by keras_vit22b {version}.

| | |
|---|---|
| parameters | {parameters:,}, {dtype} |
| blocks | {layers}, {block}, of width {width} |
| image | {height} x {columns} x {channels}, in patches of {patch} |
| pooling | {pooling} |
| head | {head} |

{preprocessing}

```python
import keras_vit22b
import numpy as np

backbone = keras_vit22b.from_preset("{handle}"){where}
images = np.zeros((2, {height}, {columns}, {channels}), "uint8")  # yours
features = keras_vit22b.extract_features(backbone, images{converter})
```

## Training data

{training_data}

## Limits

{limits}

## Metrics

{metrics}
"""
# By it a save knows its own text from what a human edited.
MARK = "<!-- Written by keras_vit22b. Once edited, saves keep it. {} -->\n"
MARKED = re.compile(MARK.format("([0-9a-f]{64})") + r"\Z")


def make_card(folder, card, *, title, handle):
    """Return the text of a preset's card.

    Args:
        folder: an open `PresetFolder`.
        card: dict, as above.
        title: string.
        handle: string. What the code sample loads.

    Raises:
        ValueError: if the preset's JSON is not valid.
    """
    config = preset_config.read_backbone(folder)
    head = preset_config.read_head(folder)
    converter = preset_config.read_converter(folder)
    metadata = preset_config.read_metadata(folder)
    height, columns, channels = config["image_shape"]
    body = BODY.format(
        title=title,
        version=metadata["keras_vit22b_version"],
        parameters=metadata["parameter_count"],
        dtype=metadata["dtype"],
        layers=config["num_layers"],
        block=config.get("block", "parallel"),
        width=config["hidden_dim"],
        height=height,
        columns=columns,
        channels=channels,
        patch=" x ".join(map(str, as_pair(config["patch_size"]))),
        pooling=config.get("pooling", "map"),
        head=f"{head['num_classes']:,} classes" if head else "none",
        preprocessing=_preprocessing(converter),
        handle=handle,
        where="  # in its folder" if handle == "." else "",
        converter="" if converter else ", image_converter=None",
        training_data=card.get("training_data", NOT_STATED),
        limits=card.get("limits", NOT_STATED),
        metrics=_table(card.get("metrics")),
    )
    text = f"---\n{_front_matter(title, card)}\n---\n{body}\n"
    return text + MARK.format(_digest(text))


def keeps_card(path, card):
    """Return whether a folder's card stays, since a human edited it.

    Args:
        path: `pathlib.Path` of the folder.
        card: dict, as above, or `None`.

    Raises:
        ValueError: if it stays, but `card` is to be stated.
    """
    file = path / preset_config.CARD_FILE
    if not file.is_file() or _is_generated(file.read_bytes()):
        return False
    if card:
        raise ValueError(
            f"{file} was edited and is kept, so it cannot state `card`. Edit "
            "it by hand, or remove it to have a new one written."
        )
    return True


def _is_generated(text):
    try:
        text = text.decode()
    except UnicodeDecodeError:
        return False
    mark = MARKED.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _front_matter(title, card):
    """Return the YAML that the Hub reads."""
    from huggingface_hub import EvalResult
    from huggingface_hub import ModelCardData

    metrics = [EvalResult(**metric) for metric in card.get("metrics", [])]
    return ModelCardData(
        library_name=preset_config.PACKAGE,
        license=card.get("license"),
        pipeline_tag="image-feature-extraction",
        tags=["keras", "vision-transformer"],
        model_name=title if metrics else None,
        eval_results=metrics or None,
    ).to_yaml()


def _preprocessing(converter):
    if converter is None:
        return "No preprocessing is stored with it."
    settings = ", ".join(
        f"`{name}={value}`"
        for name, value in converter.items()
        if name not in ("name", "trainable")
    )
    return f"Images have values of 0 to 255 and are preprocessed by {settings}."


def _table(metrics):
    if not metrics:
        return NOT_STATED
    rows = ["| data | metric | value |", "|---|---|---|"]
    for metric in metrics:
        name = metric.get("metric_name", metric["metric_type"])
        rows.append(
            f"| {metric['dataset_name']} | {name} | {metric['metric_value']} |"
        )
    return "\n".join(rows)
