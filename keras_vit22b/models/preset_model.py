"""What backbone and classifier share: presets, weights on disk, layouts."""

import pathlib

import keras

from keras_vit22b.distribution import sharding
from keras_vit22b.models.abstract import abstract_build
from keras_vit22b.models.abstract import initialize_missing
from keras_vit22b.models.abstract import is_abstract
from keras_vit22b.models.abstract import set_value
from keras_vit22b.weights import preset_config
from keras_vit22b.weights import preset_files
from keras_vit22b.weights.card import make_card
from keras_vit22b.weights.preset_folder import PresetFolder
from keras_vit22b.weights.preset_folder import replacing_file
from keras_vit22b.weights.preset_folder import replacing_folder
from keras_vit22b.weights.shards import KERAS_INDEX_FILE
from keras_vit22b.weights.shards import Shards
from keras_vit22b.weights.shards import is_first_process
from keras_vit22b.weights.shards import num_processes
from keras_vit22b.weights.shards import write_one_file
from keras_vit22b.weights.shards import write_shards
from keras_vit22b.weights.tensor_loading import stored_tensors
from keras_vit22b.weights.tensor_names import is_head


class PresetModel:
    """Mixin of models stored as a folder of JSON and safetensors.

    A subclass has:

    - `tensors()`: `{tensor name: variable}`;
    - `_from_folder(folder, compile, dtype, image_shape, ...)`: a classmethod
      that makes an instance from the JSON in an open `PresetFolder`;
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
        revision=None,
        token=None,
        cache_dir=None,
        local_files_only=False,
        **kwargs,
    ):
        """Make a model from a preset.

        Args:
            handle: string or path. A built-in name (`keras_vit22b.presets()`
                lists them), a folder that `save_to_preset` wrote, or
                `hf://org/name[@revision]` for the Hugging Face Hub.
            load_weights: bool. If `False`, weights are random. Defaults to
                `True`.
            abstract: bool. Build without allocating or loading weights, to
                look at a model of any size. Defaults to `False`.
            dtype: string or `keras.DTypePolicy`. Defaults to `None`: the
                global policy.
            image_shape: `(height, width, channels)` other than the preset's;
                positions are resized. Defaults to `None`.
            revision: string. Branch, tag or commit on the Hub. Defaults to
                `None`: the main branch.
            token: string, or `False` for none. Defaults to `None`: the one
                that is logged in to the Hub.
            cache_dir: path. Of the Hub's files. Defaults to `None`: the Hub
                client's cache.
            local_files_only: bool. Whether to use that cache alone. Defaults
                to `False`.
            **kwargs: other arguments of the class, such as `num_classes`,
                which gives a classifier a new head.

        Returns:
            A trainable model. Its `image_converter`, or a classifier's
            `preprocessor`, is the preset's. Its backbone's `source` says where
            it is from; for the Hub, with the commit.

        Raises:
            ValueError: if the preset is unknown or broken, or has no weights
                although `load_weights` asks for them.
        """
        options = {"dtype": dtype, "image_shape": image_shape, **kwargs}
        random = not (load_weights or abstract)
        with preset_files.open_preset(
            handle,
            load_weights=load_weights and not abstract,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        ) as folder:
            if random:
                return cls._from_folder(folder, compile=True, **options)
            if not abstract:
                shards = preset_files.open_weights(folder)
                preset_config.check_size(folder, shards)
            with abstract_build():
                model = cls._from_folder(folder, compile=False, **options)
            if not abstract:
                new_head = kwargs.get("num_classes") is not None
                model._load_tensors(shards, new_head=new_head)
                initialize_missing(model)
                model._note_abstract()
                model._compile_default()
            return model

    def quantize(self, mode=None, config=None, **kwargs):
        """Quantize as `keras.Model.quantize` does."""
        if "int4" in (mode, getattr(config, "mode", None)):
            sharding.check_int4()
        super().quantize(mode, config, **kwargs)

    @staticmethod
    def get_layout_map(device_mesh, *, fsdp=False):
        """Return the layouts of all weights on a mesh of devices (JAX).

        "batch" splits images, "model" splits attention heads and MLP units.

        Args:
            device_mesh: a `keras.distribution.DeviceMesh` with the axes
                "batch" and "model". The number of heads must divide by
                "model".
            fsdp: bool. Whether "batch" splits kernels and their optimizer
                state as well, which saves memory and costs transfers. The
                width must then divide by "batch". Defaults to `False`.

        Returns:
            A `keras.distribution.LayoutMap`. More layouts can be added, for
            weights of a model around this one.

        Raises:
            ValueError: if the backend is not JAX, or the mesh has other axes.

        Example:
        ```python
        mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
        layouts = keras_vit22b.ViT22BBackbone.get_layout_map(mesh)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(
                layout_map=layouts, batch_dim_name="batch"
            )
        )
        model = keras_vit22b.ViT22BImageClassifier.from_preset(...)
        ```
        """
        return sharding.layout_map(device_mesh, fsdp=fsdp)

    def _compile_default(self):
        """Compile as the constructor does; an abstract build cannot."""

    def call(self, inputs, training=None, mask=None):
        if not isinstance(inputs, keras.KerasTensor):
            self.check_has_weights()
        return super().call(inputs, training=training, mask=mask)

    def check_has_weights(self):
        """Raise if the model was built abstractly and nothing was loaded."""
        if not self.__dict__.get("_is_abstract"):
            return
        self._note_abstract()
        if self.__dict__["_is_abstract"]:
            raise ValueError(
                f"{self.name} was built abstractly and has no weights. Load "
                "some with load_weights, or build it without abstract=True."
            )

    def _note_abstract(self):
        """Note whether weights have no values yet.

        Constructors do, since Keras takes values off the variables while it
        trains, so that a look at them would not tell.
        """
        self.__dict__["_is_abstract"] = any(map(is_abstract, self.weights))

    def save_to_preset(self, preset_dir, max_shard_size="5GB"):
        """Save the model to a folder that `from_preset` reads.

        The folder is replaced as a whole: if the save fails or is killed, it
        is what it was. Files that no save makes, such as notes, are kept.

        Args:
            preset_dir: path of the folder, made if needed.
            max_shard_size: int of bytes, or string such as `"5GB"` (decimal).
                Larger weights are split into several files. Defaults to
                `"5GB"`.

        If several processes hold the model, all must call this, with a folder
        that all see; each writes what it holds.
        """
        path = pathlib.Path(preset_dir).expanduser()
        tensors = self._tensors_to_save()
        files = self._preset_json()
        preset_config.check_json(files)
        with _replacing_folder(path) as folder:
            digests = write_shards(
                folder, tensors, self._grid_size, max_shard_size
            )
            if not is_first_process():
                return
            files[preset_config.METADATA_FILE]["sha256"] = digests
            for name, content in files.items():
                preset_config.write_json(folder / name, content)
            if not (path / preset_config.CARD_FILE).exists():
                (folder / preset_config.CARD_FILE).write_text(
                    _card(path.name, files), encoding="utf-8"
                )

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Save weights; a `.safetensors` file gets this package's names.

        Any other path goes to `keras.Model.save_weights`.
        """
        path = pathlib.Path(filepath)
        if path.suffix != ".safetensors":
            return super().save_weights(filepath, overwrite, **kwargs)
        _refuse(kwargs)
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists and overwrite is False.")
        tensors = self._tensors_to_save()
        with replacing_file(path) as temporary:
            write_one_file(temporary, tensors, self._grid_size)

    def load_weights(self, filepath, **kwargs):
        """Load weights; `.safetensors` and a preset's index by tensor name.

        Any other path goes to `keras.Model.load_weights`.
        """
        path = pathlib.Path(filepath)
        # Keras has an index of this name too, of H5 shards.
        is_index = path.name == KERAS_INDEX_FILE and any(
            path.parent.glob("*.safetensors")
        )
        if path.suffix != ".safetensors" and not is_index:
            return super().load_weights(filepath, **kwargs)
        _refuse(kwargs)
        with PresetFolder(path.parent) as folder:
            self._load_tensors(
                Shards(folder, only=None if is_index else path.name)
            )

    def _tensors_to_save(self):
        self.check_has_weights()
        return self.tensors()

    def _load_tensors(self, shards, *, new_head=False):
        variables = {
            name: variable
            for name, variable in self.tensors().items()
            if not (new_head and is_head(name))
        }
        for variable, stored in stored_tensors(
            shards, variables, self._grid_size
        ):
            set_value(variable, stored)
        self._note_abstract()


