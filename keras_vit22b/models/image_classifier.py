"""Image classification on a ViT-22B backbone."""

import operator

import keras
import keras_hub
import numpy as np

from keras_vit22b.models.backbone import ViT22BBackbone
from keras_vit22b.models.padded_model import PaddedModel
from keras_vit22b.models.preprocessing import ViT22BImageClassifierPreprocessor
from keras_vit22b.models.preset_model import PresetModel
from keras_vit22b.models.preset_model import preset_json
from keras_vit22b.models.worker_model import WorkerModel
from keras_vit22b.weights import preset_config
from keras_vit22b.weights.tensor_names import classifier_tensors


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ViT22BImageClassifier(
    PresetModel, keras_hub.models.ImageClassifier, PaddedModel, WorkerModel
):
    """A linear head on the pooled output of a backbone.

    The head starts at zero, so training starts from equal scores.

    Args:
        backbone: a `ViT22BBackbone`.
        num_classes: int. At least 1.
        preprocessor: a `ViT22BImageClassifierPreprocessor`, which `fit`,
            `predict` and `evaluate` apply to raw images; `None` for images
            that are preprocessed already. Defaults to `None`.
        activation: string. Of the output: `None` or `"linear"` for logits,
            `"softmax"` or `"sigmoid"`. Defaults to `None`.
        dropout: float. On the pooled output. Defaults to `0.0`.
        class_names: list of strings, one a class, or `None`. Defaults to
            `None`.
        head_dtype: string or `keras.DTypePolicy`. Defaults to `"float32"`.
        compile: bool. Whether to compile with default arguments. Defaults to
            `True`.
        name: string. Defaults to `None`.

    Returns:
        A model from images to scores `(batch, num_classes)`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
    ```python
    classifier = keras_vit22b.ViT22BImageClassifier.from_preset(
        "vit1500k_patch7_28_fashion_glyphs", num_classes=10
    )
    classifier.fit(images, labels, batch_size=64)
    ```

    Reference: [Dehghani et al., 2023](https://arxiv.org/abs/2302.05442)
    """

    backbone_cls = ViT22BBackbone
    preprocessor_cls = ViT22BImageClassifierPreprocessor

    def __init__(
        self,
        backbone,
        num_classes,
        *,
        preprocessor=None,
        activation=None,
        dropout=0.0,
        class_names=None,
        head_dtype=None,
        compile=True,
        name=None,
    ):
        num_classes = operator.index(num_classes)
        if num_classes < 1:
            raise ValueError(
                f"num_classes must be at least 1. Received: {num_classes}."
            )
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(
                f"{len(class_names)} class_names for {num_classes} classes."
            )
        if activation not in (None, "linear", "sigmoid", "softmax"):
            raise ValueError(
                "activation must be None, 'linear', 'sigmoid' or 'softmax'. "
                f"Received: {activation!r}."
            )
        # Before the base class compiles, which asks for the activation.
        self.activation = activation
        head_dtype = head_dtype or "float32"

        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor
        self.output_dropout = keras.layers.Dropout(
            dropout, dtype=head_dtype, name="output_dropout"
        )
        self.head = keras.layers.Dense(
            num_classes,
            activation=activation,
            kernel_initializer="zeros",
            dtype=head_dtype,
            name="head",
        )

        # === Functional Model ===
        images = backbone.input
        pooled = backbone(images)["pooled_output"]
        outputs = self.head(self.output_dropout(pooled))
        # Past ImageClassifier, whose constructor pools feature maps.
        super(keras_hub.models.ImageClassifier, self).__init__(
            inputs=images, outputs=outputs, compile=compile, name=name
        )

        # === Config ===
        self.num_classes = num_classes
        self.dropout = dropout
        self.class_names = class_names
        self._note_abstract()

    def compile(
        self, optimizer="auto", loss="auto", *, metrics="auto", **kwargs
    ):
        """Compile for training, as `keras_hub.models.ImageClassifier` does.

        The metric of `"auto"`, sparse accuracy, suits only the loss of
        `"auto"`, sparse cross-entropy. With another loss `"auto"` means none.
        A head with `activation="sigmoid"` takes multi-hot labels: there
        `"auto"` means binary cross-entropy and accuracy.
        """
        if self.activation == "sigmoid" and loss == "auto":
            loss = keras.losses.BinaryCrossentropy()
            if metrics == "auto":
                metrics = [keras.metrics.BinaryAccuracy()]
        if metrics is None or (metrics == "auto" and loss != "auto"):
            metrics = []  # Keras keeps earlier metrics when given None.
        super().compile(optimizer, loss, metrics=metrics, **kwargs)

    # Without a preprocessor, keras-hub's pipeline would only keep Keras from
    # taking PyDatasets, torch loaders and generators, and from shuffling.

    def fit(self, x=None, y=None, **kwargs):
        """Train as `keras.Model.fit` does, on raw images.

        With a preprocessor, arrays are shuffled once, before the first epoch,
        unless `shuffle=False`; a `tf.data.Dataset` should shuffle itself.
        """
        if self.preprocessor is None:
            return PaddedModel.fit(self, x, y, **kwargs)
        # keras-hub's pipeline takes arrays in their order.
        shuffle = kwargs.pop("shuffle", True)
        if hasattr(x, "shape") and shuffle:
            kept = int(len(x) * (1 - (kwargs.get("validation_split") or 0)))
            order = np.arange(len(x))
            np.random.shuffle(order[:kept])
            x = np.asarray(x)[order]
            y = None if y is None else np.asarray(y)[order]
            if kwargs.get("sample_weight") is not None:
                weights = np.asarray(kwargs["sample_weight"])
                kwargs["sample_weight"] = weights[order]
        return super().fit(x, y, shuffle=False, **kwargs)

    def evaluate(self, *args, **kwargs):
        if self.preprocessor is None:
            return PaddedModel.evaluate(self, *args, **kwargs)
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        if self.preprocessor is None:
            return PaddedModel.predict(self, *args, **kwargs)
        return super().predict(*args, **kwargs)

    @classmethod
    def _from_folder(
        cls,
        folder,
        *,
        compile,
        dtype,
        image_shape,
        num_classes=None,
        **kwargs,
    ):
        head = preset_config.read_head(folder)
        if num_classes is not None:
            head = {"num_classes": num_classes}
        if head is None:
            raise ValueError(
                f"Preset {folder.path.name!r} has no classification head. Pass "
                "num_classes for a new one."
            )
        backbone = ViT22BBackbone._from_folder(
            folder, compile=False, dtype=dtype, image_shape=image_shape
        )
        if "preprocessor" not in kwargs and backbone.image_converter:
            kwargs["preprocessor"] = (
                backbone.image_converter.make_preprocessor()
            )
        return cls(backbone, compile=compile, **{**head, **kwargs})

    def _note_abstract(self):
        super()._note_abstract()
        self.backbone._note_abstract()

    def _note_half_loaded(self, value):
        super()._note_half_loaded(value)
        self.backbone._note_half_loaded(value)

    def _compile_default(self):
        self.compile()

    @property
    def _grid_size(self):
        return self.backbone.patch_embedding.grid_size

    def _preset_json(self):
        preprocessor = self.preprocessor
        converter = preprocessor.image_converter if preprocessor else None
        return preset_json(
            self.backbone,
            converter or self.backbone.image_converter,
            head={
                "num_classes": self.num_classes,
                "activation": self.activation,
                "dropout": self.dropout,
                "class_names": self.class_names,
            },
        )

    def tensors(self):
        """Return `{tensor name: variable}`; the names are those on disk."""
        return classifier_tensors(self)

    def get_config(self):
        # Past ImageClassifier, whose config names its kind of pooling.
        config = super(keras_hub.models.ImageClassifier, self).get_config()
        config.update(
            {
                "num_classes": self.num_classes,
                "activation": self.activation,
                "dropout": self.dropout,
                "class_names": self.class_names,
                "head_dtype": keras.dtype_policies.serialize(
                    self.head.dtype_policy
                ),
            }
        )
        return config
