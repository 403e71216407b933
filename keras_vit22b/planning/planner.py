"""Choose a mesh: memory, times and MFU of every one that works.

A plan is arithmetic. `compile_for` asks the compiler.
"""

import dataclasses
import json
import math

from keras_vit22b.planning.chips import chip as find_chip
from keras_vit22b.planning.mesh_plan import SCHEDULES
from keras_vit22b.planning.mesh_plan import MeshPlan
from keras_vit22b.planning.mesh_plan import describe
from keras_vit22b.planning.mesh_plan import divides
from keras_vit22b.planning.mesh_plan import plan_mesh

EFFICIENCIES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
PAPER = {
    "preset": "vit22b_patch14_224",
    "kind": "v4",
    "chips": 1024,
    "images": 65536,
    "mfu": 0.549,
}
IGNORED = (
    "transfers of pooling and head, some of which are longer than the matmul "
    "beside them",
    "norms, activations, softmax, biases and the optimizer's arithmetic, but "
    "for what matmul_efficiency stands for",
    "the latency of a hop, and transfers that slow each other or the memory",
    "reading images, and preprocessing",
    "failures, checkpoints and evaluation",
    "slices joined by a network; GPUs beyond a host share its network evenly",
)


@dataclasses.dataclass
class Plan:
    """All meshes for a preset on a number of chips.

    Attributes:
        settings: dict. The arguments of `plan`.
        meshes: list of `MeshPlan`, the recommended one first.
        recommended: `MeshPlan`, or `None` if none fits.
        reason: string.
        by_efficiency: dict from matmul efficiency to the MFU of the
            recommended mesh, a dict as `MeshPlan.mfu`.
        ignored: tuple of strings. What the times leave out.
    """

    settings: dict
    meshes: list
    recommended: MeshPlan | None
    reason: str
    by_efficiency: dict
    ignored: tuple = IGNORED

    @property
    def is_papers(self):
        """bool. Whether preset, chips and images are those of the paper."""
        return all(
            self.settings[key] == value
            for key, value in PAPER.items()
            if key != "mfu"
        )

    def to_json(self):
        """Return the plan as a JSON string."""
        plan = dataclasses.asdict(self)
        if self.is_papers:
            plan["paper_mfu"] = PAPER["mfu"]
        return json.dumps(plan, indent=2)

    def __str__(self):
        s = self.settings
        lines = [
            f"{s['preset']} on {s['chips']:,} {s['kind']}, {s['images']:,} "
            f"images a step, matmul efficiency {s['matmul_efficiency']}",
            f"{'batch':>6}{'model':>6}{'fsdp':>6}{'GB a chip':>11}{'fits':>6}"
            f"{'matmul':>9}{'ring':>8}{'gather':>8}{'reduce':>8}  MFU: "
            + ", ".join(SCHEDULES),
        ]
        for mesh in self.meshes:
            times = (
                mesh.matmul,
                mesh.ring,
                mesh.weight_gather,
                mesh.gradient_reduction,
            )
            lines.append(
                f"{mesh.batch:>6}{mesh.model:>6}{_yes(mesh.fsdp):>6}"
                f"{mesh.memory / 1e9:>11.1f}{_yes(mesh.fits):>6}"
                f"{times[0]:>8.2f}s"
                + "".join(f"{t:>7.2f}s" for t in times[1:])
                + "  "
                + " ".join(f"{100 * mesh.mfu[n]:>5.1f} %" for n in SCHEDULES)
            )
        lines.append(self.reason)
        if self.recommended:
            lines.append("MFU by matmul efficiency, " + ", ".join(SCHEDULES))
            for efficiency, mfu in self.by_efficiency.items():
                lines.append(
                    f"  {efficiency:.2f}  "
                    + " ".join(f"{100 * mfu[n]:>5.1f} %" for n in SCHEDULES)
                )
        lines.append(
            '"XLA\'s own" is with the default flags of libtpu, of which '
            "compile_for found that they hide none of these transfers."
        )
        if self.is_papers and self.recommended:
            ours = 100 * self.recommended.mfu["ours"]
            lines.append(
                f"The paper reports 54.9 %; predicted are {ours:.1f} %, with "
                "nothing fitted to it. The paper's mesh, its efficiency of "
                "matmuls and what it recomputes are not published; and what is "
                "left out below is a third of a step by the TPU compiler's own "
                "estimate (docs/compile_22b.txt)."
            )
        lines += ["Left out:", *(f"  {item}" for item in self.ignored)]
        return "\n".join(lines)


