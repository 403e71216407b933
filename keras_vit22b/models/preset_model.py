"""What backbone and classifier share: presets and weights on disk."""

import math
import pathlib

import keras
import numpy as np

from keras_vit22b.models.abstract import abstract_build
from keras_vit22b.models.abstract import initialize_missing
from keras_vit22b.models.abstract import is_abstract
from keras_vit22b.models.abstract import set_value
from keras_vit22b.weights import preset_files
from keras_vit22b.weights.tensor_files import WEIGHTS_FILE
from keras_vit22b.weights.tensor_files import read_tensors
from keras_vit22b.weights.tensor_files import write_tensors
from keras_vit22b.weights.tensor_names import is_head


class PresetModel:
    """Mixin of models stored as a folder of JSON and safetensors.

    A subclass has:

    - `tensors()`: `{tensor name: variable}`;
    - `_from_folder(folder, compile, dtype, image_shape, ...)`: a classmethod
      that makes an instance from a preset's JSON;
    - `_preset_json()`: `{file name: JSON}` of the instance;
    - `_grid_size`: `(rows, columns)` of its position table.
    """

    @classmethod
    def from_preset(
        cls,
        handle,
        load_weights=True,
        *,
        abstract=False,
        dtype=None,
        image_shape=None,
        **kwargs,
    ):
        """Make a model from a preset.

        Args:
            handle: string or path. A built-in name (`keras_vit22b.presets()`
                lists them), or a folder that `save_to_preset` wrote.
            load_weights: bool. If `False`, weights are random. Defaults to
                `True`.
            abstract: bool. Build without allocating or loading weights, to
                look at a model of any size. Defaults to `False`.
            dtype: string or `keras.DTypePolicy`. Defaults to `None`: the
                global policy.
            image_shape: `(height, width, channels)` other than the preset's;
                positions are resized. Defaults to `None`.
            **kwargs: other arguments of the class, such as `num_classes`,
                which gives a classifier a new head.

        Returns:
            A trainable model. Its `image_converter`, or a classifier's
            `preprocessor`, is the preset's.

        Raises:
            ValueError: if the preset is unknown or broken, or has no weights
                although `load_weights` asks for them.
        """
        folder = preset_files.resolve_handle(handle)
        options = {"dtype": dtype, "image_shape": image_shape, **kwargs}
        if not (load_weights or abstract):
            return cls._from_folder(folder, compile=True, **options)
        weights = None if abstract else preset_files.weights_path(folder)
        with abstract_build():
            model = cls._from_folder(folder, compile=False, **options)
        if not abstract:
            new_head = kwargs.get("num_classes") is not None
            model._load_tensors(weights, new_head=new_head)
            initialize_missing(model)
            model._compile_default()
        return model

    def _compile_default(self):
        """Compile as the constructor does; an abstract build cannot."""

    def save_to_preset(self, preset_dir):
        """Save the model to a folder that `from_preset` reads.

        Files replace those of the same name, each whole or not at all.

        Args:
            preset_dir: path of the folder, made if needed.
        """
        folder = pathlib.Path(preset_dir)
        self.save_weights(folder / WEIGHTS_FILE)
        tensors = self.tensors()
        index = {
            "metadata": {
                "total_size": sum(num_bytes(v) for v in tensors.values())
            },
            "weight_map": {name: WEIGHTS_FILE for name in tensors},
        }
        preset_files.write_json(folder / preset_files.INDEX_FILE, index)
        files = self._preset_json()
        for name in preset_files.PREPROCESSING_FILES:
            if name not in files:
                # Another model's would be read as this one's.
                (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            preset_files.write_json(folder / name, content)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Save weights; a `.safetensors` file gets this package's names.

        Any other path goes to `keras.Model.save_weights`.
        """
        path = pathlib.Path(filepath)
        if path.suffix != ".safetensors":
            return super().save_weights(filepath, overwrite, **kwargs)
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists and overwrite is False.")
        tensors = self.tensors()
        if any(map(is_abstract, tensors.values())):
            raise ValueError(
                "The model was built abstractly and has no weights to save."
            )
        write_tensors(path, tensors, self._grid_size)

    def load_weights(self, filepath, **kwargs):
        """Load weights; `.safetensors` and a preset's index by tensor name.

        Any other path goes to `keras.Model.load_weights`.
        """
        path = pathlib.Path(filepath)
        if path.name == preset_files.INDEX_FILE:
            # Keras has an index of this name too, of H5 shards.
            beside = path.with_name(WEIGHTS_FILE)
            path = beside if beside.is_file() else path
        if path.suffix != ".safetensors":
            return super().load_weights(filepath, **kwargs)
        self._load_tensors(path)

    def _load_tensors(self, path, *, new_head=False):
        tensors = {
            name: variable
            for name, variable in self.tensors().items()
            if not (new_head and is_head(name))
        }
        for variable, value in read_tensors(path, tensors, self._grid_size):
            set_value(variable, value)


def preset_json(backbone, converter, *, head=None):
    """Return the JSON files of a preset.

    Args:
        backbone: a `ViT22BBackbone`; it may be abstract.
        converter: a `ViT22BImageConverter` or `None`.
        head: dict. A classifier's own settings. Defaults to `None`.

    Returns:
        A dict from file name to content.
    """
    import keras_hub

    from keras_vit22b import __version__

    config = preset_files.serialize(backbone)
    if head is not None:
        config[preset_files.HEAD] = head
    files = {}
    if converter is not None:
        files[preset_files.CONVERTER_FILE] = preset_files.serialize(converter)
        files[preset_files.PREPROCESSOR_FILE] = preset_files.serialize(
            converter.make_preprocessor()
        )
    files[preset_files.METADATA_FILE] = {
        "keras_version": keras.version(),
        "keras_hub_version": keras_hub.__version__,
        "keras_vit22b_version": __version__,
        "parameter_count": backbone.count_params(),
        "dtype": backbone.dtype_policy.variable_dtype,
        "tasks": ["ImageClassifier"],
    }
    # Last: a folder is a preset once it has a config.
    files[preset_files.CONFIG_FILE] = config
    return files


def num_bytes(variable):
    """Return the bytes of a variable's value."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return math.prod(variable.shape) * np.dtype(dtype).itemsize
