"""Shape bias and error consistency on cases worked out by hand."""

import csv

import numpy as np
import pytest

from keras_vit22b.evaluation import Responses
from keras_vit22b.evaluation import accuracy_difference
from keras_vit22b.evaluation import compare
from keras_vit22b.evaluation import error_consistency
from keras_vit22b.evaluation import read_responses
from keras_vit22b.evaluation import shape_bias
from keras_vit22b.evaluation import sixteen_class_names
from keras_vit22b.evaluation import sixteen_class_probabilities
from keras_vit22b.evaluation import write_responses

pytestmark = pytest.mark.any_backend


@pytest.mark.parametrize("shape, expected", [(13, 0.8125), (4, 0.25)])
def test_bias_is_the_share_of_shapes(shape, expected):
    answers = ["cat"] * shape + ["dog"] * (16 - shape) + ["car"] * 5
    found = shape_bias(["cat"] * 21, ["dog"] * 21, answers)
    assert found["pooled"] == found["class_averaged"] == expected
    assert (found["shape"], found["texture"]) == (shape, 16 - shape)
    assert found["images"] == 21 and found["reason"] is None


def test_both_averages_are_over_what_they_say():
    """Cats: 3 of 4 by shape. Dogs: 1 of 1."""
    shapes = ["cat"] * 4 + ["dog"]
    textures = ["dog"] * 4 + ["car"]
    found = shape_bias(shapes, textures, ["cat"] * 3 + ["dog"] + ["dog"])
    assert found["pooled"] == 4 / 5
    assert found["by_class"] == {"cat": 0.75, "dog": 1.0}
    assert found["class_averaged"] == 0.875


def test_images_without_a_conflict_do_not_count():
    found = shape_bias(["cat", "cat"], ["cat", "dog"], ["cat", "dog"])
    assert found["pooled"] == 0 and found["images"] == 1


def test_no_answer_of_either_kind_is_no_bias():
    found = shape_bias(["cat"] * 3, ["dog"] * 3, ["car", "na", "oven"])
    assert np.isnan(found["pooled"]) and np.isnan(found["class_averaged"])
    assert found["reason"].startswith("none of 3 answers")


def test_consistency_is_cohens_kappa():
    from sklearn.metrics import cohen_kappa_score

    generator = np.random.default_rng(0)
    correct, other = generator.random((2, 50)) < [[0.7], [0.4]]
    found = error_consistency(correct, other)
    expected = 0.0
    for value in (True, False):
        expected += (correct == value).mean() * (other == value).mean()
    assert found["observed"] == (correct == other).mean()
    assert found["expected"] == pytest.approx(expected)
    assert found["kappa"] == pytest.approx(cohen_kappa_score(correct, other))


def test_consistency_has_its_identities():
    half = np.array([True, False] * 4)
    assert error_consistency(half, half)["kappa"] == 1
    assert error_consistency([True] * 3, [True] * 3)["kappa"] == 1
    assert error_consistency(half, ~half)["kappa"] == -1
    # Independent: each pair of outcomes as often as any other.
    chance = error_consistency([1, 1, 0, 0], [1, 0, 1, 0])
    assert chance == {"observed": 0.5, "expected": 0.5, "kappa": 0.0}
    assert accuracy_difference([1, 1, 1, 0], [1, 0, 0, 0]) == 0.25
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\)"):
        error_consistency([True], [True, False])


def test_a_class_has_the_mean_of_its_members():
    names = sixteen_class_names()
    assert len(names) == 16 and names == sorted(names)
    probabilities = np.full((2, 1000), 0.5 / 999)
    probabilities[0, 404] = 0.5  # An airliner.
    probabilities[1, 151:269] = 0.5 / 118  # Dogs, most of them of the class.
    found = sixteen_class_probabilities(probabilities)
    assert found.shape == (2, 16)
    assert names[found[0].argmax()] == "airplane"
    assert found[0, names.index("airplane")] == 0.5
    assert found[1, names.index("dog")] == pytest.approx(0.5 / 118)
    with pytest.raises(ValueError, match=r"\(n, 1000\).*\(2, 16\)"):
        sixteen_class_probabilities(found)


HUMAN = """subj,session,trial,rt,object_response,category,condition,imagename
subject-01,1,1,0.9,cat,cat,0,0001_cue_s01_0_cat_00_cat1-dog2.png
subject-01,1,2,1.1,dog,cat,0,0002_cue_s01_0_cat_00_cat2-dog1.png
subject-01,1,3,NaN,na,dog,0,0003_cue_s01_0_dog_00_dog1-cat3.png
"""
HUMAN_2 = """subj,Session,trial,rt,object_response,category,condition,imagename
subject-01,2,1,0.8,dog,dog,0,0001_cue_s01_0_dog_00_dog2-car1.png
subject-01,2,2,0.7,car,car,0,0002_cue_s01_0_car_00_car2-car1.png
"""
MODEL = """Subj,Session,Trial,RT,object_response,category,condition,imagename
my-model,1,1,NaN,dog,cat,NaN,cat1-dog2.png
my-model,1,2,NaN,dog,cat,NaN,cat2-dog1.png
my-model,1,3,NaN,cat,dog,NaN,dog1-cat3.png
my-model,1,4,NaN,dog,dog,NaN,dog2-car1.png
my-model,1,5,NaN,oven,car,NaN,car2-car1.png
"""