def _yes(value):
    return "yes" if value else "no"


def plan(
    preset,
    *,
    kind,
    chips,
    images,
    shape=None,
    num_layers=None,
    num_classes=1000,
    optimizer_slots=2,
    remat=True,
    matmul_efficiency=0.75,
):
    """Plan a mesh for training a classifier: see `costs` for the formulas.

    Args:
        preset: string. Name or folder of a preset.
        kind: string. Of chip: `"v4"`, `"v5e"`, `"v5p"`, `"v6e"`, `"h100"` or
            `"h200"`.
        chips: int.
        images: int. A step, of all chips.
        shape: tuple of int. The slice; TPUs only. Defaults to `None`: the
            most compact.
        num_layers: int. Blocks, other than the preset's. Defaults to `None`.
        num_classes: int. Of the head. Defaults to `1000`.
        optimizer_slots: int. Numbers the optimizer keeps for each weight.
            Defaults to `2`, AdamW's.
        remat: bool. Whether blocks are recomputed. Defaults to `True`.
        matmul_efficiency: float. Part of the peak that matmuls reach, all that
            slows them included. A guess, and the only one. Defaults to
            `0.75`.

    Returns:
        A `Plan`.

    Raises:
        ValueError: if the chip or the shape is unknown, or no mesh divides
            heads and images.

    Example:
    ```python
    print(keras_vit22b.distribution.plan(
        "vit22b_patch14_224", kind="v4", chips=1024, images=65536
    ))
    ```
    """
    settings = locals()
    chip = find_chip(kind)
    settings["kind"] = chip.kind
    if not (
        isinstance(matmul_efficiency, (int, float))
        and 0 < matmul_efficiency <= 1
    ):
        raise ValueError(
            "matmul_efficiency must be above 0 and at most 1. Received: "
            f"{matmul_efficiency!r}."
        )
    for name, number, least in (
        ("chips", chips, 1),
        ("images", images, 1),
        ("optimizer_slots", optimizer_slots, 0),
    ):
        if not isinstance(number, int) or number < least:
            raise ValueError(
                f"{name} must be an integer of at least {least}. Received: "
                f"{number!r}."
            )
    if shape is None:
        shape = _compact_shape(chips, chip)
    else:
        _check_shape(shape, chips, chip)
    settings["shape"] = tuple(shape)
    model, variables = describe(preset, num_layers, num_classes)
    if images % chips:
        below = images // chips * chips
        near = [n for n in (below, below + chips) if n]
        raise ValueError(
            f"{images} images do not divide over {chips} chips; the nearest "
            f"that do are {' and '.join(map(str, near))}."
        )
    found = {}
    for efficiency in sorted({matmul_efficiency, *EFFICIENCIES}):
        found[efficiency] = [
            plan_mesh(
                chip,
                tuple(shape),
                model,
                variables,
                mesh=mesh,
                fsdp=fsdp,
                images=images,
                remat=remat,
                optimizer_slots=optimizer_slots,
                efficiency=efficiency,
            )
            for mesh in _meshes(chips, model)
            for fsdp in (False, True)
            if divides(variables, mesh, fsdp)
        ]
    meshes = found[matmul_efficiency]
    if not meshes:
        raise ValueError(
            f"No mesh of {chips} chips divides {preset}: 'model' must divide "
            f"{model.num_heads} heads."
        )
    order = sorted(range(len(meshes)), key=lambda i: _rank(meshes[i]))
    best = order[0] if meshes[order[0]].fits else None
    return Plan(
        settings=settings,
        meshes=[meshes[i] for i in order],
        recommended=None if best is None else meshes[best],
        reason=_reason(meshes, best, chip),
        by_efficiency={}
        if best is None
        else {e: found[e][best].mfu for e in EFFICIENCIES},
    )


