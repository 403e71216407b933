"""Write presets/ from the table of variants.

    python tools/write_presets.py

Each row of `keras_vit22b.models.VARIANTS` gets a folder of JSON and a card.
Rows have no weights; presets that ship weights come from tools/pretrain.py
and are left alone.
"""

import pathlib

from keras_vit22b.models import VARIANTS
from keras_vit22b.models import ViT22BBackbone
from keras_vit22b.models import ViT22BImageConverter
from keras_vit22b.models.abstract import abstract_build
from keras_vit22b.models.preset_model import preset_json
from keras_vit22b.models.size import describe_size
from keras_vit22b.weights.preset_config import CARD_FILE
from keras_vit22b.weights.preset_config import write_json

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "presets"

CARD = """\
---
library_name: keras_vit22b
license: apache-2.0
pipeline_tag: image-feature-extraction
---

# {name}

{description} No weights ship: those of ViT-22B were never released, and the
proxies are for training your own.

| parameters | of which block kernels | tokens | GFLOPs an image |
|---|---|---|---|
| {total:,} | {kernels:,} | {tokens:,} | {gflops:,.1f} |

Images are resized to {height} x {width} pixels, {color}, and scaled to -1..1.

```python
import keras_vit22b

backbone = keras_vit22b.from_preset("{name}", load_weights=False)
```
"""


def write_preset(variant):
    """Write the folder of one row."""
    height, width, channels = variant.image_shape
    with abstract_build():
        backbone = ViT22BBackbone(
            **variant.backbone_config(), name=variant.name
        )
    converter = ViT22BImageConverter(
        (height, width), channels=channels, name="image_converter"
    )
    folder = FOLDER / variant.name
    for name, content in preset_json(backbone, converter).items():
        write_json(folder / name, content)
    size = describe_size(backbone)
    (folder / CARD_FILE).write_text(
        CARD.format(
            name=variant.name,
            description=variant.description,
            total=size["parameters"]["total"],
            kernels=size["parameters"]["block_kernels"],
            tokens=size["tokens"],
            gflops=size["flops_per_image"]["total"] / 1e9,
            height=height,
            width=width,
            color={1: "gray", 3: "RGB"}[channels],
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    for row in VARIANTS.values():
        write_preset(row)
        print(row.name)
