"""The whole forward pass in NumPy and float64, written from the equations.

It knows nothing of the package: it takes tensors by their name on disk.
References: ViT-22B, section 2, https://arxiv.org/abs/2302.05442; MAP,
https://arxiv.org/abs/2106.04560
"""

import math

import numpy as np


def forward(tensors, images, config):
    """Run a backbone.

    Args:
        tensors: dict from name on disk to array.
        images: array `(batch, height, width, channels)`.
        config: dict of the backbone's arguments, all of them.

    Returns:
        A dict of `"sequence_output"`, `"pooled_output"` and `"blocks"`, the
        tokens after each block.
    """
    tensors = {k: np.asarray(v, "float64") for k, v in tensors.items()}
    model = Reference(tensors, config)
    return model(np.asarray(images, "float64"))


def softmax(logits):
    """`exp(x) / sum exp(x)` over the last axis."""
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def entropy(weights):
    """`-sum p log p` over the last axis, in nats."""
    return -(weights * np.log(np.maximum(weights, 1e-300))).sum(-1)


def gelu(x, activation):
    """`x Phi(x)`, or its tanh approximation."""
    if activation == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


def rms_norm(x, scale, epsilon):
    """`x / sqrt(mean(x^2) + epsilon) * scale`."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def layer_norm(x, scale, bias, epsilon):
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias`."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + epsilon) * scale + bias


def attention(query, key, value):
    """`softmax(q k^T / sqrt(head_dim)) v`, head by head."""
    output = np.empty(query.shape[:3] + value.shape[3:])
    for head in range(query.shape[2]):
        q, k, v = (x[:, :, head] for x in (query, key, value))
        logits = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        output[:, :, head] = softmax(logits) @ v
    return output


class Reference:
    """Tensors and options of one model, and the equations over them."""

    def __init__(self, tensors, config):
        self.tensors = tensors
        self.config = config

    def __call__(self, images):
        tensors, config = self.tensors, self.config
        tokens = self.embed(images)
        if config["pre_norm"]:
            tokens = self.norm("pre_norm", tokens, config["norm"])
        block = getattr(self, f"{config['block']}_block")
        blocks = []
        for index in range(config["num_layers"]):
            tokens = block(f"blocks.{index}", tokens)
            blocks.append(tokens)
        if config["final_norm"] == "tokens":
            tokens = self.norm("final_norm", tokens, config["norm"])
        prefix = config["num_registers"] + (config["pooling"] == "cls")
        if config["pooling"] == "cls":
            pooled = tokens[:, 0]
        elif config["pooling"] == "mean":
            pooled = tokens[:, prefix:].mean(1)
        else:
            pooled = self.attention_pooling(tokens[:, prefix:])
        if config["final_norm"] == "pooled":
            pooled = self.norm("final_norm", pooled, config["norm"])
        assert not set(tensors) - self.used(), "a tensor was never used"
        return {
            "sequence_output": tokens,
            "pooled_output": pooled,
            "blocks": blocks,
        }

    def used(self):
        """Return the names of tensors read so far."""
        return self.__dict__.setdefault("_used", set())

    def get(self, name):
        self.used().add(name)
        return self.tensors[name]

    def embed(self, images):
        size = self.config["patch_size"]
        height, width = (size, size) if isinstance(size, int) else size
        rows = images.shape[1] // height
        columns = images.shape[2] // width
        patches = [
            images[
                :,
                row * height : (row + 1) * height,
                column * width : (column + 1) * width,
            ].reshape(len(images), -1)
            for row in range(rows)
            for column in range(columns)
        ]
        tokens = np.stack(patches, 1) @ self.get("patch_embedding.kernel")
        tokens = tokens + self.get("patch_embedding.bias")
        tokens = tokens + self.get("position_embedding")
        prefix = []
        if self.config["pooling"] == "cls":
            prefix.append(self.get("class_token") + self.get("class_position"))
        if self.config["num_registers"]:
            prefix.append(self.get("registers"))
        for p in reversed(prefix):
            p = np.broadcast_to(p, (len(images), *p.shape))
            tokens = np.concatenate([p, tokens], 1)
        return tokens

    def norm(self, name, x, kind):
        scale = self.get(f"{name}.scale")
        epsilon = self.config["epsilon"]
        if kind == "rms":
            return rms_norm(x, scale, epsilon)
        return layer_norm(x, scale, self.get(f"{name}.bias"), epsilon)

    def attend(self, name, query, key, value):
        """Normalize queries and keys, attend."""
        kind = self.config["qk_norm"]
        if kind is not None:
            query = self.norm(f"{name}.query_norm", query, kind)
            key = self.norm(f"{name}.key_norm", key, kind)
        return attention(query, key, value)

    def parallel_block(self, name, x):
        """`x + attention(norm(x)) + mlp(norm(x))`, branch by branch."""
        config = self.config
        head_dim = config["hidden_dim"] // config["num_heads"]
        y = self.norm(f"{name}.norm", x, config["norm"])
        into = self.get(f"{name}.in_projection.kernel")
        out = self.get(f"{name}.out_projection.kernel")
        mlp_bias = self.get(f"{name}.in_projection.mlp_bias")
        qkv_bias = np.zeros((config["num_heads"], 3 * head_dim))
        if config["use_qkv_bias"]:
            qkv_bias = self.get(f"{name}.in_projection.qkv_bias")
        branches = self.get(f"{name}.out_projection.bias")
        parts = [slice(i * head_dim, (i + 1) * head_dim) for i in range(3)]
        query, key, value = (
            np.stack(
                [
                    y @ into[:, head, part] + qkv_bias[head, part]
                    for head in range(config["num_heads"])
                ],
                2,
            )
            for part in parts
        )
        attended = self.attend(name, query, key, value)
        for head in range(config["num_heads"]):
            branches = branches + attended[:, :, head] @ out[head, :head_dim]
            hidden = y @ into[:, head, 3 * head_dim :] + mlp_bias[head]
            hidden = gelu(hidden, config["activation"])
            branches = branches + hidden @ out[head, head_dim:]
        return x + self.scaled(f"{name}.layer_scale", branches)

    def sequential_block(self, name, x):
        """`y = x + attention(norm(x))`, then `y + mlp(mlp_norm(y))`."""
        config = self.config
        y = self.norm(f"{name}.norm", x, config["norm"])
        qkv = self.heads(y, self.get(f"{name}.qkv_projection.kernel"))
        if config["use_qkv_bias"]:
            qkv = qkv + self.get(f"{name}.qkv_projection.bias")
        attended = self.attend(name, *np.split(qkv, 3, -1))
        branch = self.merge(f"{name}.attention_out", attended)
        x = x + self.scaled(f"{name}.attention_scale", branch)
        branch = self.mlp(
            name, self.norm(f"{name}.mlp_norm", x, config["norm"])
        )
        return x + self.scaled(f"{name}.mlp_scale", branch)

    def attention_pooling(self, tokens):
        """`p = attention(probe, tokens)`, then `p + mlp(norm(p))`."""
        probe = np.broadcast_to(
            self.get("pooling.probe"),
            (len(tokens), 1, self.config["hidden_dim"]),
        )
        query, key, value = (
            self.heads(x, self.get(f"pooling.{name}.kernel"))
            + self.get(f"pooling.{name}.bias")
            for x, name in (
                (probe, "query"),
                (tokens, "key"),
                (tokens, "value"),
            )
        )
        pooled = self.merge("pooling.out", attention(query, key, value))
        normed = self.norm("pooling.norm", pooled, self.config["norm"])
        return (pooled + self.mlp("pooling", normed))[:, 0]

    def heads(self, x, kernel):
        """`(b, t, d)` and `(d, heads, f)` to `(b, t, heads, f)`."""
        return np.stack(
            [x @ kernel[:, head] for head in range(kernel.shape[1])], 2
        )

    def merge(self, name, x):
        """`(b, t, heads, f)` to `(b, t, d)`: heads side by side, one matmul."""
        kernel = self.get(f"{name}.kernel")
        flat = x.reshape(*x.shape[:2], -1)
        return flat @ kernel.reshape(-1, kernel.shape[-1]) + self.get(
            f"{name}.bias"
        )

    def mlp(self, name, x):
        hidden = x @ self.get(f"{name}.mlp_in.kernel")
        hidden = hidden + self.get(f"{name}.mlp_in.bias")
        hidden = gelu(hidden, self.config["activation"])
        hidden = hidden @ self.get(f"{name}.mlp_out.kernel")
        return hidden + self.get(f"{name}.mlp_out.bias")

    def scaled(self, name, branch):
        if self.config["layer_scale"] is None:
            return branch
        return branch * self.get(name)
