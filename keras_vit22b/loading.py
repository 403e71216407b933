"""The two functions that most users need: `from_preset` and `presets`."""

from keras_vit22b.weights import preset_files


def from_preset(handle, load_weights=True, **kwargs):
    """Make a backbone from a preset; see `ViT22BBackbone.from_preset`.

    Example:
    ```python
    backbone = keras_vit22b.from_preset("vit1500k_patch7_28_fashion_glyphs")
    features = keras_vit22b.extract_features(backbone, images)
    ```
    """
    from keras_vit22b.models import ViT22BBackbone

    return ViT22BBackbone.from_preset(handle, load_weights, **kwargs)


def presets():
    """Return `{name: metadata}` of the built-in presets, largest first.

    Metadata holds `"parameter_count"`, `"dtype"` (of the weights, if they
    ship) and `"has_weights"`.
    """
    return preset_files.builtin_presets()
