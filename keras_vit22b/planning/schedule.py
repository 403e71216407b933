"""Transfers between chips, read from a scheduled TPU program.

XLA:TPU has no dot: a matmul is a `convolution`, mostly inside a fusion. An
asynchronous transfer is a pair of start and done, or a chain of fusions; what
stands between its two ends may run beside it. Any other collective is
synchronous: the chip waits for it. A schedule shows what may overlap. It is no
measurement.
"""

import collections
import dataclasses
import functools
import re

from keras_vit22b.planning.hlo import Instruction
from keras_vit22b.planning.hlo import parse_module
from keras_vit22b.planning.hlo import shape_bytes

KINDS = (
    "collective-permute",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
)
CAUSES = (
    "ring",
    "weight gather",
    "gradient reduction",
    "pooling and head",
    "other",
)
STATUSES = ("hidden", "exposed", "synchronous")
MATMULS = ("convolution", "dot")
_BLOCK = re.compile(r"block_(\d+)/")


@dataclasses.dataclass
class Transfer:
    """One collective of the program.

    Attributes:
        name: string. Of its first instruction.
        kind: one of `KINDS`.
        fused: bool. Whether it runs inside fusions, as TPU v5e does it.
        bytes: int. What one chip sends, each time: of a gather of `V` bytes
            over `n` chips `V (n - 1) / n`.
        count: int. How often a step runs it, loops counted.
        chips: int. In a group; 2 for a permute.
        axis: `"batch"`, `"model"`, `"both"` or `None` (unknown): the axis of
            the mesh along which it goes.
        status: `"hidden"` (a matmul stands between start and done),
            `"exposed"` (none does) or `"synchronous"`.
        phase: `"forward"`, `"backward"` or `"update"` (of the weights).
        cause: one of `CAUSES`. `"ring"` are a block's activations over the
            model axis, in whatever form.
        block: int, or `None` outside the blocks.
        op_name: string. Path of the JAX operation.
    """

    name: str
    kind: str
    fused: bool
    bytes: int
    count: int
    chips: int
    axis: str | None
    status: str
    phase: str
    cause: str
    block: int | None
    op_name: str


@dataclasses.dataclass
class Step:
    """One instruction of the schedule, in the order of issue.

    Attributes:
        kind: `"matmul"`, `"compute"`, `"start"`, `"done"`, `"transfer"` (a
            synchronous one) or `"loop"`.
        name: string.
        op_name: string.
        cycles: int. The compiler's own estimate, without transfers.
        transfer: the `Transfer` that starts, ends or happens here, or `None`.
        trips: int. Of a loop.
        body: list of `Step`. Of a loop.
    """

    kind: str
    name: str
    op_name: str
    cycles: int = 0
    transfer: Transfer | None = None
    trips: int = 1
    body: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Schedule:
    """The order of a program's steps, and its transfers.

    Attributes:
        steps: list of `Step`.
        transfers: list of `Transfer`.
    """

    steps: list
    transfers: list

    def summary(self):
        """Count transfers and bytes by cause, phase, kind and status.

        Returns:
            A list of dicts with `"cause"`, `"phase"`, `"kind"`, `"status"`,
            `"count"` and `"bytes"` (in all), a step of one chip each.
        """
        rows = collections.defaultdict(lambda: [0, 0])
        for t in self.transfers:
            row = rows[t.cause, t.phase, t.kind, t.status]
            row[0] += t.count
            row[1] += t.count * t.bytes
        order = sorted(rows, key=lambda key: (CAUSES.index(key[0]), key[1:]))
        return [
            dict(
                zip(
                    ("cause", "phase", "kind", "status", "count", "bytes"),
                    (*key, *rows[key]),
                )
            )
            for key in order
        ]


def read_schedule(text, model):
    """Read a scheduled TPU program.

    Args:
        text: string. The compiled program's HLO.
        model: int. Size of the mesh's axis "model"; a device's index in the
            mesh is `batch_index * model + model_index`.

    Returns:
        A `Schedule`.

    Raises:
        ValueError: if the text is no scheduled HLO module.
    """
    return _Reader(parse_module(text), model).read()


