"""Answers of people and models to images, as CSV files of model-vs-human.

One file a subject and session, with the columns `subj`, `session`, `trial`,
`rt`, `object_response`, `category`, `condition` and `imagename`, whatever their
case. What differs between files of people and of models is made alike: see
`read_responses`.
"""

import csv
import dataclasses
import pathlib

import numpy as np

from keras_vit22b.evaluation import human_alignment
from keras_vit22b.weights.preset_folder import replacing_file

COLUMNS = (
    *("subj", "session", "trial", "rt", "object_response"),
    *("category", "condition", "imagename"),
)
# Who did not answer in time.
NO_ANSWER = "na"
NO_CONDITION = "0"


@dataclasses.dataclass(frozen=True)
class Responses:
    """Answers, as arrays of strings `(n,)`.

    Attributes:
        subject: who answered.
        session: of the experiment.
        condition: how images were changed: a number without trailing zeros, or
            a word in lower case; `"0"` if there is none.
        category: the right answer; where cues conflict, the shape's.
        answer: what was answered; `"na"` for none in time.
        image: which image it was: its name without what is particular to the
            subject.
    """

    subject: np.ndarray
    session: np.ndarray
    condition: np.ndarray
    category: np.ndarray
    answer: np.ndarray
    image: np.ndarray

    def __post_init__(self):
        for field in dataclasses.fields(self):
            values = np.asarray(getattr(self, field.name), str)
            if values.ndim != 1 or len(values) != len(self.subject):
                raise ValueError(
                    f"{field.name} must have {len(self.subject)} values. "
                    f"Received shape {values.shape}."
                )
            object.__setattr__(self, field.name, values)

    def __len__(self):
        return len(self.subject)

    @property
    def correct(self):
        """bool array `(n,)`. Whether the answer is the category."""
        return self.answer == self.category

    @property
    def texture(self):
        """array `(n,)`. The texture's class, where cues conflict.

        As images are named: of `dog10-bird2.png`, it is `bird`.
        """
        return np.array([_texture(name) for name in self.image], str)

    def choose(self, rows):
        """Return some answers.

        Args:
            rows: bool array `(n,)`.
        """
        return Responses(
            **{
                field.name: getattr(self, field.name)[rows]
                for field in dataclasses.fields(self)
            }
        )

    def of(self, subject):
        """Return the answers of one subject, of all sessions.

        Raises:
            ValueError: if there is none. It names those there are.
        """
        rows = self.subject == subject
        if not rows.any():
            raise ValueError(
                f"There is no subject {subject!r}; there are "
                f"{', '.join(np.unique(self.subject))}."
            )
        return self.choose(rows)

    def shape_bias(self):
        """Return `human_alignment.shape_bias` of these answers."""
        return human_alignment.shape_bias(
            self.category, self.texture, self.answer
        )


def read_responses(path):
    """Read one CSV file, or all of a folder.

    Headers are read in any case. Of a condition, `0.00` and `0.0` are `0`,
    `True` and `true` are `true`, and `NaN`, which models have where people have
    `0`, is `0`. An image's name is what is the same for all subjects: the last
    part of `0001_s5n_s01_0_bird_00_bird3-bird2.png`, or the last two where the
    first of them is a WordNet number, `n01558993_1234.png`.

    Args:
        path: path of a file, or of a folder of them.

    Returns:
        `Responses`.

    Raises:
        ValueError: if there is no file, or one has other columns or lines, or
            a subject answers to an image twice in a condition.
    """
    path = pathlib.Path(path).expanduser()
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no CSV file.")
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise ValueError(f"{path} holds no answers.")
    responses = Responses(
        subject=[row["subj"] for row in rows],
        session=[row["session"] for row in rows],
        condition=[_condition(row["condition"]) for row in rows],
        category=[row["category"] for row in rows],
        answer=[row["object_response"] for row in rows],
        image=[_image(row["imagename"]) for row in rows],
    )
    keys = list(zip(responses.subject, responses.condition, responses.image))
    if len(set(keys)) < len(keys):
        seen = set()
        twice = next(key for key in keys if key in seen or seen.add(key))
        subject, condition, image = map(str, twice)
        raise ValueError(
            f"{path} has two answers of {subject!r} to {image!r} in condition "
            f"{condition!r}."
        )
    return responses


def write_responses(path, responses):
    """Write answers as a CSV file that `read_responses` and others read.

    Args:
        path: path of the file.
        responses: `Responses`. Of a model, so that times are `NaN`.
    """
    with (
        replacing_file(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for trial in range(len(responses)):
            writer.writerow(
                [
                    responses.subject[trial],
                    responses.session[trial],
                    trial + 1,
                    "NaN",
                    responses.answer[trial],
                    responses.category[trial],
                    responses.condition[trial],
                    responses.image[trial],
                ]
            )


def compare(ours, theirs):
    """Compare answers of two subjects to the same images.

    Args:
        ours: `Responses` of one subject.
        theirs: `Responses` of another.

    Returns:
        A dict of `"accuracy"` and `"other_accuracy"`, `"accuracy_difference"`
        (squared), `"observed"`, `"expected"` and `"kappa"`, each the mean over
        conditions, and `"conditions"`, their number.

    Raises:
        ValueError: if they did not see the same images. It names one.
    """
    tables = [_by_image(responses) for responses in (ours, theirs)]
    if tables[0].keys() != tables[1].keys():
        keys = sorted(tables[0].keys() ^ tables[1].keys())
        condition, image = map(str, keys[0])
        raise ValueError(
            "Both must have answered to the same images; only one did to "
            f"{image!r} in condition {condition!r}."
        )
    results = []
    for condition in sorted({condition for condition, _ in tables[0]}):
        images = [key for key in tables[0] if key[0] == condition]
        first, second = (
            np.array([table[key] for key in images]) for table in tables
        )
        results.append(
            {
                "accuracy": first.mean(),
                "other_accuracy": second.mean(),
                "accuracy_difference": human_alignment.accuracy_difference(
                    first, second
                ),
                **human_alignment.error_consistency(first, second),
            }
        )
    return {
        **{
            name: float(np.mean([r[name] for r in results]))
            for name in results[0]
        },
        "conditions": len(results),
    }


def _by_image(responses):
    subjects = np.unique(responses.subject)
    if len(subjects) != 1:
        raise ValueError(
            "Expected answers of one subject. Received those of "
            f"{', '.join(subjects) or 'none'}; Responses.of chooses one."
        )
    keys = zip(responses.condition, responses.image)
    return dict(zip(keys, responses.correct))


def _rows(path):
    """Yield each line as a dict, with names of columns in lower case."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read {path}: {error}.") from None
    reader = csv.reader(text.splitlines())
    header = [name.strip().lower() for name in next(reader, [])]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ValueError(
            f"{path} has no columns {', '.join(missing)}. It has "
            f"{', '.join(header) or 'none'}."
        )
    for values in reader:
        if not values:
            continue
        if len(values) != len(header):
            raise ValueError(
                f"{path}, line {reader.line_num}: expected {len(header)} "
                f"values, received {len(values)}."
            )
        yield dict(zip(header, map(str.strip, values)))


def _condition(text):
    text = text.lower()
    if text in ("nan", "", "na", "none"):
        return NO_CONDITION
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _image(name):
    parts = name.split("_")
    count = 2 if len(parts) > 1 and parts[-2].startswith("n0") else 1
    return "_".join(parts[-count:])


def _texture(image):
    name = image.split("_")[-1].split(".")[0].split("-")[-1]
    return "".join(letter for letter in name if not letter.isdigit())
