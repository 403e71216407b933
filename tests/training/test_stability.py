"""The laboratory measures what it says, and keeps what it measured."""

import csv
import json

import numpy as np
import pytest

from keras_vit22b import cli
from keras_vit22b.training import stability
from keras_vit22b.training import stability_bench
from keras_vit22b.training.stability_bench import Bench
from keras_vit22b.training.stability_bench import StabilityProtocol

TINY = StabilityProtocol(
    steps=4,
    batch_size=8,
    warmup_steps=1,
    num_layers=1,
    hidden_dim=8,
    validation_images=16,
    every=2,
    monitor_images=4,
)


@pytest.fixture
def without_xla(monkeypatch):
    """A few steps on TensorFlow take less time than compiling them."""
    monkeypatch.setattr(stability_bench, "JIT_COMPILE", "auto")


def run_of(rate, final, *, seed=0, norm="rms", initial=2.0):
    return {
        "qk_norm": norm,
        "learning_rate": rate,
        "block": "parallel",
        "seed": seed,
        "initial_loss": initial,
        "final_loss": final,
    }


def test_sensitivity_is_its_definition():
    """Mean over rates of min(loss, initial loss) - best loss."""
    runs = [
        run_of(1e-3, 0.5),
        run_of(1e-2, 0.25),
        run_of(1e-1, 10.0),
        run_of(1.0, float("nan")),
        *(run_of(rate, 0.5, seed=1) for rate in (1e-3, 1e-2, 1e-1, 1.0)),
        run_of(1e-2, 1.0, norm=None),
    ]
    first = (0.25 + 0.0 + 1.75 + 1.75) / 4
    assert stability.sensitivity(runs) == {
        "parallel, rms QK norm": (
            pytest.approx(first / 2),
            pytest.approx(first / 2),
        ),
        "parallel, no QK norm": (0.0, 0.0),
    }


def test_a_grid_holds_every_variant_seed_by_seed():
    settings = stability.grid()
    assert len(set(settings)) == len(settings) == 2 * 3 * 7 * 3
    assert [s.seed for s in settings] == sorted(s.seed for s in settings)


def test_the_rate_warms_up_and_falls_to_zero():
    protocol = StabilityProtocol(steps=8, warmup_steps=2)
    rates = protocol.learning_rates(0.5)
    assert rates[:3] == [0.25, 0.5, 0.5]
    assert rates[5] == pytest.approx(0.25)
    assert len(rates) == 8
    assert 0 < rates[-1] < rates[-2] < rates[-3]