@dataclasses.dataclass
class _Role:
    """What an instruction is to a transfer.

    Attributes:
        kind: `"start"`, `"within"`, `"done"` or `"only"`.
        collective: `Instruction`. The collective itself.
        fused: bool. Whether that is inside a fusion.
        start: string. Name of the instruction that starts the transfer.
    """

    kind: str
    collective: Instruction
    fused: bool
    start: str


class _Reader:
    def __init__(self, module, model):
        self.module = module
        self.computations = module.computations
        self.model = model
        self.transfers = []
        self.homes = {}  # From a chain to the computation it starts in.
        self.has_matmul = functools.cache(self._has_matmul)
        self.collective_inside = functools.cache(self._collective_inside)

    def read(self):
        steps = self._steps(self.module.entry, count=1)
        return Schedule(steps, self.transfers)

    def _has_matmul(self, name):
        """Whether a computation, or one that it calls, multiplies."""
        return any(
            i.opcode in MATMULS or any(map(self.has_matmul, i.called))
            for i in self.computations.get(name, ())
        )

    def _collective_inside(self, name):
        """Return the collective in a computation that a fusion calls."""
        for instruction in self.computations.get(name, ()):
            if _kind(instruction.opcode):
                return instruction
            for called in instruction.called:
                if found := self.collective_inside(called):
                    return found
        return None

    def _steps(self, name, count):
        """Return the steps of a computation that runs `count` times."""
        instructions = self.computations[name]
        by_name = {i.name: i for i in instructions}
        roles = self._roles(name, by_name)
        steps, under_way = [], {}
        for instruction in instructions:
            role = roles.get(instruction.name)
            if role and role.kind in ("start", "only"):
                transfer = self._transfer(instruction, role, count)
                self.transfers.append(transfer)
                kind = "start" if role.kind == "start" else "transfer"
                steps.append(_step(kind, instruction, transfer=transfer))
                if kind == "start":
                    under_way[instruction.name] = transfer
            for step in self._compute(instruction, by_name, count):
                if _multiplies(step):
                    for transfer in under_way.values():
                        transfer.status = "hidden"
                    if role and role.kind == "only":
                        transfer.status = "hidden"
                steps.append(step)
            if role and role.kind == "done":
                transfer = under_way.pop(role.start)
                steps.append(_step("done", instruction, transfer=transfer))
        return steps

    def _compute(self, instruction, by_name, count):
        """Return the steps of an instruction, transfers left out."""
        opcode = instruction.opcode
        if opcode == "while":
            trips = self.module.trip_count(instruction, by_name)
            body = self._steps(instruction.called[-1], count * trips)
            return [_step("loop", instruction, trips=trips, body=body)]
        if opcode in ("call", "conditional"):
            return [
                step
                for name in instruction.called
                for step in self._steps(name, count)
            ]
        if opcode in MATMULS or any(map(self.has_matmul, instruction.called)):
            return [_step("matmul", instruction, cycles=instruction.cycles)]
        if instruction.cycles:
            return [_step("compute", instruction, cycles=instruction.cycles)]
        return []

    def _roles(self, computation, by_name):
        """Return a dict from name to `_Role`, of those that have one."""
        roles, chains = {}, collections.defaultdict(list)
        for name, instruction in by_name.items():
            opcode = instruction.opcode
            if opcode.endswith("-done"):
                start = _start(instruction, by_name)
                if start in roles:
                    roles[start].kind = "start"
                    roles[name] = dataclasses.replace(roles[start], kind="done")
            elif _kind(opcode):
                roles[name] = _Role("only", instruction, False, name)
            elif opcode in ("fusion", "async-start"):
                inside = self._inside(instruction)
                if inside is None:
                    continue
                chain = inside.chain
                if chain is not None:
                    # Its middle may be in the body of a loop.
                    home = self.homes.setdefault(chain, computation)
                    if home != computation:
                        continue
                fused = opcode == "fusion"
                roles[name] = _Role("only", inside, fused, name)
                if chain is not None:
                    chains[chain].append(name)
        for first, *others in chains.values():
            for name in others:
                roles[name] = dataclasses.replace(roles[first], kind="within")
            if others:
                roles[first].kind, roles[others[-1]].kind = "start", "done"
        return roles

    def _inside(self, instruction):
        found = map(self.collective_inside, instruction.called)
        return next(filter(None, found), None)

    def _transfer(self, instruction, role, count):
        collective = role.collective
        kind = _kind(collective.opcode)
        if instruction.opcode == "fusion" and any(
            "all-reduce-scatter" in name for name in instruction.called
        ):
            kind = "reduce-scatter"
        groups = collective.groups
        chips = 2 if kind == "collective-permute" else _group_size(groups)
        axis = self._axis(groups, kind)
        op_name = collective.op_name or instruction.op_name
        phase = phase_of(op_name)
        return Transfer(
            name=instruction.name,
            kind=kind,
            fused=role.fused,
            bytes=_sent_bytes(kind, collective, chips),
            count=count,
            chips=chips,
            axis=axis,
            status="exposed" if role.kind == "start" else "synchronous",
            phase=phase,
            cause=_cause(kind, axis, phase, op_name),
            block=block_of(op_name),
            op_name=op_name,
        )

    def _axis(self, groups, kind):
        if groups is None or not groups.size:
            return None
        if kind == "collective-permute":
            groups = groups[groups[:, 0] != groups[:, 1]]
        batch, model = groups // self.model, groups % self.model
        same_batch = (batch == batch[:, :1]).all()
        same_model = (model == model[:, :1]).all()
        if same_batch:
            return "model"
        return "batch" if same_model else "both"


