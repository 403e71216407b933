"""Transfers read from programs that libtpu compiled: see make_hlo.py."""

import pathlib
import re

import numpy as np
import pytest

from keras_vit22b.planning import hlo
from keras_vit22b.planning.chips import CHIPS
from keras_vit22b.planning.schedule import Schedule
from keras_vit22b.planning.schedule import Step
from keras_vit22b.planning.schedule import Transfer
from keras_vit22b.planning.schedule import read_schedule
from keras_vit22b.planning.timeline import block_timeline
from keras_vit22b.planning.timeline import predict_times
from keras_vit22b.planning.timeline import transfer_seconds

FOLDER = pathlib.Path(__file__).parent / "hlo"


def text_of(name):
    return (FOLDER / f"{name}.txt").read_text()


@pytest.fixture
def ring():
    return read_schedule(text_of("v4_ring"), model=4)


def test_a_ring_is_hidden_forward_and_backward(ring):
    permutes = [t for t in ring.transfers if t.kind == "collective-permute"]
    assert {t.status for t in permutes} == {"hidden"}
    assert {t.cause for t in permutes} == {"ring"}
    assert {t.axis for t in permutes} == {"model"}
    assert {t.block for t in permutes} == {3}
    assert {t.phase for t in permutes} == {"forward", "backward"}


def test_a_loop_counts_as_often_as_it_runs(ring):
    """Four chips: three steps, half a chunk each way; backward two rings."""
    half_chunk = 1 * 64 * 256 * 2
    permutes = [t for t in ring.transfers if t.cause == "ring"]
    forward = [t for t in permutes if t.phase == "forward"]
    assert [(t.count, t.bytes) for t in forward] == [(3, half_chunk)] * 2
    backward = [t for t in permutes if t.phase == "backward"]
    assert [(t.count, t.bytes) for t in backward] == [(3, 2 * half_chunk)] * 2


