"""What a training step costs a chip on a mesh: bytes, FLOPs and seconds.

Symbols: `d` width, `f` MLP width, `L` blocks, `S` tokens an image, `X` and `Y`
the mesh's "batch" and "model", `T = images / X * S` the tokens of a model
group, `C` peak FLOP/s, `eta` matmul efficiency, `W` bytes/s of a link one way.

FLOPs of a chip and block, forward: `F_in = 2 T d (3 d + f) / Y`,
`F_out = 2 T (d + f) d / Y`, `F_att = 4 T S d / Y`. Backward is twice that.
Recomputing a block repeats `F_in` and `F_att`; the compiler drops the last
matmul, which no gradient needs. A matmul takes `F / (eta C)` s.

Along "model", a gather or a scatter of the activations sends
`V = 2 T d (Y - 1) / Y` bytes a chip (bfloat16). Forward there is one in and
one out, backward two in (the input again, and its gradient) and one out, and
recomputing repeats the first. A ring of links takes `V / (2 W)` s where halves
go both ways and `V / W` one way, as those do backward that sum a kernel's
gradient; two chips have one link, `V / W`. Links that do not close into a ring
take twice that.

Weights that "batch" splits are gathered along it, again where a block is
recomputed, and their gradients exchanged and summed: each time
`2 P / Y (X - 1) / X` bytes for `P` weights. Gradients of the others are
all-reduced, twice that. A gather takes `bytes / (2 W D)` s over the `D`
dimensions of the torus that "model" leaves; what is exchanged goes
`D X^(1/D) / 4` links, so it takes as many times longer. Where a dimension does
not wrap, all takes twice that. Where `device_order.sums_in_ring` says so (v5e
and v6e), gradients go round a ring instead, one way and in float32:
`2 bytes / W` s.

A schedule hides a part `h` of each transfer: a matmul of `m` s beside a ring of
`r` s takes `max(m, h r) + (1 - h) r`. What weights and gradients hide is beside
all of a step's matmuls. MFU is the FLOPs that the model needs, `3` times those
forward, over `C` times the time.

A chip keeps its part of weights and optimizer, in float32, and the images of
its model group. With recomputing it keeps each block's input, `2 t d` bytes
for its own `t = T / Y` tokens, and one block at a time in full: what came out
of the first matmul and went into the second, the softmax in float32, twice
`2 t d`; and backward the gradient of the second matmul's input twice (one is
being filled), the activation's input and gradient, the softmax in bfloat16,
kernels gathered in bfloat16 and their gradients in float32, and six times
`2 t d`, a number fitted to the compiler's memory (docs/compile_slices.txt).
Without recomputing it keeps all blocks' forward part.

Source of the formulas: https://jax-ml.github.io/scaling-book/training.
"""

import dataclasses
import math
import typing


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight as the costs see it.

    Attributes:
        size: int. Numbers.
        bytes: int. A number's while it is transferred.
        model_parts: int. Into how many "model" splits it.
        batch_parts: int. Likewise, "batch".
    """

    size: int
    bytes: int
    model_parts: int
    batch_parts: int


@dataclasses.dataclass(frozen=True)
class Model:
    """A classifier as the costs see it.

    Attributes:
        width: int. `d`.
        mlp_dim: int. `f`.
        num_layers: int. `L`.
        num_heads: int.
        tokens: int. `S`, class token and registers included.
        parallel: bool. Whether blocks are parallel.
        pixels: int. Numbers in an image.
        other_flops: int. Forward FLOPs an image outside the blocks.
    """

    width: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    tokens: int
    parallel: bool
    pixels: int
    other_flops: int

    @property
    def flops(self):
        """int. Forward FLOPs an image."""
        d, f, s = self.width, self.mlp_dim, self.tokens
        block = 2 * s * (4 * d * d + 2 * d * f) + 4 * s * s * d
        return self.num_layers * block + self.other_flops


@dataclasses.dataclass(frozen=True)
class Links:
    """Bytes/s that a chip sends.

    Attributes:
        model: float. Along "model".
        batch: float. Along "batch".
        hops: float. Links that an exchange along "batch" goes, of those used.
    """

    model: float
    batch: float
    hops: float


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step, each as if alone.

    Attributes:
        windows: list of `(matmul, ring)`: matmuls that have a ring of their
            own, of all blocks.
        other: float. Matmuls that have none.
        weight_gather: float.
        gradient_reduction: float.
    """

    windows: list
    other: float
    weight_gather: float
    gradient_reduction: float

    @property
    def matmul(self):
        """float. All matmuls."""
        return self.other + sum(m for m, _ in self.windows)

    @property
    def ring(self):
        """float. All transfers along "model"."""
        return sum(r for _, r in self.windows)

    def step(self, ring, weight_gather, gradient_reduction):
        """Return a step's seconds, given the hidden part of each transfer."""
        blocks = self.other
        for matmul, transfer in self.windows:
            blocks += max(matmul, ring * transfer) + (1 - ring) * transfer
        hidden = (
            weight_gather * self.weight_gather
            + gradient_reduction * self.gradient_reduction
        )
        exposed = self.weight_gather + self.gradient_reduction - hidden
        return max(blocks, hidden) + exposed


