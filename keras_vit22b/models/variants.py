"""The one table of sizes.

References: ViT-22B, table 1, https://arxiv.org/abs/2302.05442; ViT-G,
https://arxiv.org/abs/2106.04560; ViT-e, https://arxiv.org/abs/2209.06794
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        name: string. Of the preset.
        hidden_dim: int. Width `d` of a token.
        num_layers: int. Blocks.
        mlp_dim: int. Hidden units of an MLP.
        num_heads: int. Of attention.
        patch_size: int. Pixels.
        image_shape: `(height, width, channels)` in pixels.
        description: string. Where the row is from.
        standard: bool. Whether blocks are those of the standard ViT:
            sequential, layer norms, biases everywhere and no query and key
            norms. Defaults to `False`.
    """

    name: str
    hidden_dim: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    patch_size: int
    image_shape: tuple
    description: str
    standard: bool = False

    def backbone_config(self):
        """Return the arguments of `ViT22BBackbone` as a dict."""
        config = {
            "image_shape": self.image_shape,
            "patch_size": self.patch_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "hidden_dim": self.hidden_dim,
            "mlp_dim": self.mlp_dim,
        }
        if self.standard:
            config.update(
                block="sequential",
                norm="layer",
                qk_norm=None,
                use_qkv_bias=True,
            )
        return config


_RGB_224 = (224, 224, 3)
_GRAY_28 = (28, 28, 1)

VARIANTS = {
    v.name: v
    for v in (
        Variant(
            "vit22b_patch14_224", 6144, 48, 24576, 48, 14, _RGB_224,
            "ViT-22B of the paper.",
        ),
        Variant(
            "vit_e_patch14_224", 1792, 56, 15360, 16, 14, _RGB_224,
            "ViT-e, the paper's standard ViT of 4 billion.", standard=True,
        ),
        Variant(
            "vit_g_patch14_224", 1664, 48, 8192, 16, 14, _RGB_224,
            "ViT-G, the paper's standard ViT of 2 billion.", standard=True,
        ),
        Variant(
            "vit8b_patch14_224", 4096, 40, 16384, 32, 14, _RGB_224,
            "Ours: the size at which the paper saw divergence.",
        ),
        Variant(
            "vit1b_patch14_224", 1792, 26, 7168, 14, 14, _RGB_224,
            "Ours: a proxy with ViT-22B's head width.",
        ),
        Variant(
            "vit90m_patch16_224", 768, 12, 3072, 12, 16, _RGB_224,
            "Ours: a proxy of ViT-B's size.",
        ),
        Variant(
            "vit23m_patch16_224", 384, 12, 1536, 6, 16, _RGB_224,
            "Ours: a proxy of ViT-S's size.",
        ),
        Variant(
            "vit6m_patch16_224", 192, 12, 768, 3, 16, _RGB_224,
            "Ours: a proxy of ViT-Ti's size.",
        ),
        Variant(
            "vit1500k_patch7_28", 160, 4, 640, 5, 7, _GRAY_28,
            "Ours: a proxy for small gray images.",
        ),
        Variant(
            "vit600k_patch7_28", 96, 4, 384, 3, 7, _GRAY_28,
            "Ours: a smaller proxy for small gray images.",
        ),
        Variant(
            "vit250k_patch7_28", 64, 4, 256, 2, 7, _GRAY_28,
            "Ours: the smallest proxy.",
        ),
    )
}  # fmt: skip
