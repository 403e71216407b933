"""The two norms of the model, chosen by name."""

import keras

NORMS = ("rms", "layer")


def make_norm(kind, *, epsilon=1e-6, dtype=None, name=None):
    """Return a normalization layer over the last axis.

    Statistics are computed in float32 whatever the compute dtype.

    Args:
        kind: string. `"rms"` divides by the root mean square and scales, as
            ViT-22B's LayerNorm "without bias and centering" does. `"layer"`
            also subtracts the mean and adds a bias.
        epsilon: float. Added to the second moment. Defaults to `1e-6`.
        dtype: string or `keras.DTypePolicy`. Defaults to `None`.
        name: string. Defaults to `None`.

    Returns:
        A `keras.layers.RMSNormalization` or `keras.layers.LayerNormalization`.

    Raises:
        ValueError: if `kind` is unknown.
    """
    check_norm("norm", kind)
    if kind == "rms":
        return keras.layers.RMSNormalization(
            epsilon=epsilon, dtype=dtype, name=name
        )
    return keras.layers.LayerNormalization(
        epsilon=epsilon, dtype=dtype, name=name
    )


def check_norm(argument, kind, *, optional=False):
    """Raise if `kind` is not a norm; `optional` also allows `None`."""
    if kind in NORMS or (optional and kind is None):
        return
    allowed = "'rms', 'layer' or None" if optional else "'rms' or 'layer'"
    raise ValueError(f"{argument} must be {allowed}. Received: {kind!r}.")
