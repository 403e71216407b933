"""The ViT-22B backbone.

Reference: ViT-22B, https://arxiv.org/abs/2302.05442
"""

import keras
import keras_hub
from keras import ops

from keras_vit22b.distribution.sharding import check_distribution
from keras_vit22b.layers import AttentionPooling
from keras_vit22b.layers import ParallelBlock
from keras_vit22b.layers import PatchEmbedding
from keras_vit22b.layers import SequentialBlock
from keras_vit22b.layers import TokenPooling
from keras_vit22b.layers.normalization import make_norm
from keras_vit22b.layers.patch_embedding import patch_grid
from keras_vit22b.layers.transformer_block import check_rate
from keras_vit22b.models.padded_model import PaddedModel
from keras_vit22b.models.preset_model import PresetModel
from keras_vit22b.models.preset_model import preset_json
from keras_vit22b.weights import preset_config
from keras_vit22b.weights.tensor_names import backbone_tensors

BLOCKS = {"parallel": ParallelBlock, "sequential": SequentialBlock}
POOLINGS = ("map", "cls", "mean")


@keras.saving.register_keras_serializable(package="keras_vit22b")
class ViT22BBackbone(PresetModel, keras_hub.models.Backbone, PaddedModel):
    """A vision transformer with parallel blocks and query and key norms.

    The defaults are the paper's: RMS norms, no biases on queries, keys and
    values, no class token, attention pooling.

    Args:
        image_shape: `(height, width, channels)` in pixels, channels last.
        patch_size: int or `(height, width)` in pixels; must divide the image.
        num_layers: int. Blocks.
        num_heads: int. Must divide `hidden_dim` and `mlp_dim`.
        hidden_dim: int. Width `d` of a token.
        mlp_dim: int. Hidden units of an MLP.
        pooling: `"map"` (attention pooling), `"cls"` (adds a class token) or
            `"mean"`. Defaults to `"map"`.
        norm: `"rms"` (scale only) or `"layer"` (centred, with bias).
            Defaults to `"rms"`.
        qk_norm: `"rms"`, `"layer"` or `None`. Of queries and keys, per head.
            Defaults to `"rms"`.
        block: `"parallel"` or `"sequential"`. Defaults to `"parallel"`.
        activation: `"gelu_tanh"` or `"gelu"` (with erf). Defaults to
            `"gelu_tanh"`.
        use_qkv_bias: bool. Defaults to `False`.
        epsilon: float. Of every norm. Defaults to `1e-6`.
        num_registers: int. Extra learned tokens. Defaults to `0`.
        layer_scale: float. Start of a learned scale on each branch, or
            `None`. Defaults to `None`.
        pre_norm: bool. Whether to normalize before the first block. Defaults
            to `False`.
        final_norm: `"tokens"` or `"pooled"`: whether the last norm comes
            before or after pooling. Defaults to `"tokens"`.
        dropout_rate: float. Defaults to `0.0`.
        drop_path_rate: float. Of the last block; it grows linearly from zero.
            Defaults to `0.0`.
        remat: bool. Whether to recompute each block in the backward pass, to
            save memory. Defaults to `False`.
        dtype: string or `keras.DTypePolicy`. Defaults to `None`: the global
            policy.
        name: string. Defaults to `None`.
        trainable: bool. Defaults to `True`.

    Returns:
        A model from images `(batch, height, width, channels)`, as
        `ViT22BImageConverter` makes them, to a dict of

        - `"sequence_output"`: `(batch, tokens, hidden_dim)`;
        - `"pooled_output"`: `(batch, hidden_dim)`, the frozen feature.

    Raises:
        ValueError: if the image does not divide into patches, the widths do
            not divide by the heads, or an option is unknown.

    Example:
    ```python
    backbone = keras_vit22b.ViT22BBackbone(
        (28, 28, 1), 7, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=128
    )
    backbone(np.zeros((1, 28, 28, 1)))["pooled_output"].shape  # (1, 32)

    # A trained one.
    backbone = keras_vit22b.from_preset("vit1500k_patch7_28_fashion_glyphs")
    ```

    Reference: [Dehghani et al., 2023](https://arxiv.org/abs/2302.05442)
    """

    # The `ViT22BImageConverter` of the preset, if there is one.
    image_converter = None

    def __init__(
        self,
        image_shape,
        patch_size,
        *,
        num_layers,
        num_heads,
        hidden_dim,
        mlp_dim,
        pooling="map",
        norm="rms",
        qk_norm="rms",
        block="parallel",
        activation="gelu_tanh",
        use_qkv_bias=False,
        epsilon=1e-6,
        num_registers=0,
        layer_scale=None,
        pre_norm=False,
        final_norm="tokens",
        dropout_rate=0.0,
        drop_path_rate=0.0,
        remat=False,
        dtype=None,
        name=None,
        trainable=True,
    ):
        image_shape = tuple(image_shape)
        _check_choice("pooling", pooling, POOLINGS)
        _check_choice("block", block, tuple(BLOCKS))
        _check_choice("final_norm", final_norm, ("tokens", "pooled"))
        check_rate("drop_path_rate", drop_path_rate)
        if num_layers < 1:
            raise ValueError(
                f"num_layers must be at least 1. Received: {num_layers}."
            )
        # From zero at the first block to the full rate at the last.
        drop_path_rates = [
            drop_path_rate * (i / (num_layers - 1) if num_layers > 1 else 1)
            for i in range(num_layers)
        ]
        grid_size = patch_grid(image_shape, patch_size)
        shared = {
            "norm": norm,
            "activation": activation,
            "epsilon": epsilon,
            "dtype": dtype,
        }

        # === Layers ===
        self.patch_embedding = PatchEmbedding(
            hidden_dim,
            patch_size,
            grid_size=grid_size,
            class_token=pooling == "cls",
            num_registers=num_registers,
            dtype=dtype,
            name="patch_embedding",
        )
        norm_kwargs = {"epsilon": epsilon, "dtype": dtype}
        self.pre_norm_layer = (
            make_norm(norm, name="pre_norm", **norm_kwargs)
            if pre_norm
            else None
        )
        self.blocks = [
            BLOCKS[block](
                hidden_dim,
                num_heads,
                mlp_dim,
                qk_norm=qk_norm,
                use_qkv_bias=use_qkv_bias,
                layer_scale=layer_scale,
                dropout_rate=dropout_rate,
                drop_path_rate=drop_path_rates[i],
                remat=remat,
                name=f"block_{i}",
                **shared,
            )
            for i in range(num_layers)
        ]
        self.final_norm_layer = make_norm(
            norm, name="final_norm", **norm_kwargs
        )
        prefix = self.patch_embedding.num_prefix_tokens
        if pooling == "map":
            self.pooler = AttentionPooling(
                hidden_dim, num_heads, mlp_dim, name="pooling", **shared
            )
        else:
            self.pooler = TokenPooling(
                pooling, num_prefix_tokens=prefix, dtype=dtype, name="pooling"
            )

        # Before weights are made, since JAX's error would not name them. What
        # fits this kernel fits all: only heads and the width are split.
        head_dim, share = hidden_dim // num_heads, mlp_dim // num_heads
        path, features = {
            "parallel": ("block_0/in_projection/kernel", 3 * head_dim + share),
            "sequential": ("block_0/qkv_projection/kernel", 3 * head_dim),
        }[block]
        check_distribution(path, (hidden_dim, num_heads, features))

        # === Functional Model ===
        images = keras.Input(shape=image_shape, name="images")
        tokens = self.patch_embedding(images)
        if pre_norm:
            tokens = self.pre_norm_layer(tokens)
        block_outputs = []
        for layer in self.blocks:
            tokens = layer(tokens)
            block_outputs.append(tokens)
        if final_norm == "tokens":
            tokens = self.final_norm_layer(tokens)
        pooled = tokens
        if pooling == "map" and prefix:
            pooled = pooled[:, prefix:]
        pooled = self.pooler(pooled)
        if final_norm == "pooled":
            pooled = self.final_norm_layer(pooled)
        super().__init__(
            inputs=images,
            outputs={"sequence_output": tokens, "pooled_output": pooled},
            dtype=dtype,
            name=name,
            trainable=trainable,
        )

        # === Config ===
        self._block_outputs = block_outputs
        self.image_shape = image_shape
        self.patch_size = patch_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.mlp_dim = mlp_dim
        self.pooling = pooling
        self.norm = norm
        self.qk_norm = qk_norm
        self.block = block
        self.activation = activation
        self.use_qkv_bias = use_qkv_bias
        self.epsilon = epsilon
        self.num_registers = num_registers
        self.layer_scale = layer_scale
        self.pre_norm = pre_norm
        self.final_norm = final_norm
        self.dropout_rate = dropout_rate
        self.drop_path_rate = drop_path_rate
        self.remat = remat
        self._note_abstract()

    @classmethod
    def _from_folder(cls, folder, *, compile, dtype, image_shape, **kwargs):
        # Here, since preprocessing names this class.
        from keras_vit22b.models.preprocessing import ViT22BImageConverter

        del compile
        config = preset_config.read_backbone(folder)
        if image_shape is not None:
            config["image_shape"] = tuple(image_shape)
        backbone = cls(**{**config, "dtype": dtype, **kwargs})
        height, width, channels = backbone.image_shape
        fit = {"image_size": (height, width), "channels": channels}
        backbone.image_converter = ViT22BImageConverter._from_folder(
            folder, **(fit if image_shape is not None else {})
        )
        backbone.source = folder.source
        return backbone

    @property
    def num_prefix_tokens(self):
        """int. Tokens before the first patch: class token and registers."""
        return self.patch_embedding.num_prefix_tokens

    def __setattr__(self, name, value):
        if name == "image_converter":
            # Past Keras' tracking: preprocessing is not part of the model.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def source(self):
        """string. The preset the backbone is from, or `None`."""
        return self.__dict__.get("_source")

    @source.setter
    def source(self, source):
        self.__dict__["_source"] = source

    def block_model(self, blocks, *, normed):
        """Return a model that gives the tokens after chosen blocks.

        Args:
            blocks: list of int. Indices of blocks; negative ones count from
                the last.
            normed: bool. Whether to apply the backbone's last norm to the
                tokens. Libraries differ in this, and so do their numbers.

        Returns:
            A `keras.Model` from images to a dict from `"block_0"` and the
            like to tokens `(batch, tokens, hidden_dim)`. It shares the
            backbone's weights.

        Raises:
            ValueError: if an index is out of range.
        """
        outputs = {}
        for index in blocks:
            if not -self.num_layers <= index < self.num_layers:
                raise ValueError(
                    f"Block {index} does not exist; the backbone has blocks "
                    f"0 to {self.num_layers - 1}, or {-self.num_layers} to -1."
                )
            tokens = self._block_outputs[index]
            outputs[f"block_{index % self.num_layers}"] = (
                self.final_norm_layer(tokens) if normed else tokens
            )
        return keras.Model(self.input, outputs)

    def attention_model(self):
        """Return a model that gives statistics of every block's attention.

        Returns:
            A `keras.Model` from images to a dict from a field of
            `layers.AttentionStatistics` to a tensor `(num_layers, heads)`. It
            shares the backbone's weights, and costs a forward pass.
        """
        return _AttentionModel(self)

    def tensors(self):
        """Return `{tensor name: variable}`; the names are those on disk."""
        return backbone_tensors(self)

    @property
    def _grid_size(self):
        return self.patch_embedding.grid_size

    def _preset_json(self):
        return preset_json(self, self.image_converter)

    def get_config(self):
        config = super().get_config()
        config.update(
            {
                "image_shape": self.image_shape,
                "patch_size": self.patch_size,
                "num_layers": self.num_layers,
                "num_heads": self.num_heads,
                "hidden_dim": self.hidden_dim,
                "mlp_dim": self.mlp_dim,
                "pooling": self.pooling,
                "norm": self.norm,
                "qk_norm": self.qk_norm,
                "block": self.block,
                "activation": self.activation,
                "use_qkv_bias": self.use_qkv_bias,
                "epsilon": self.epsilon,
                "num_registers": self.num_registers,
                "layer_scale": self.layer_scale,
                "pre_norm": self.pre_norm,
                "final_norm": self.final_norm,
                "dropout_rate": self.dropout_rate,
                "drop_path_rate": self.drop_path_rate,
                "remat": self.remat,
            }
        )
        return config


class _AttentionModel(keras.Model):
    # Not functional: Keras 3.15 takes the outputs of a layer's second call to
    # be as many as those of its first.
    def __init__(self, backbone):
        super().__init__(name="attention_model")
        self.backbone = backbone
        self.built = True

    def call(self, images):
        backbone, found = self.backbone, []
        tokens = backbone.patch_embedding(images)
        if backbone.pre_norm:
            tokens = backbone.pre_norm_layer(tokens)
        for block in backbone.blocks:
            tokens, statistics = block(tokens, return_attention="statistics")
            found.append(statistics)
        return {
            name: ops.stack(values)
            for name, values in zip(found[0]._fields, zip(*found))
        }


def _check_choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(
            f"{name} must be {' or '.join(map(repr, allowed))}. "
            f"Received: {value!r}."
        )
