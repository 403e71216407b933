"""A preset's card: what it says, that its code works, and when it stays."""

import json
import re
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from keras_vit22b import ViT22BImageClassifier
from keras_vit22b import ViT22BImageConverter
from keras_vit22b.probing import card_metrics

METRIC = {
    "task_type": "image-classification",
    "dataset_type": "mnist",
    "dataset_name": "MNIST: test",
    "metric_type": "accuracy",
    "metric_name": "linear probe, 5 labels a class",
    "metric_value": 0.93,
}
STATED = {
    "license": "cc-by-4.0",
    "training_data": "- 60,000 photos: of *clothes*.\n- {braces} and `code`.",
    "limits": "No colour.",
    "metrics": [METRIC, METRIC | {"metric_value": 1, "metric_type": "f1"}],
}


@pytest.fixture
def backbone(make_backbone):
    backbone = make_backbone()
    backbone.image_converter = ViT22BImageConverter((8, 12))
    return backbone


def read(folder):
    return (folder / "README.md").read_text()


def sample(card):
    """The code sample of a card, and a line that prints what it makes."""
    (code,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    return code + "print(features.shape)"


# === What it says ===


def test_the_hub_reads_what_is_stated(backbone, tmp_path):
    backbone.save_to_preset(tmp_path / "clothes", card=STATED)
    card = ModelCard(read(tmp_path / "clothes"))
    data = card.data
    assert data.library_name == "keras_vit22b"
    assert data.pipeline_tag == "image-feature-extraction"
    assert data.tags == ["keras", "vision-transformer"]
    assert data.license == "cc-by-4.0"
    assert data.model_name == "clothes"
    for result, metric in zip(data.eval_results, STATED["metrics"]):
        for name, value in metric.items():
            assert getattr(result, name) == value
    assert len(data.eval_results) == 2
    assert card.text.strip().startswith("# clothes\n")
    for text in (
        f"| parameters | {backbone.count_params():,}, float32 |",
        "| blocks | 2, parallel, of width 8 |",
        "| image | 8 x 12 x 3, in patches of 4 x 4 |",
        "| head | none |",
        "`image_size=[8, 12]`",
        f"## Training data\n\n{STATED['training_data']}\n",
        f"## Limits\n\n{STATED['limits']}\n",
        "| MNIST: test | linear probe, 5 labels a class | 0.93 |",
    ):
        assert text in card.text
    metadata = json.loads((tmp_path / "clothes/metadata.json").read_text())
    assert metadata["card"] == STATED


def test_what_nobody_stated_is_not_stated(make_backbone, tmp_path):
    classifier = ViT22BImageClassifier(make_backbone(), 5)
    classifier.save_to_preset(tmp_path)
    card = ModelCard(read(tmp_path))
    assert card.text.count("Not stated.") == 3
    assert card.data.license is None
    assert card.data.eval_results is None
    assert "| head | 5 classes |" in card.text
    assert "No preprocessing is stored" in card.text
    assert "card" not in json.loads((tmp_path / "metadata.json").read_text())


@pytest.mark.parametrize("converts", [True, False])
def test_its_code_works_in_the_folder(backbone, tmp_path, converts):
    if not converts:
        backbone.image_converter = None
    backbone.save_to_preset(tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", sample(read(tmp_path))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.stdout.splitlines()[-1:] == ["(2, 8)"], process.stderr


@pytest.mark.parametrize(
    "card, message",
    [
        ({"licence": "mit"}, "unknown field 'licence'"),
        ({"license": 3}, "license = 3"),
        ({"training_data": ["photos"]}, "training_data = "),
        ({"limits": "x" * 100_001}, "limits = "),
        ({"metrics": METRIC}, "metrics = "),
        ({"metrics": ["accuracy"]}, "'metrics' must be an object"),
        ({"metrics": [METRIC | {"metric_value": "0.9"}]}, "metric_value = '0."),
        ({"metrics": [METRIC | {"metric_value": True}]}, "metric_value = True"),
        ({"metrics": [{"metric_value": 1}]}, "missing field 'dataset_name'"),
        ({"metrics": [METRIC | {"metric_value": float("nan")}]}, "cannot be"),
        ("mit", "'card' must be an object"),
    ],
    ids=str,
)
def test_a_card_that_cannot_be_is_refused_before_the_save(
    backbone, tmp_path, card, message
):
    with pytest.raises(ValueError, match=message):
        backbone.save_to_preset(tmp_path / "preset", card=card)
    assert not (tmp_path / "preset").exists()


def test_the_record_of_a_probe_gives_metrics(backbone, tmp_path):
    scores = {"1": {"mean": 0.81234, "std": 0.1}, "5": {"mean": 0.9, "std": 0}}
    record = {
        "preset": "clothes",
        "data": {"name": "digits"},
        "accuracy": {
            "frozen features": scores,
            "raw pixels": {n: {"mean": 0.5} for n in scores},
        },
    }
    backbone.save_to_preset(tmp_path, card={"metrics": card_metrics(record)})
    results = ModelCard(read(tmp_path)).data.eval_results
    assert [r.metric_value for r in results] == [0.8123, 0.9]
    assert results[1].dataset_name == "digits"
    assert "5-shot (raw pixels: 0.500)" in read(tmp_path)
    for broken in ({}, [], {"accuracy": {}}, record | {"data": None}):
        with pytest.raises(ValueError, match="keras-vit22b probe"):
            card_metrics(broken)


# === Saved again ===


def test_a_card_that_nobody_edited_is_that_of_the_last_save(
    backbone, make_backbone, tmp_path
):
    backbone.save_to_preset(tmp_path, card=STATED)
    other = make_backbone(num_layers=1)
    other.save_to_preset(tmp_path)
    assert "| blocks | 1, parallel" in read(tmp_path)
    assert "clothes" not in read(tmp_path)
    other.save_to_preset(tmp_path, card={"limits": "None known."})
    assert "None known." in read(tmp_path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("Not stated.", "Photos.", 1),
        lambda text: text + "More.\n",
        lambda text: text.split("<!--")[0],
        lambda text: "Mine.\n",
        lambda text: "",
    ],
    ids=["replaced", "appended", "unmarked", "own", "empty"],
)
def test_a_card_that_was_edited_stays(backbone, make_backbone, tmp_path, edit):
    backbone.save_to_preset(tmp_path)
    edited = edit(read(tmp_path))
    (tmp_path / "README.md").write_text(edited)
    make_backbone(num_layers=1).save_to_preset(tmp_path)
    assert read(tmp_path) == edited
    metadata = (tmp_path / "metadata.json").read_bytes()
    with pytest.raises(ValueError, match="README.md was edited and is kept"):
        backbone.save_to_preset(tmp_path, card=STATED)
    assert (tmp_path / "metadata.json").read_bytes() == metadata
    (tmp_path / "README.md").unlink()
    backbone.save_to_preset(tmp_path, card=STATED)
    assert ModelCard(read(tmp_path)).data.license == "cc-by-4.0"


def test_a_card_that_is_no_text_stays(backbone, tmp_path):
    (tmp_path / "README.md").write_bytes(b"\xff\xfe")
    backbone.save_to_preset(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == b"\xff\xfe"
