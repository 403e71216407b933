"""Whether a model sees as people do: shape bias and error consistency.

Every function takes plain arrays; `responses.py` reads and writes the files in
which people's answers come.
"""

import functools
import importlib.resources
import json

import numpy as np


@functools.cache
def _sixteen_classes():
    file = importlib.resources.files(__package__) / "data/sixteen_classes.json"
    return json.loads(file.read_text("utf-8"))["classes"]


def sixteen_class_names():
    """Return the names of the 16 classes that people chose from, sorted."""
    return sorted(_sixteen_classes())


def sixteen_class_probabilities(probabilities):
    """Return probabilities of 16 classes from those of ImageNet's 1,000.

    Each is the mean over its members, of which "dog" has 109 and "airplane"
    one. So they sum to less than 1; the largest is the answer.

    Args:
        probabilities: `(n, 1000)`. The softmax over all classes.

    Returns:
        A float64 array `(n, 16)`, in the order of `sixteen_class_names`.

    Raises:
        ValueError: if there are not 1,000 classes.

    Reference:
        [Geirhos et al., 2018](https://arxiv.org/abs/1808.08750).
    """
    probabilities = np.asarray(probabilities, "float64")
    if probabilities.ndim != 2 or probabilities.shape[1] != 1000:
        raise ValueError(
            "Expected probabilities (n, 1000), of ImageNet's classes. Received "
            f"shape {probabilities.shape}."
        )
    classes = _sixteen_classes()
    return np.stack(
        [probabilities[:, classes[n]].mean(1) for n in sixteen_class_names()],
        axis=1,
    )


def shape_bias(shapes, textures, answers):
    """Return how often an answer is the shape, of those that are either.

    Images whose shape and texture are of one class do not count, nor do other
    answers.

    Args:
        shapes: sequence of `n` strings. The class of each image's shape.
        textures: sequence of `n` strings. That of its texture.
        answers: sequence of `n` strings.

    Returns:
        A dict of `"pooled"`, over images; `"class_averaged"`, the mean over
        shapes' classes; `"by_class"`; the counts `"shape"`, `"texture"` and
        `"images"`; and `"reason"`. A bias of no answers is NaN, and `"reason"`
        says so; else it is `None`.

    Raises:
        ValueError: if lengths differ.

    Reference:
        [Geirhos et al., 2019](https://arxiv.org/abs/1811.12231).
    """
    shapes, textures, answers = map(np.asarray, (shapes, textures, answers))
    if not shapes.shape == textures.shape == answers.shape or shapes.ndim != 1:
        raise ValueError(
            "Expected as many shapes, textures and answers. Received shapes "
            f"{shapes.shape}, {textures.shape} and {answers.shape}."
        )
    conflict = shapes != textures
    is_shape = conflict & (answers == shapes)
    is_texture = conflict & (answers == textures)
    by_class = {
        str(name): _ratio(is_shape[shapes == name], is_texture[shapes == name])
        for name in np.unique(shapes[conflict])
    }
    known = [value for value in by_class.values() if not np.isnan(value)]
    reason = None
    if not known:
        reason = (
            f"none of {len(answers)} answers is the shape or the texture of an "
            "image that has two"
        )
    return {
        "pooled": _ratio(is_shape, is_texture),
        "class_averaged": float(np.mean(known)) if known else float("nan"),
        "by_class": by_class,
        "shape": int(is_shape.sum()),
        "texture": int(is_texture.sum()),
        "images": int(conflict.sum()),
        "reason": reason,
    }


def _ratio(is_shape, is_texture):
    total = is_shape.sum() + is_texture.sum()
    return float(is_shape.sum() / total) if total else float("nan")


def error_consistency(correct, other):
    """Return whether two make their errors on the same images.

    Args:
        correct: bool array `(n,)`. Which images one has right.
        other: bool array `(n,)`. Which the other has right.

    Returns:
        A dict of `"observed"`, the share of images on which both are right or
        both wrong; `"expected"`, that of independent ones of these accuracies;
        and `"kappa"`, `(observed - expected) / (1 - expected)`: 1 if they
        always agree, 0 if as by chance.

    Raises:
        ValueError: if lengths differ, or there are no images.

    Reference:
        [Geirhos et al., 2020](https://arxiv.org/abs/2006.16736).
    """
    correct, other = np.asarray(correct, bool), np.asarray(other, bool)
    if correct.ndim != 1 or correct.shape != other.shape or not len(correct):
        raise ValueError(
            "Expected two arrays of as many images. Received shapes "
            f"{correct.shape} and {other.shape}."
        )
    observed = float((correct == other).mean())
    first, second = correct.mean(), other.mean()
    expected = float(first * second + (1 - first) * (1 - second))
    kappa = 1.0
    if observed < 1:
        kappa = (observed - expected) / (1 - expected)
    return {"observed": observed, "expected": expected, "kappa": kappa}


def accuracy_difference(correct, other):
    """Return the square of the difference of two accuracies, 0 to 1.

    Args:
        correct: bool array. Which images one has right.
        other: bool array. Which the other has right.
    """
    return float((np.mean(correct) - np.mean(other)) ** 2)