def _step(kind, instruction, **fields):
    return Step(kind, instruction.name, instruction.op_name, **fields)


def _start(instruction, by_name):
    """Return the name of the instruction that a done belongs to."""
    while instruction.operands and instruction.operands[0] in by_name:
        instruction = by_name[instruction.operands[0]]
        if instruction.opcode.endswith("-start"):
            return instruction.name
        if instruction.opcode not in ("get-tuple-element", "async-update"):
            return None
    return None


def _multiplies(step):
    return step.kind == "matmul" or any(map(_multiplies, step.body))


def _kind(opcode):
    opcode = opcode.removesuffix("-start")
    return opcode if opcode in KINDS else None


def _group_size(groups):
    return 1 if groups is None else groups.shape[1]


def _sent_bytes(kind, collective, chips):
    """Return what one chip sends, by rings where there are more than two."""
    shape = collective.shape
    if collective.opcode == "collective-permute-start":
        shape = shape.split("}, ")[0]  # Operand, result and semaphores.
    elif collective.opcode == "all-gather-start":
        shape = shape.split("}, ", 1)[1]  # Operand and result.
    size = shape_bytes(shape)
    share = (chips - 1) / chips
    if kind == "all-reduce":
        return round(2 * size * share)
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter" and collective.opcode == "reduce-scatter":
        size *= chips  # The result is a part.
    return round(size * share)


def phase_of(op_name):
    """Return `"forward"`, `"backward"` or `"update"`, from an operation's path.

    Those of `train_step` are in `jvp(...)` forward, and in `transpose(...)`
    or, recomputed, `rematted_computation` backward.
    """
    if "transpose(" in op_name or "rematted_computation" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


def block_of(op_name):
    """Return the index of the block in an operation's path, or `None`."""
    block = _BLOCK.search(op_name + "/")
    return int(block[1]) if block else None


def _cause(kind, axis, phase, op_name):
    in_block = block_of(op_name) is not None
    for cause in ("weight_gather", "gradient_reduction"):
        if cause in op_name:  # A `jax.named_scope` of ours.
            return cause.replace("_", " ")
    over_batch = axis in ("batch", "both")
    sums = "reduce" in kind or kind == "all-to-all"
    # Outside blocks and pooling each chip has its own images, so that only
    # gradients are summed.
    own_images = not in_block and "pooling/" not in op_name
    if phase == "backward" and sums and (over_batch or own_images):
        return "gradient reduction"
    if not in_block and ("pooling/" in op_name or "head" in op_name):
        return "pooling and head"
    if in_block and axis == "model":
        return "ring"
    if in_block and axis == "batch" and kind in KINDS[:2]:
        return "weight gather"
    return "other"