def test_the_gradient_of_a_whole_kernel_is_reduced_over_batch(ring):
    (reduction,) = [t for t in ring.transfers if t.kind == "all-reduce"]
    assert reduction.cause == "gradient reduction"
    assert reduction.status == "synchronous"
    assert (reduction.axis, reduction.chips) == ("batch", 2)
    # A ring's all-reduce over two chips sends the kernel's part once.
    assert reduction.bytes == 256 * (8 // 4) * 128 * 2


def test_a_permute_without_a_matmul_beside_it_is_exposed():
    text = text_of("v4_ring")
    done = re.search(
        r"\n  %\S+ = \S+ collective-permute-done\(%(\S+)\).*", text
    )
    start = re.search(rf"\n  %{re.escape(done[1])} = .*", text)
    text = text.replace(done[0], "")
    text = text.replace(start[0], start[0] + done[0])
    statuses = [t.status for t in read_schedule(text, model=4).transfers]
    assert statuses.count("exposed") == 1


def test_gathers_before_their_matmuls_are_synchronous():
    schedule = read_schedule(text_of("v4_synchronous_gather"), model=2)
    assert len(schedule.transfers) == 3
    for block, transfer in enumerate(schedule.transfers):
        assert transfer.kind == "all-gather"
        assert transfer.status == "synchronous"
        assert transfer.cause == "weight gather"
        assert transfer.block == block
        assert (transfer.axis, transfer.chips) == ("batch", 4)
        assert transfer.bytes == 3 / 4 * 1024 * 1024 * 2


def test_gathers_inside_matmul_fusions_are_hidden():
    schedule = read_schedule(text_of("v5e_fused_gather"), model=2)
    assert [(t.block, t.fused, t.status) for t in schedule.transfers] == [
        (0, False, "synchronous"),
        (1, True, "hidden"),
        (2, True, "hidden"),
    ]
    assert {t.bytes for t in schedule.transfers} == {3 / 4 * 1024 * 1024 * 2}


def test_a_gather_that_runs_through_a_loop_is_one_transfer():
    text = text_of("v5e_gather_through_loop")
    body = re.search(r"\n%(\S+) \(.*\n(?:  .*\n)*?.*async_collective", text)
    assert re.search(rf"body=%{re.escape(body[1])}\b", text)
    schedule = read_schedule(text, model=4)
    (gather,) = [t for t in schedule.transfers if t.cause != "ring"]
    assert (gather.cause, gather.status) == ("weight gather", "hidden")
    assert (gather.count, gather.bytes) == (1, 2 * 1024 * 1024 * 2 / 2)


def test_the_axis_is_that_of_the_mesh():
    text = text_of("v4_synchronous_gather")
    for model, axis in ((8, "model"), (2, "batch"), (4, "both")):
        schedule = read_schedule(text, model=model)
        assert {t.axis for t in schedule.transfers} == {axis}


def test_a_summary_adds_up(ring):
    rows = ring.summary()
    assert sum(r["bytes"] for r in rows) == sum(
        t.count * t.bytes for t in ring.transfers
    )
    assert [r["cause"] for r in rows] == ["ring", "ring", "gradient reduction"]


@pytest.mark.parametrize(
    "notation, groups",
    [
        ("replica_groups={{0,4},{1,5}}", [[0, 4], [1, 5]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            "replica_groups=[4,2]<=[2,4]T(1,0)",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        (
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], "
            "device_ids=([2,4]T(1,0)) {'axis_0'}",
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
    ],
)
def test_groups_are_read_in_every_notation(notation, groups):
    found = hlo.device_groups(f", channel_id=1, {notation}, dimensions={{0}}")
    np.testing.assert_array_equal(found, groups)


@pytest.mark.parametrize(
    "shape, size",
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(3)}", 12),
        ("f32[]", 4),
        ("pred[5]", 5),
        ("(bf16[8]{0}, /*index=1*/f32[2]{0}, u32[]{:S(2)})", 28),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert hlo.shape_bytes(shape) == size


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="scheduled HLO module"):
        read_schedule("HloModule jit_f, entry_computation_layout={}\n", 1)


def test_a_loop_of_unknown_length_is_an_error():
    text = text_of("v4_ring").replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="Cannot tell how often loop"):
        read_schedule(text, model=4)


# === Times ===


def a_transfer(status, size, kind="all-gather"):
    return Transfer(
        name="t",
        kind=kind,
        fused=False,
        bytes=size,
        count=1,
        chips=4,
        axis="batch",
        status=status,
        phase="forward",
        cause="weight gather",
        block=0,
        op_name="block_0/in_projection",
    )


def matmul(cycles):
    return Step("matmul", "m", "block_0/in_projection", cycles=cycles)


def test_a_chip_waits_for_what_a_matmul_does_not_cover():
    chip = CHIPS["v4"]
    seconds = 1e-3
    transfer = a_transfer("hidden", 2 * chip.link_bandwidth * seconds)
    steps = [
        Step("start", "s", "", transfer=transfer),
        matmul(0.4 * seconds * chip.clock),
        Step("done", "d", "", transfer=transfer),
        matmul(0.1 * seconds * chip.clock),
    ]
    times = predict_times(Schedule(steps, [transfer]), chip)
    assert times["matmul"] == pytest.approx(0.5 * seconds)
    (waiting,) = times["waiting"].values()
    assert waiting == pytest.approx(0.6 * seconds)
    assert times["step"] == pytest.approx(1.1 * seconds)


def test_a_chip_waits_for_all_of_a_synchronous_transfer_in_a_loop():
    chip = CHIPS["v4"]
    transfer = a_transfer("synchronous", 2 * chip.link_bandwidth)
    body = [Step("transfer", "t", "", transfer=transfer), matmul(10)]
    loop = Step("loop", "l", "", trips=3, body=body)
    times = predict_times(Schedule([loop], [transfer]), chip)
    (waiting,) = times["waiting"].values()
    assert waiting == pytest.approx(3)
    assert times["matmul"] == pytest.approx(30 / chip.clock)


def test_a_permute_uses_one_direction_of_a_link():
    chip = CHIPS["v5e"]
    both = a_transfer("hidden", 1e6)
    one = a_transfer("hidden", 1e6, kind="collective-permute")
    assert transfer_seconds(one, chip) == 2 * transfer_seconds(both, chip)


def test_a_timeline_shows_one_block(ring):
    parts = block_timeline(ring, CHIPS["v4"], 3)
    assert set(parts) == {"forward", "backward"}
    for intervals in parts.values():
        assert any(i.cause == "ring" for i in intervals)
    with pytest.raises(ValueError, match="no matmul of block 7"):
        block_timeline(ring, CHIPS["v4"], 7)
