"""Plans: arithmetic that is checked by hand, and by the sharding table."""

import json
import math

import pytest

from keras_vit22b import cli
from keras_vit22b.planning import costs
from keras_vit22b.planning.chips import CHIPS
from keras_vit22b.planning.chips import Slice
from keras_vit22b.planning.mesh_plan import SCHEDULES
from keras_vit22b.planning.mesh_plan import hidden_parts
from keras_vit22b.planning.mesh_plan import rings
from keras_vit22b.planning.planner import plan

GIANT = "vit22b_patch14_224"
KERNELS = 21_743_271_936


@pytest.fixture(scope="module")
def papers():
    return plan(GIANT, kind="v4", chips=1024, images=65536)


def mesh_of(plan, batch, model, fsdp):
    (mesh,) = [
        m
        for m in plan.meshes
        if (m.batch, m.model, m.fsdp) == (batch, model, fsdp)
    ]
    return mesh


def test_every_mesh_divides_chips_and_heads(papers):
    meshes = {(m.batch, m.model) for m in papers.meshes}
    assert meshes == {(1024 // n, n) for n in (1, 2, 4, 8, 16)}


def test_matmuls_are_counted_by_hand(papers):
    """With recomputing, 43 d^2 of matmuls for the 36 d^2 of a step."""
    tokens = 65536 * 256
    blocks = 6 * KERNELS * tokens * 43 / 36
    attention = 48 * 4 * (4 * tokens * 256 * 6144)
    seconds = (blocks + attention) / (0.75 * 1024 * 275e12)
    mesh = mesh_of(papers, 128, 8, True)
    # Pooling, patches and head are the rest.
    assert seconds < mesh.matmul < 1.01 * seconds


def test_activations_take_a_ring_of_links(papers):
    """16,384 tokens a chip, 8 chips a ring: 31.3 ms a block, forward."""
    mesh = mesh_of(papers, 128, 8, True)
    volume = 2 * 8 * 16384 * 6144 * 7 / 8
    # Six gathers and scatters a block, of which two go one way.
    assert mesh.ring == pytest.approx(48 * (4 + 2 * 2) * volume / (2 * 45e9))
    assert mesh.ring / 48 / 8 * 2 == pytest.approx(31.3e-3, rel=0.01)
    # Two chips have one link between them.
    two = mesh_of(papers, 512, 2, True)
    volume = 2 * 2 * 16384 * 6144 / 2
    assert two.ring == pytest.approx(48 * 6 * volume / 45e9)
    assert mesh_of(papers, 1024, 1, True).ring == 0


def test_weights_are_gathered_over_the_axes_that_are_left(papers):
    mesh = mesh_of(papers, 128, 8, True)
    sent = 2 * (2 * KERNELS / 8) * 127 / 128
    assert mesh.weight_gather == pytest.approx(sent / (4 * 45e9), rel=0.05)
    # Once, but over 2 x 128^(1/2) / 4 links.
    assert mesh.gradient_reduction == pytest.approx(
        mesh.weight_gather / 2 * 128**0.5 / 2, rel=0.05
    )
    plain = mesh_of(papers, 128, 8, False)
    assert plain.weight_gather == 0
    assert plain.gradient_reduction == pytest.approx(
        mesh.weight_gather, rel=0.05
    )
    kept = plan(GIANT, kind="v4", chips=1024, images=65536, remat=False)
    assert mesh_of(kept, 128, 8, True).weight_gather == pytest.approx(
        mesh.weight_gather / 2
    )


def test_arguments_are_those_of_the_sharding_table(papers):
    mesh = mesh_of(papers, 128, 8, True)
    images = 65536 / 128 * 224 * 224 * 3 * 4
    split = 3 * 4 * 22.2e9 / 1024
    whole = 3 * 4 * (588 + 256) * 6144  # Patches and positions.
    assert mesh.arguments == pytest.approx(images + split + whole, rel=0.02)


def test_hiding_more_is_faster_and_bounded_by_matmuls(papers):
    for mesh in papers.meshes:
        nothing, xla, ours = (mesh.step[name] for name in SCHEDULES)
        alone = mesh.ring + mesh.weight_gather + mesh.gradient_reduction
        assert nothing == pytest.approx(mesh.matmul + alone)
        assert nothing >= xla >= ours >= mesh.matmul
        for name in SCHEDULES:
            needed = mesh.step[name] * mesh.mfu[name]
            assert needed == pytest.approx(nothing * mesh.mfu[SCHEDULES[0]])


def test_the_recommended_mesh_is_the_fastest_that_fits(papers):
    best = papers.recommended
    assert best is papers.meshes[0] and best.fits
    fastest = min(m.step["ours"] for m in papers.meshes if m.fits)
    assert best.step["ours"] == pytest.approx(fastest, rel=0.01)
    assert f"batch {best.batch} x model {best.model}" in papers.reason


def test_of_meshes_as_fast_the_smallest_is_recommended():
    best = plan(GIANT, kind="v5p", chips=128, images=4096).recommended
    assert (best.batch, best.model, best.fsdp) == (16, 8, True)


def test_gradients_hide_on_a_whole_torus_alone():
    meshes = plan(GIANT, kind="v5e", chips=256, images=8192).meshes
    square, other = (
        next(m for m in meshes if m.model == model and m.fsdp)
        for model in (16, 8)
    )
    waited = other.step["ours"] - other.matmul
    assert waited == pytest.approx(other.gradient_reduction, rel=1e-3)
    assert square.step["ours"] - square.matmul < waited


def test_a_higher_matmul_efficiency_gives_a_higher_mfu(papers):
    values = [mfu["ours"] for mfu in papers.by_efficiency.values()]
    assert list(papers.by_efficiency) == [0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]
    assert values == sorted(values)
    assert papers.by_efficiency[0.75] == papers.recommended.mfu


def test_the_papers_setting_is_shown_beside_its_mfu(papers):
    assert "The paper reports 54.9 %" in str(papers)
    assert json.loads(papers.to_json())["paper_mfu"] == 0.549
    other = plan(GIANT, kind="v4", chips=512, images=65536)
    assert "54.9" not in str(other)


def test_what_does_not_fit_says_so():
    small = plan(GIANT, kind="v5e", chips=8, images=64)
    assert small.recommended is None
    assert "No mesh fits" in small.reason
    assert "of the 17 GB of a chip" in small.reason
    assert small.by_efficiency == {}


def test_gpus_of_several_hosts_share_the_network():
    one = plan("vit1b_patch14_224", kind="h100", chips=8, images=512)
    two = plan("vit1b_patch14_224", kind="h100", chips=16, images=1024)
    assert mesh_of(one, 8, 1, True).weight_gather == pytest.approx(
        mesh_of(two, 16, 1, True).weight_gather
        * (50 / 450)
        * (7 / 8)
        / (15 / 16)
    )


def test_sequential_blocks_send_twice_as_often():
    sizes = {"kind": "v4", "chips": 64, "images": 1024}
    parallel = plan("vit8b_patch14_224", num_layers=2, **sizes)
    sequential = plan("vit_e_patch14_224", num_layers=2, **sizes)
    # Two pairs of matmuls, and one more to repeat between them.
    scale = 1792 / 4096
    ours, theirs = (
        mesh_of(p, 16, 4, False).ring for p in (parallel, sequential)
    )
    assert theirs == pytest.approx(ours * scale * (2 * 8 + 1) / 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "v3"}, "Unknown chip 'v3'"),
        ({"images": 1000}, "the nearest that do are 512 and 1024"),
        ({"matmul_efficiency": 0.0}, "above 0 and at most 1"),
        ({"shape": (8, 8, 4)}, r"product is 512, such as \(8, 8, 8\)"),
        ({"shape": (-8, -8, 8)}, "3 positive integers"),
        ({"shape": (16, 32)}, "3 positive integers"),
        ({"kind": "h100", "shape": (512,)}, "is a GPU and has no shape"),
        ({"kind": "v5e"}, "nearest that there are have 256"),
        ({"chips": 34}, "nearest that there are have 32 and 64"),
        ({"chips": 8.0}, "chips must be an integer of at least 1"),
        ({"optimizer_slots": -1}, "must be an integer of at least 0"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
    ],
)
def test_wrong_settings_are_errors(change, message):
    settings = {"kind": "v4", "chips": 512, "images": 1024} | change
    with pytest.raises(ValueError, match=message):
        plan("vit90m_patch16_224", **settings)


