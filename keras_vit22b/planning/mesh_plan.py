"""What each mesh costs a preset, from the sharding table and `costs`."""

import dataclasses
import math
import typing

from keras_vit22b.distribution.device_order import closes_over_links
from keras_vit22b.distribution.device_order import is_limited
from keras_vit22b.distribution.device_order import order_devices
from keras_vit22b.distribution.device_order import sums_in_ring
from keras_vit22b.distribution.sharding import AXIS_NAMES
from keras_vit22b.distribution.sharding import TABLE
from keras_vit22b.planning import costs
from keras_vit22b.planning.chips import HOST_BANDWIDTH
from keras_vit22b.planning.chips import Slice

SCHEDULES = ("nothing hidden", "XLA's own", "ours")


class Hidden(typing.NamedTuple):
    """The parts of transferred bytes that stand beside matmuls."""

    ring: float
    weight_gather: float
    gradient_reduction: float


def hidden_parts(schedule, chip, waiting=()):
    """Return what a schedule hides on a chip, a `Hidden`.

    "ours" is what `tools/compile_slices.py` found on 4 blocks of the 22B (jax
    0.10.2, libtpu 0.0.42.1). "XLA's own" is what `keras-vit22b compile` found
    with `--topology v4:8x8x16 --batch 128 --model 8 --images-per-chip 32
    --num-layers 2 --overlap xla`. Other chips are taken to be as v4.

    Args:
        schedule: one of `SCHEDULES`.
        chip: `Chip`.
        waiting: names of `Hidden` for which the slice has no transfers beside
            matmuls. Defaults to none.
    """
    if schedule == "nothing hidden":
        return Hidden(0.0, 0.0, 0.0)
    parts = MEASURED[schedule].get(chip.kind, MEASURED[schedule]["v4"])
    return parts._replace(**dict.fromkeys(waiting, 0.0))


MEASURED = {
    "XLA's own": {"v4": Hidden(0.0, 0.0, 0.0)},
    "ours": {
        "v4": Hidden(1.0, 1.0, 0.96),
        "v5e": Hidden(1.0, 1.0, 0.92),
        "v5p": Hidden(1.0, 1.0, 0.96),
    },
}


@dataclasses.dataclass
class MeshPlan:
    """What one mesh costs.

    Attributes:
        batch: int. Size of the axis "batch".
        model: int. Size of the axis "model".
        fsdp: bool. Whether "batch" splits weights too.
        arguments: float. Bytes a chip: weights, optimizer, images.
        temporaries: float. Bytes a chip: activations, gradients, buffers.
        fits: bool.
        matmul: float. Seconds a step.
        ring: float. Seconds of transfers along "model", if alone.
        weight_gather: float. Likewise, of weights along "batch".
        gradient_reduction: float. Likewise, of gradients.
        step: dict from one of `SCHEDULES` to seconds.
        mfu: dict from one of `SCHEDULES` to a fraction of the peak.
    """

    batch: int
    model: int
    fsdp: bool
    arguments: float
    temporaries: float
    fits: bool
    matmul: float
    ring: float
    weight_gather: float
    gradient_reduction: float
    step: dict
    mfu: dict

    @property
    def memory(self):
        """float. Bytes a chip."""
        return self.arguments + self.temporaries


def describe(preset, num_layers, num_classes):
    """Return the `costs.Model` of a preset, and its variables."""
    # Here, since it loads Keras.
    from keras_vit22b.models import ViT22BBackbone
    from keras_vit22b.models import ViT22BImageClassifier
    from keras_vit22b.models.abstract import abstract_build
    from keras_vit22b.models.size import describe_size

    options = {} if num_layers is None else {"num_layers": num_layers}
    backbone = ViT22BBackbone.from_preset(preset, abstract=True, **options)
    with abstract_build():
        classifier = ViT22BImageClassifier(backbone, num_classes, compile=False)
    size = describe_size(backbone)
    flops = size["flops_per_image"]
    model = costs.Model(
        width=backbone.hidden_dim,
        mlp_dim=backbone.mlp_dim,
        num_layers=backbone.num_layers,
        num_heads=backbone.num_heads,
        tokens=size["tokens"],
        parallel=backbone.block == "parallel",
        pixels=math.prod(backbone.image_shape),
        other_flops=flops["patch_embedding"]
        + flops["pooling"]
        + 2 * backbone.hidden_dim * num_classes,
    )
    return model, [(w.path, tuple(w.shape)) for w in classifier.weights]


