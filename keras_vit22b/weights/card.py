"""The card of a preset: what a reader on the Hub sees first."""

CARD = """\
---
library_name: keras_vit22b
pipeline_tag: image-feature-extraction
tags:
- keras
- vision-transformer
---

# {title}

A vision transformer of ViT-22B's kind (https://arxiv.org/abs/2302.05442), saved
by keras_vit22b {version}.

| | |
|---|---|
| parameters | {parameters:,}, {dtype} |
| blocks | {layers}, {block}, of width {width} |
| image | {image} pixels, in patches of {patch} |
| pooling | {pooling} |

{preprocessing}

```python
import keras_vit22b

backbone = keras_vit22b.from_preset("hf://org/name")  # or this folder's path
features = keras_vit22b.extract_features(backbone, "photos/")
```

## Training data

Not stated. Name data and licences here.

## Limits

Not stated. Say here what the features are not for.
"""


def make_card(title, config, metadata, converter):
    """Return a card's text, from what a preset's JSON says.

    Args:
        title: string.
        config: dict. The arguments of `ViT22BBackbone`.
        metadata: dict. What metadata.json says.
        converter: dict of the image converter's settings, or `None`.
    """
    if converter is None:
        preprocessing = "No preprocessing is stored with it."
    else:
        preprocessing = (
            "Images are resized to {image_size} pixels ({interpolation}, "
            "antialias {antialias}), then `pixels * {scale} + {offset}`."
        ).format(**converter)
    return CARD.format(
        title=title,
        version=metadata["keras_vit22b_version"],
        parameters=metadata["parameter_count"],
        dtype=metadata["dtype"],
        layers=config["num_layers"],
        block=config["block"],
        width=config["hidden_dim"],
        image=" x ".join(map(str, config["image_shape"])),
        patch=config["patch_size"],
        pooling=config["pooling"],
        preprocessing=preprocessing,
    )