def test_the_default_slice_is_compact():
    assert plan(GIANT, kind="v4", chips=1024, images=1024).settings[
        "shape"
    ] == (8, 8, 16)
    assert plan(GIANT, kind="v5e", chips=32, images=32).settings["shape"] == (
        4,
        8,
    )


def test_lines_that_do_not_wrap_halve_the_bandwidth():
    shares = []
    for name in ("v5e:16x16", "v5e:8x8"):
        tpu_slice = Slice.from_name(name)
        links = costs.link_bandwidths(
            tpu_slice.chip,
            tpu_slice.shape,
            tpu_slice.wraps,
            (tpu_slice.num_chips // 8, 8),
            ring_closes=True,
            sum_in_ring=False,
            host_bandwidth=0.0,
        )
        shares.append(links.batch / tpu_slice.chip.link_bandwidth)
    assert shares == [2, 1]


def test_a_ring_longer_than_its_matmul_shows():
    times = costs.Times([(1.0, 3.0), (2.0, 1.0)], 0.5, 0.2, 0.3)
    assert times.step(1.0, 1.0, 1.0) == 3.0 + 2.0 + 0.5
    assert times.step(0.5, 1.0, 1.0) == 1.5 + 1.5 + 2.0 + 0.5 + 0.5
    assert times.step(1.0, 0.0, 1.0) == 5.5 + 0.2
    assert times.step(0.0, 0.0, 0.0) == 0.5 + 1 + 3 + 2 + 1 + 0.2 + 0.3


@pytest.mark.parametrize(
    "name, mesh, expected",
    [
        ("v4:4x4x4", (8, 8), (True, False, ())),
        ("v5e:16x16", (16, 16), (True, True, [])),
        ("v5e:2x16", (16, 2), (True, True, [])),
        ("v5e:4x8", (4, 8), (True, False, ["gradient_reduction"])),
        ("v5e:1x8", (1, 8), (False, False, ["ring"])),
        ("v5e:1x8", (8, 1), (True, False, [])),
    ],
)
def test_what_waits_is_read_off_the_order_of_the_chips(name, mesh, expected):
    tpu_slice = Slice.from_name(name)
    assert rings(tpu_slice.chip, tpu_slice.shape, mesh) == expected


def test_what_waits_is_not_hidden():
    parts = hidden_parts("ours", CHIPS["v5e"], ["ring"])
    assert parts.ring == 0 < parts.gradient_reduction


def test_hidden_parts_are_parts():
    for chip in CHIPS.values():
        for name in SCHEDULES:
            assert all(0 <= part <= 1 for part in hidden_parts(name, chip))


def test_the_command_prints_what_plan_returns(monkeypatch, capsys):
    arguments = "plan vit90m_patch16_224 --chips 16 --kind v5e --images 256"
    outputs = []
    for extra in ("", " --json"):
        command = f"keras-vit22b {arguments}{extra}"
        monkeypatch.setattr("sys.argv", command.split())
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 0
        outputs.append(capsys.readouterr().out)
    same = plan("vit90m_patch16_224", kind="v5e", chips=16, images=256)
    assert outputs[0].strip() == str(same)
    assert json.loads(outputs[1]) == json.loads(same.to_json())
    assert math.isclose(same.settings["matmul_efficiency"], 0.75)
