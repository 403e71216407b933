"""Times predicted from a schedule, and a picture of one block.

A step of computing takes the cycles that the compiler estimates. A transfer
takes its bytes over the bandwidth of its links, both directions used by a
collective and one by a permute; it runs from start to done, and the chip waits
at done for what is left. Transfers do not slow each other down or the
computing. So this is a prediction, and a lower bound of the waiting.
"""

import collections
import dataclasses

from keras_vit22b.planning.schedule import block_of
from keras_vit22b.planning.schedule import phase_of


@dataclasses.dataclass(frozen=True)
class Interval:
    """Something that runs, in seconds from the start of the step.

    Attributes:
        lane: `"matmul"`, `"compute"`, `"transfer"` (it runs) or `"waiting"`
            (the chip waits for it).
        start: float.
        end: float.
        block: int, or `None`.
        phase: string. `"forward"`, `"backward"` or `"update"`.
        cause: string. Of a transfer; else `""`.
        key: string. Of a transfer: cause, phase, kind and status, as in
            `Schedule.summary`; else `""`.
    """

    lane: str
    start: float
    end: float
    block: int | None
    phase: str
    cause: str = ""
    key: str = ""


def transfer_seconds(transfer, chip):
    """Return the seconds that a transfer takes alone.

    A permute's `V` bytes take `V / W`, with `W` the bandwidth of a link in
    one direction; a collective in which a chip sends `V` bytes, over a ring
    in both directions, `V / (2 W)`.
    """
    directions = 1 if transfer.kind == "collective-permute" else 2
    return transfer.bytes / (directions * chip.link_bandwidth)


def intervals(schedule, chip):
    """Run a schedule in the mind, and yield `Interval`s in order."""
    yield from _Clock(chip).run(schedule.steps)


class _Clock:
    def __init__(self, chip):
        self.chip = chip
        self.now = 0.0
        self.ready = {}  # Transfers under way, by identity.

    def run(self, steps):
        for step in steps:
            if step.kind == "loop":
                for _ in range(step.trips):
                    yield from self.run(step.body)
            elif step.transfer is not None:
                yield from self._transfer(step)
            else:
                start = self.now
                self.now += step.cycles / self.chip.clock
                yield Interval(
                    step.kind,
                    start,
                    self.now,
                    block_of(step.op_name),
                    phase_of(step.op_name),
                )

    def _transfer(self, step):
        transfer = step.transfer
        common = {
            "block": transfer.block,
            "phase": transfer.phase,
            "cause": transfer.cause,
            "key": "/".join(
                (
                    transfer.cause,
                    transfer.phase,
                    transfer.kind,
                    transfer.status,
                )
            ),
        }
        seconds = transfer_seconds(transfer, self.chip)
        if step.kind == "start":
            self.ready[id(transfer)] = self.now + seconds
            yield Interval("transfer", self.now, self.now + seconds, **common)
            return
        if step.kind == "transfer":
            end = self.now + seconds
            yield Interval("transfer", self.now, end, **common)
        else:
            end = self.ready.pop(id(transfer))
        if end > self.now:
            start, self.now = self.now, end
            yield Interval("waiting", start, end, **common)


def predict_times(schedule, chip):
    """Predict how long a step takes, and how long a chip waits, and for what.

    Args:
        schedule: `Schedule`.
        chip: `Chip`.

    Returns:
        A dict of seconds: `"step"`, `"matmul"`, `"compute"` (all else that is
        computed) and `"waiting"`, the last a dict from each
        `"cause/phase/kind/status"` of `Schedule.summary`.
    """
    times = {"step": 0.0, "matmul": 0.0, "compute": 0.0}
    waiting = collections.defaultdict(float)
    for interval in intervals(schedule, chip):
        seconds = interval.end - interval.start
        if interval.lane == "transfer":
            waiting[interval.key] += 0.0
        elif interval.lane == "waiting":
            waiting[interval.key] += seconds
        else:
            times[interval.lane] += seconds
    times["step"] = times["matmul"] + times["compute"] + sum(waiting.values())
    return {**times, "waiting": dict(waiting)}


def block_timeline(schedule, chip, block):
    """Return what runs from a block's first to its last interval, each way.

    Args:
        schedule: `Schedule`.
        chip: `Chip`.
        block: int.

    Returns:
        A dict from `"forward"` and `"backward"` to a list of `Interval`.

    Raises:
        ValueError: if no matmul of the block is in the schedule.
    """
    everything = list(intervals(schedule, chip))
    parts = {}
    for phase in ("forward", "backward"):
        own = [
            i
            for i in everything
            if (i.lane, i.block, i.phase) == ("matmul", block, phase)
        ]
        if own:
            parts[phase] = [
                i
                for i in everything
                if i.end > own[0].start and i.start < own[-1].end
            ]
    if not parts:
        raise ValueError(f"The schedule has no matmul of block {block}.")
    return parts


_COLORS = {
    "matmul": "#3b6ea5",
    "compute": "#9bb8d3",
    "ring": "#4a9c5d",
    "weight gather": "#c98b2b",
    "gradient reduction": "#8e5ba6",
    "pooling and head": "#7f7f7f",
    "other": "#bdbdbd",
    "waiting": "#c0392b",
}


def plot_timeline(parts, path, *, title):
    """Draw a block's timeline: computing above, transfers below.

    Args:
        parts: dict, as `block_timeline` returns it.
        path: path of the PNG.
        title: string.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 2.2 * len(parts) + 0.8))
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(parts), squeeze=False)[:, 0]
    lanes = ["computing", "waiting", *_transfer_lanes(parts)]
    used = []
    for axes, (name, items) in zip(all_axes, parts.items()):
        origin = min(i.start for i in items)
        for item in items:
            lane = {"matmul": "computing", "compute": "computing"}.get(
                item.lane, item.cause if item.lane == "transfer" else "waiting"
            )
            color = item.cause if item.lane == "transfer" else item.lane
            used.append(color)
            axes.barh(
                lanes.index(lane),
                1e3 * (item.end - item.start),
                left=1e3 * (item.start - origin),
                height=0.8,
                color=_COLORS[color],
                edgecolor="white",
                linewidth=0.3,
            )
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(-0.6, len(lanes) - 0.4)  # Lanes without a bar, too.
        axes.invert_yaxis()
        axes.set_xlabel("predicted time, ms")
        axes.set_title(name, loc="left", fontsize=10)
    figure.suptitle(title, fontsize=10)
    figure.legend(
        handles=[
            Patch(color=color, label=name)
            for name, color in _COLORS.items()
            if name in used
        ],
        loc="lower center",
        ncols=len(_COLORS),
        fontsize=8,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)


def _transfer_lanes(parts):
    causes = [
        i.cause
        for items in parts.values()
        for i in items
        if i.lane == "transfer"
    ]
    return list(dict.fromkeys(causes))
