"""Attention whose queries and keys are normalized per head.

Reference: ViT-22B, section 2, https://arxiv.org/abs/2302.05442
"""

import typing

import keras
from keras import ops

from keras_vit22b.layers.normalization import check_norm
from keras_vit22b.layers.normalization import make_norm

# Queries whose logits `AttentionStatistics` hold at a time.
CHUNK = 64


class AttentionMaps(typing.NamedTuple):
    """What one attention layer did, per head, in float32.

    Attributes:
        weights: `(batch, heads, queries, keys)`. Each row sums to one.
        entropy: `(batch, heads, queries)`. Of each row, in nats.
        largest_logit: `(batch, heads)`. Before the softmax, after
            `1 / sqrt(head_dim)`.
    """

    weights: typing.Any
    entropy: typing.Any
    largest_logit: typing.Any


class AttentionStatistics(typing.NamedTuple):
    """What `AttentionMaps` hold in short, over images and queries, in float32.

    Attributes:
        mean_entropy: `(heads,)`. In nats.
        min_entropy: `(heads,)`. In nats.
        largest_logit: `(heads,)`. Before the softmax, after
            `1 / sqrt(head_dim)`.
        query_norm: `(heads,)`. Mean Euclidean norm, before the query norm.
        key_norm: `(heads,)`. Likewise.
    """

    mean_entropy: typing.Any
    min_entropy: typing.Any
    largest_logit: typing.Any
    query_norm: typing.Any
    key_norm: typing.Any