def _refuse(kwargs):
    if kwargs:
        raise ValueError(
            f"{', '.join(kwargs)} is not for safetensors. save_to_preset "
            "writes several files where they are too large for one."
        )


def _replacing_folder(path):
    """Replace a folder alone, or with the other processes of the model."""
    if num_processes() == 1:
        return replacing_folder(path)
    from keras_vit22b.weights.jax_arrays import replacing_folder_together

    return replacing_folder_together(path)


def _card(title, files):
    """Return the card of a preset with these JSON files."""
    converter = files.get(preset_config.CONVERTER_FILE)
    return make_card(
        title,
        files[preset_config.CONFIG_FILE]["config"],
        files[preset_config.METADATA_FILE],
        converter and converter["config"],
    )


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

    config = preset_config.serialize(backbone)
    if head is not None:
        config[preset_config.HEAD] = head
    files = {}
    if converter is not None:
        files[preset_config.CONVERTER_FILE] = preset_config.serialize(converter)
        files[preset_config.PREPROCESSOR_FILE] = preset_config.serialize(
            converter.make_preprocessor()
        )
    files[preset_config.METADATA_FILE] = {
        "keras_version": keras.version(),
        "keras_hub_version": keras_hub.__version__,
        "keras_vit22b_version": __version__,
        "parameter_count": backbone.count_params(),
        "dtype": backbone.dtype_policy.variable_dtype,
        "tasks": ["ImageClassifier"],
    }
    # Last: a folder is a preset once it has a config.
    files[preset_config.CONFIG_FILE] = config
    return files