@pytest.fixture
def folder(tmp_path):
    """Two sessions of one who saw five images, and a model."""
    for name, text in (
        ("cue-conflict_subject-01_session_1.csv", HUMAN),
        ("cue-conflict_subject-01_session_2.csv", HUMAN_2),
        ("cue-conflict_my-model_session-1.csv", MODEL),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_of_people_and_models_give_hand_computed_numbers(folder):
    responses = read_responses(folder)
    assert len(responses) == 10
    human, model = responses.of("subject-01"), responses.of("my-model")
    assert set(human.session) == {"1", "2"} and set(human.condition) == {"0"}
    assert human.texture.tolist() == ["dog", "dog", "cat", "car", "car"]
    # By shape: cat1, dog2; by texture: cat2. One gave no answer, and the car
    # with a car's texture does not count.
    assert human.shape_bias()["pooled"] == 2 / 3
    assert model.shape_bias()["pooled"] == 1 / 4
    found = compare(human, model)
    # Right: 1 0 0 1 1 and 0 0 0 1 0.
    assert found["accuracy"] == 3 / 5 and found["other_accuracy"] == 1 / 5
    assert found["observed"] == 3 / 5
    expected = 3 / 5 * 1 / 5 + 2 / 5 * 4 / 5
    assert found["expected"] == pytest.approx(expected)
    kappa = (3 / 5 - expected) / (1 - expected)
    assert found["kappa"] == pytest.approx(kappa)
    assert found["accuracy_difference"] == pytest.approx(0.16)
    assert found["conditions"] == 1


def line(subject, answer, condition, name, category="bear"):
    return f"{subject},1,1,NaN,{answer},{category},{condition},{name}\n"


def test_conditions_and_images_are_made_alike(tmp_path):
    header = (
        "subj,session,trial,rt,object_response,category,condition,imagename\n"
    )
    name = "n02132136_17.png"
    (tmp_path / "human.csv").write_text(
        header
        + line("h", "bear", "0.00", f"0001_no_s01_0_bear_10_{name}")
        + line("h", "cat", "0.03", f"0002_no_s01_0_bear_10_{name}")
        + line("h", "cat", "true", f"0003_no_s01_0_bear_10_{name}")
    )
    (tmp_path / "model.csv").write_text(
        header
        + line("m", "bear", "0.0", name)
        + line("m", "bear", "0.03", name)
        + line("m", "bear", "True", name)
    )
    responses = read_responses(tmp_path)
    assert set(responses.image) == {name}
    assert set(responses.condition) == {"0", "0.03", "true"}
    found = compare(responses.of("h"), responses.of("m"))
    assert found["conditions"] == 3
    # Agreement in one of three, so kappa is the mean of 1, 0 and 0.
    assert found["observed"] == pytest.approx(1 / 3)
    assert found["kappa"] == pytest.approx(1 / 3)


def test_what_is_written_is_read(folder, tmp_path):
    model = read_responses(folder).of("my-model")
    path = tmp_path / "new" / "cue-conflict_my-model_session-1.csv"
    write_responses(path, model)
    again = read_responses(path)
    for name in ("subject", "condition", "category", "answer", "image"):
        assert getattr(again, name).tolist() == getattr(model, name).tolist()
    with path.open() as file:
        first = next(csv.DictReader(file))
    assert first["rt"] == "NaN" and first["trial"] == "1"


def test_broken_files_are_errors(folder, tmp_path):
    with pytest.raises(
        ValueError, match="no subject 'x'; there are my-model, "
    ):
        read_responses(folder).of("x")
    responses = read_responses(folder)
    with pytest.raises(ValueError, match="Responses.of chooses one"):
        compare(responses, responses)
    some = responses.of("my-model").choose(np.arange(5) < 4)
    with pytest.raises(ValueError, match="only one did to 'car2-car1.png'"):
        compare(responses.of("subject-01"), some)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no CSV file"):
        read_responses(empty)
    bad = empty / "bad.csv"
    for text, message in (
        ("", "no columns subj, .*It has none"),
        ("subj,session\na,1\n", "no columns trial, rt"),
        (HUMAN + "a,b\n", "line 5: expected 8 values, received 2"),
        (HUMAN + HUMAN.splitlines()[1] + "\n", "two answers of 'subject-01'"),
        (HUMAN.splitlines()[0], "holds no answers"),
    ):
        bad.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_responses(bad)
    with pytest.raises(ValueError, match="answer must have 1 values"):
        Responses(["a"], ["1"], ["0"], ["cat"], [], ["x.png"])