@keras.saving.register_keras_serializable(package="keras_vit22b")
class QKNormAttention(keras.layers.Layer):
    """Scaled dot-product attention over heads, with query and key norms.

    `softmax(norm(q) norm(k)^T / sqrt(head_dim)) v`. The norms act over
    `head_dim`, with one scale shared by all heads, so that scaling the
    projections of queries and keys changes nothing: a logit is bounded by
    `sqrt(head_dim) * max|scale_q * scale_k|`. Values are not normalized.
    Logits and softmax are float32.

    Args:
        qk_norm: `"rms"`, `"layer"` or `None`. Defaults to `"rms"`.
        epsilon: float. Of both norms. Defaults to `1e-6`.
        **kwargs: `keras.layers.Layer` arguments, such as `name` and `dtype`.

    Call arguments:
        query: tensor `(batch, queries, heads, head_dim)`.
        key: tensor `(batch, keys, heads, head_dim)`.
        value: tensor `(batch, keys, heads, head_dim)`.
        return_attention: bool or `"statistics"`. Whether to return
            `AttentionMaps` as well, which hold a `queries x keys` matrix per
            head in memory, or `AttentionStatistics`, which take one of
            `CHUNK x keys`. Without maps the backend's fused attention is
            used. Defaults to `False`.

    Returns:
        A tensor `(batch, queries, heads, head_dim)`, or a pair of it and
        `AttentionMaps` or `AttentionStatistics`.

    Raises:
        ValueError: if `qk_norm` is unknown.

    Example:
    ```python
    q = k = v = np.random.normal(size=(1, 16, 4, 32))
    layer = keras_vit22b.layers.QKNormAttention()
    output, maps = layer(q, k, v, return_attention=True)
    maps.entropy.shape  # (1, 4, 16)
    ```

    Reference: [Dehghani et al., 2023](https://arxiv.org/abs/2302.05442)
    """

    def __init__(self, qk_norm="rms", *, epsilon=1e-6, **kwargs):
        super().__init__(**kwargs)
        check_norm("qk_norm", qk_norm, optional=True)
        self.qk_norm = qk_norm
        self.epsilon = epsilon
        self.query_norm = self.key_norm = None
        if qk_norm is not None:
            norm = {"epsilon": epsilon, "dtype": self.dtype_policy}
            self.query_norm = make_norm(qk_norm, name="query_norm", **norm)
            self.key_norm = make_norm(qk_norm, name="key_norm", **norm)

    def build(self, query_shape, key_shape, value_shape):
        if self.qk_norm is not None:
            self.query_norm.build(query_shape)
            self.key_norm.build(key_shape)
        self.built = True

    def call(self, query, key, value, return_attention=False):
        if return_attention == "statistics":
            statistics = self._statistics(query, key)
            return self.call(query, key, value), statistics
        if self.qk_norm is not None:
            query = self.query_norm(query)
            key = self.key_norm(key)
        # Fused attention is not for every dtype: in half precision,
        # TensorFlow's rounds logits to the compute dtype, and JAX has none
        # for float16 on a CPU.
        fused = self.compute_dtype == "float32" or (
            self.compute_dtype == "bfloat16"
            and keras.config.backend() != "tensorflow"
        )
        if fused and not return_attention:
            return ops.dot_product_attention(query, key, value)
        logits = self._logits(query, key)
        weights = ops.softmax(logits, axis=-1)
        output = ops.einsum(
            "bhts,bshd->bthd", ops.cast(weights, value.dtype), value
        )
        if not return_attention:
            return output
        largest = ops.max(logits, axis=(-2, -1))
        return output, AttentionMaps(weights, _entropy(logits), largest)

    def _statistics(self, query, key):
        norms = [
            ops.mean(ops.norm(ops.cast(x, "float32"), axis=-1), axis=(0, 1))
            for x in (query, key)
        ]
        if self.qk_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)

        def of_chunk(chunk):
            logits = self._logits(chunk, key)
            entropy = _entropy(logits)
            return (
                ops.sum(entropy, axis=(0, 2)),
                ops.min(entropy, axis=(0, 2)),
                ops.max(logits, axis=(0, 2, 3)),
            )

        batch, queries, heads, head_dim = ops.shape(query)
        whole = queries // CHUNK
        parts = []
        if whole:
            chunks = ops.reshape(
                query[:, : whole * CHUNK],
                (batch, whole, CHUNK, heads, head_dim),
            )
            # One after the other, so that one is in memory.
            parts.append(ops.map(of_chunk, ops.swapaxes(chunks, 0, 1)))
        if queries % CHUNK:
            rest = of_chunk(query[:, whole * CHUNK :])
            parts.append([value[None] for value in rest])
        sums, least, largest = (
            ops.concatenate(values, axis=0) for values in zip(*parts)
        )
        return AttentionStatistics(
            ops.sum(sums, axis=0) / ops.cast(batch * queries, "float32"),
            ops.min(least, axis=0),
            ops.max(largest, axis=0),
            *norms,
        )

    def _logits(self, query, key):
        scale = query.shape[-1] ** -0.5
        return ops.einsum(
            "bthd,bshd->bhts",
            ops.cast(query, "float32") * scale,
            ops.cast(key, "float32"),
        )

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return (*query_shape[:-1], value_shape[-1])

    def compute_output_spec(self, query, key, value, return_attention=False):
        output = keras.KerasTensor(
            (*query.shape[:-1], value.shape[-1]), dtype=self.compute_dtype
        )
        if not return_attention:
            return output
        batch, queries, heads, _ = query.shape
        return output, attention_spec(
            return_attention, batch, heads, queries, key.shape[1]
        )

    def get_config(self):
        config = super().get_config()
        config.update({"qk_norm": self.qk_norm, "epsilon": self.epsilon})
        return config


def _entropy(logits):
    """Return the entropy of each row's softmax, in nats."""
    # H = log sum exp(s) - sum p s, with s shifted by its maximum.
    shifted = logits - ops.max(logits, axis=-1, keepdims=True)
    return ops.logsumexp(shifted, axis=-1) - ops.sum(
        ops.softmax(shifted, axis=-1) * shifted, axis=-1
    )


def attention_spec(return_attention, batch, heads, queries, keys):
    """Return what `return_attention` asks for, of symbolic tensors."""
    if return_attention == "statistics":
        return AttentionStatistics(
            *(
                keras.KerasTensor((heads,), dtype="float32")
                for _ in AttentionStatistics._fields
            )
        )
    return AttentionMaps(
        keras.KerasTensor((batch, heads, queries, keys), dtype="float32"),
        keras.KerasTensor((batch, heads, queries), dtype="float32"),
        keras.KerasTensor((batch, heads), dtype="float32"),
    )