def _rank(mesh):
    """Meshes that fit first, then the fastest; of equal ones the smallest.

    Times count to three digits, since they are no more exact.
    """
    seconds = float(f"{mesh.step['ours']:.2e}") if mesh.fits else 0.0
    return not mesh.fits, seconds, mesh.memory


def _reason(meshes, best, chip):
    fitting = [mesh for mesh in meshes if mesh.fits]
    available = f"{chip.hbm_bytes / 1e9:.0f} GB"
    if best is None:
        least = min(mesh.memory for mesh in meshes)
        return (
            f"No mesh fits: the smallest needs {least / 1e9:.1f} GB of the "
            f"{available} of a chip. Take more chips or fewer images."
        )
    mesh = meshes[best]
    return (
        f"Recommended: batch {mesh.batch} x model {mesh.model}, fsdp "
        f"{_yes(mesh.fsdp)}: of the {len(fitting)} meshes of {len(meshes)} "
        f"that fit in {available} none is faster, to three digits, than its "
        f"{mesh.step['ours']:.2f} s a step; of those as fast it takes the "
        f"least memory. Matmuls alone take {mesh.matmul:.2f} s."
    )


def _meshes(chips, model):
    """Yield meshes `(batch, model)` that divide heads and MLP."""
    for parts in range(1, chips + 1):
        if chips % parts == 0 and model.num_heads % parts == 0:
            yield chips // parts, parts


def _compact_shape(chips, chip):
    """Return the most compact slice of a number of chips."""
    if not chip.dimensions:
        return (chips,)
    shapes = _shapes(chips, chip)
    if not shapes:
        below = (n for n in reversed(range(chips)) if _shapes(n, chip))
        above = (n for n in range(chips, chips + 128) if _shapes(n, chip))
        near = [n for n in (next(below), next(above, None)) if n]
        raise ValueError(
            f"No slice of {chip.kind} has {chips} chips; the nearest that "
            f"there are have {' and '.join(map(str, near))}."
        )
    # Whole cubes first, since their links close rings.
    return min(shapes, key=lambda s: (any(n % 4 for n in s), sum(s)))


def _shapes(chips, chip):
    """Return the shapes of slices with a number of chips."""
    sides = (1, 2, 4, 8, 16) if chip.dimensions == 2 else (1, 2, 4)
    return [
        shape
        for shape in _factorizations(chips, chip.dimensions)
        if all(n in sides for n in shape)
        or (chip.dimensions == 3 and all(n % 4 == 0 for n in shape))
    ]


def _check_shape(shape, chips, chip):
    if not chip.dimensions:
        raise ValueError(
            f"{chip.kind} is a GPU and has no shape. Received: {shape!r}."
        )
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) != chip.dimensions
        or not all(isinstance(n, int) and n > 0 for n in shape)
        or math.prod(shape) != chips
    ):
        raise ValueError(
            f"The shape of {chips} chips of {chip.kind} must be "
            f"{chip.dimensions} positive integers whose product is {chips}, "
            f"such as {_compact_shape(chips, chip)}. Received: {shape!r}."
        )


def _factorizations(number, parts):
    if parts == 1:
        return [(number,)]
    return [
        (first, *rest)
        # The first is the least of them.
        for first in range(1, round(number ** (1 / parts)) + 1)
        if number % first == 0
        for rest in _factorizations(number // first, parts - 1)
        if first <= rest[0]
    ]