def _axes(path, mesh, fsdp):
    """Return the mesh axes of a weight, from the sharding table."""
    sizes = dict(zip(AXIS_NAMES, mesh))
    row = next(row for row in TABLE if row.matches(path))
    return row.axes_on(sizes, fsdp=fsdp), sizes


def divides(variables, mesh, fsdp):
    for path, shape in variables:
        axes, sizes = _axes(path, mesh, fsdp)
        if any(n % sizes[a] for n, a in zip(shape, axes) if a):
            return False
    return True


def _weights(variables, mesh, fsdp):
    """Return a list of `costs.Weight`."""
    weights = []
    for path, shape in variables:
        axes, sizes = _axes(path, mesh, fsdp)
        weights.append(
            costs.Weight(
                size=math.prod(shape),
                bytes=4 if path.startswith("head/") else 2,
                model_parts=sizes["model"] if "model" in axes else 1,
                batch_parts=sizes["batch"] if "batch" in axes else 1,
            )
        )
    return weights


def rings(chip, shape, mesh):
    """Return how a mesh lies on a slice.

    Returns:
        Whether "model" is a ring of links, whether gradients go round one
        along "batch", and which names of `Hidden` the compiler cannot hide.
    """
    if chip.dimensions != 2:  # All others hide transfers over any links.
        return True, False, ()
    devices = order_devices(Slice(chip, shape).stand_ins(), *mesh)
    closes = mesh[1] == 1 or closes_over_links(devices, axis=1)
    sums = sums_in_ring(devices)
    waiting = [] if closes else ["ring"]
    if is_limited(devices) and not sums:
        waiting.append("gradient_reduction")
    return closes, sums, waiting


def plan_mesh(
    chip,
    shape,
    model,
    variables,
    *,
    mesh,
    fsdp,
    images,
    remat,
    optimizer_slots,
    efficiency,
):
    weights = _weights(variables, mesh, fsdp)
    ring_closes, sum_in_ring, waiting = rings(chip, shape, mesh)
    wraps = Slice(chip, shape).wraps if chip.dimensions else (False,)
    times = costs.step_times(
        model,
        weights,
        mesh=mesh,
        images=images,
        links=costs.link_bandwidths(
            chip,
            shape,
            wraps,
            mesh,
            ring_closes=ring_closes,
            sum_in_ring=sum_in_ring,
            host_bandwidth=HOST_BANDWIDTH,
        ),
        flops=efficiency * chip.peak_flops,
        remat=remat,
    )
    memory = costs.step_memory(
        model,
        weights,
        mesh=mesh,
        images=images,
        optimizer_slots=optimizer_slots,
        remat=remat,
    )
    step = {
        name: times.step(*hidden_parts(name, chip, waiting))
        for name in SCHEDULES
    }
    needed = 3 * model.flops * images
    peak = math.prod(mesh) * chip.peak_flops
    return MeshPlan(
        batch=mesh[0],
        model=mesh[1],
        fsdp=fsdp,
        arguments=memory.arguments,
        temporaries=memory.temporaries,
        fits=sum(memory) <= chip.hbm_bytes,
        matmul=times.matmul,
        ring=times.ring,
        weight_gather=times.weight_gather,
        gradient_reduction=times.gradient_reduction,
        step=step,
        mfu={name: needed / (peak * s) for name, s in step.items()},
    )