def test_variants_share_data_and_weights(monkeypatch):
    """All of a seed start alike, but for the norms' own weights."""
    seen = []
    monkeypatch.setattr(
        "keras_vit22b.models.ViT22BImageClassifier.fit",
        lambda self, x, y, **_: seen.append((x, y, self.get_weights())),
    )
    for norm in (None, "rms"):
        Bench(norm, "parallel", TINY).train(0.1, 0)
    (x, y, weights), (same_x, same_y, with_norms) = seen
    np.testing.assert_array_equal(x, same_x)
    np.testing.assert_array_equal(y, same_y)
    matrices = [w for w in weights if w.ndim > 1]
    for ours, theirs in zip(
        matrices, (w for w in with_norms if w.ndim > 1), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_bench_forgets_its_earlier_runs():
    bench = Bench("rms", "parallel", TINY)
    first = bench.train(0.1, 0)
    assert bench.train(0.3, 0)["losses"] != first["losses"]
    assert bench.train(0.1, 1)["losses"] != first["losses"]
    again = bench.train(0.1, 0)
    for name in ("losses", "initial_loss", "final_loss"):
        assert again[name] == pytest.approx(first[name], rel=1e-4)
    # Looked at while the weights were changing.
    assert len({w["largest_logit"] for w in again["watched"]}) == 3


@pytest.mark.usefixtures("without_xla")
def test_runs_go_on_where_they_were_cut(tmp_path, monkeypatch):
    settings = stability.grid(
        learning_rates=(1e-3, 1e-1),
        qk_norms=(None, "rms"),
        blocks=("parallel",),
        seeds=(0,),
    )
    laboratory = stability.Laboratory(TINY, tmp_path)
    runs = laboratory.run(settings)
    assert [len(run["losses"]) for run in runs] == [4] * 4
    assert [w["step"] for w in runs[0]["watched"]] == [0, 2, 4]
    # A kill while the last line was written.
    path = tmp_path / "runs.jsonl"
    path.write_text(path.read_text()[:-20])
    trained = []
    train = Bench.train

    def counted(bench, *arguments):
        trained.append((bench.qk_norm, *arguments))
        return train(bench, *arguments)

    monkeypatch.setattr(Bench, "train", counted)
    again = stability.Laboratory(TINY, tmp_path).run(settings)
    assert trained == [("rms", 1e-1, 0)]
    for run, same in zip(again, runs):
        assert run["losses"] == pytest.approx(same["losses"], rel=1e-4)
    result = laboratory.report(again)
    rows = list(csv.DictReader((tmp_path / "stability.csv").open()))
    assert [row["qk_norm"] for row in rows] == ["", "", "rms", "rms"]
    assert json.loads((tmp_path / "stability.json").read_text()) == result
    for name in ("loss_by_learning_rate.png", "attention_by_step.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def saved_run(**changes):
    return {
        **run_of(0.1, 0.5),
        "losses": [1.0, 0.5],
        "watched": [{"step": 0, "largest_logit": 3.0, "entropy": 0.8}],
        "seconds": 1.0,
        **changes,
    }


@pytest.fixture
def bench_that_gives(monkeypatch):
    """Train nothing, and give a run."""

    def give(run):
        monkeypatch.setattr(Bench, "__init__", lambda *_: None)
        monkeypatch.setattr(Bench, "train", lambda *_: run)

    return give


def test_a_folder_of_another_protocol_is_refused(tmp_path, bench_that_gives):
    setting = stability.Setting("rms", 0.1)
    # Without runs it is of none.
    stability.Laboratory(StabilityProtocol(), tmp_path)
    bench_that_gives(saved_run())
    stability.Laboratory(TINY, tmp_path).run([setting])
    assert stability.Laboratory(TINY, tmp_path).done.keys() == {setting}
    with pytest.raises(ValueError, match="runs with .*steps 4, not 120"):
        stability.Laboratory(StabilityProtocol(), tmp_path)
    path = tmp_path / "protocol.json"
    protocol = json.loads(path.read_text())
    for content in (json.dumps({**protocol, "keras": "3.0.0"}), "{", "[]"):
        path.write_text(content)
        with pytest.raises(ValueError, match="runs(, but| with keras '3.0.0')"):
            stability.Laboratory(TINY, tmp_path)
    path.write_text(json.dumps(protocol))
    (tmp_path / "runs.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ValueError, match="a line that is no run"):
        stability.Laboratory(TINY, tmp_path).run([setting])


def test_a_run_that_blew_up_does_not_look_sound(tmp_path, bench_that_gives):
    nan = float("nan")
    watched = [
        {"step": 0, "largest_logit": 3.0, "entropy": 0.8},
        {"step": 1, "largest_logit": nan, "entropy": nan},
    ]
    bench_that_gives(saved_run(final_loss=nan, watched=watched))
    laboratory = stability.Laboratory(TINY, tmp_path)
    runs = laboratory.run([stability.Setting("rms", 0.1)])
    row = stability.summary(runs[0])
    assert np.isnan([row["largest_logit"], row["least_entropy"]]).all()
    text = (tmp_path / "runs.jsonl").read_text()
    assert "NaN" not in text and "null" in text
    # As it is read again.
    (again,) = laboratory.runs
    assert np.isnan(again["final_loss"]) and again["qk_norm"] == "rms"
    text = stability.as_json(laboratory.report([again]))
    assert json.loads(text)["runs"][0]["largest_logit"] is None


def test_a_loss_that_is_not_finite_is_looked_at(without_xla):
    run = Bench(None, "parallel", TINY).train(1e30, 0)
    assert not np.isfinite(run["losses"][-1])
    assert len(run["losses"]) < TINY.steps
    assert run["watched"][-1]["step"] == len(run["losses"])


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"dataset": "mnist"}, "'digits' or 'fashion_mnist'. Received: 'mnist"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"steps": 40}, "warmup_steps must be fewer than steps, 40"),
    ],
)
def test_wrong_protocols_are_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        StabilityProtocol(**wrong)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_wrong_settings_are_errors(rate):
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        stability.Setting(learning_rate=rate)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        stability.Setting(seed=-1)


@pytest.mark.usefixtures("without_xla")
def test_the_command_prints_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        stability_bench, "StabilityProtocol", lambda *_, **__: TINY
    )
    command = f"keras-vit22b stability --output {tmp_path}"
    for extra in ("", " --json"):
        monkeypatch.setattr("sys.argv", (command + extra).split())
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 0
        output = capsys.readouterr().out
        if extra:
            assert len(json.loads(output)["runs"]) == 4
        else:
            assert "2/4  parallel, no QK norm, rate 0.05, seed 0" in output