def step_times(model, weights, *, mesh, images, links, flops, remat):
    """Return the `Times` of a step.

    Args:
        model: `Model`.
        weights: list of `Weight`.
        mesh: `(batch, model)`.
        images: int. A step, of all chips.
        links: `Links`.
        flops: float. `eta C`, a chip's FLOP/s in matmuls.
        remat: bool. Whether blocks are recomputed.
    """
    batch, parts = mesh
    d, f = model.width, model.mlp_dim
    tokens = images / batch * model.tokens
    layers = model.num_layers

    def seconds(inner, outer):
        return layers * 2 * tokens * inner * outer / parts / flops

    sent = layers * 2 * tokens * d * (parts - 1) / parts
    ring = sent / links.model if parts > 1 else 0.0
    one_way = ring if parts == 2 else 2 * ring
    if model.parallel:
        pairs = [(seconds(d, 3 * d + f), seconds(d + f, d))]
    else:
        pairs = [(seconds(d, 3 * d), seconds(d, d))]
        pairs += [(seconds(d, f), seconds(f, d))]
    windows = []
    for index, (into, out) in enumerate(pairs):
        windows += [(into, ring), (out, ring)]
        # Gradients of kernel and input apart going in, together going out.
        windows += [(into, one_way), (into, ring), (2 * out, one_way)]
        if remat:
            windows.append((into, ring))
            if index < len(pairs) - 1:  # What follows needs the result.
                windows.append((out, ring))
    attention = 2 * seconds(model.tokens, d)
    other = (4 if remat else 3) * attention
    other += 3 * model.other_flops * images / (batch * parts) / flops
    gathered = reduced = 0.0
    for weight in weights:
        sharers = batch * parts // weight.model_parts  # Of a gradient.
        size = weight.bytes * weight.size / weight.model_parts
        size *= (sharers - 1) / sharers
        if weight.batch_parts > 1:
            gathered += 2 * size if remat else size
            reduced += links.hops * size
        else:
            reduced += 2 * size
    return Times(
        windows=windows,
        other=other,
        weight_gather=gathered / links.batch,
        gradient_reduction=reduced / links.batch,
    )


def link_bandwidths(
    chip, shape, wraps, mesh, *, ring_closes, sum_in_ring, host_bandwidth
):
    """Return the `Links` of a mesh.

    Args:
        chip: `Chip`.
        shape: tuple of int. Chips along each dimension; of GPUs, their number.
        wraps: tuple of bool, one a dimension.
        mesh: `(batch, model)`.
        ring_closes: bool. Whether "model" is a ring of links.
        sum_in_ring: bool. Whether gradients go round a ring.
        host_bandwidth: float. Bytes/s of a chip between hosts of GPUs.
    """
    batch, parts = mesh
    if not chip.dimensions:
        inside = chip.link_bandwidth
        one_host = math.prod(shape) <= chip.chips_per_host
        return Links(
            model=inside if parts <= chip.chips_per_host else host_bandwidth,
            batch=inside if one_host else host_bandwidth,
            hops=1.0,
        )
    both = 2 * chip.link_bandwidth
    free = [
        both if wrap else chip.link_bandwidth
        for size, wrap in sorted(zip(shape, wraps))
        if size > 1
    ]
    if parts > 1 and len(free) > 1:
        # "model" takes a dimension, or is folded into a part of two.
        free = free[1:]
    along_batch = sum(free) or both
    if sum_in_ring:
        hops = 2 * along_batch / chip.link_bandwidth
    else:
        hops = max(1.0, len(free) * batch ** (1 / max(len(free), 1)) / 4)
    return Links(
        model=both if parts != 2 and ring_closes else chip.link_bandwidth,
        batch=along_batch,
        hops=hops,
    )


class Memory(typing.NamedTuple):
    """Bytes of a chip.

    Attributes:
        arguments: float. Weights, optimizer and images.
        temporaries: float. Activations, gradients and buffers.
    """

    arguments: float
    temporaries: float


def step_memory(model, weights, *, mesh, images, optimizer_slots, remat):
    """Return the `Memory` of a step.

    Args:
        model: `Model`.
        weights: list of `Weight`.
        mesh: `(batch, model)`.
        images: int. A step, of all chips.
        optimizer_slots: int. Numbers kept for each weight.
        remat: bool. Whether blocks are recomputed.
    """
    batch, parts = mesh
    local = [w.size / (w.model_parts * w.batch_parts) for w in weights]
    # Weights and slots in float32; images too, and whole along "model".
    arguments = 4 * (1 + optimizer_slots) * sum(local)
    arguments += 4 * images / batch * model.pixels
    tokens = images / (batch * parts) * model.tokens
    d, f = model.width, model.mlp_dim
    softmax = tokens * model.tokens * model.num_heads
    forward = 2 * tokens * ((3 * d + f) + (d + f) + 2 * d) + 4 * softmax
    backward = 2 * tokens * (2 * (d + f) + 2 * f + 6 * d) + 2 * softmax
    kernels = (2 + 4) * (4 * d * d + 2 * d * f) / parts
    kept = 2 * tokens * d if remat else forward
    return Memory(
        arguments, model.num_layers * kept + forward + backward + kernels
    )
