"""Whether a classifier serves groups of people, or of images, alike."""

import numpy as np


def group_report(predictions, labels, groups, *, positive=None):
    """Return accuracies and rates of each group, and their gaps.

    Args:
        predictions: `(n,)`, integers or strings.
        labels: `(n,)`, likewise.
        groups: `(n,)`, integers or strings: any column of a file of labels.
        positive: the label that counts as positive. Defaults to `None`: of two
            classes the larger, and of more none, so that there are no rates.

    Returns:
        A dict of `"groups"`, from each group to `"images"`, `"accuracy"` and,
        with a positive label, `"positive_rate"`, `"true_positive_rate"` and
        `"false_positive_rate"` (NaN where there is no such image); and
        `"gaps"`, the largest less the least of groups: `"accuracy"`,
        `"demographic_parity"` (of positive rates), `"equal_opportunity"` (of
        true positive rates) and `"equalised_odds"` (the larger of the gaps of
        both rates). And `"accuracy"` of all, and `"worst_group"`.

    Raises:
        ValueError: if lengths differ, or the positive label is none of the
            labels.

    Reference:
        [Hardt et al., 2016](https://arxiv.org/abs/1610.02413).
    """
    predictions, labels, groups = map(np.asarray, (predictions, labels, groups))
    if (
        labels.ndim != 1
        or not predictions.shape == labels.shape == groups.shape
        or not len(labels)
    ):
        raise ValueError(
            "Expected as many predictions, labels and groups. Received shapes "
            f"{predictions.shape}, {labels.shape} and {groups.shape}."
        )
    classes = np.unique(np.concatenate([labels, predictions]))
    if positive is None and len(classes) == 2:
        positive = classes[1]
    elif positive is not None and positive not in classes:
        raise ValueError(
            f"positive must be one of {classes.tolist()}. Received: "
            f"{positive!r}."
        )
    rows = {
        str(group): _rates(
            predictions[groups == group], labels[groups == group], positive
        )
        for group in np.unique(groups)
    }
    gaps = {"accuracy": _gap(rows, "accuracy")}
    if positive is not None:
        gaps["demographic_parity"] = _gap(rows, "positive_rate")
        gaps["equal_opportunity"] = _gap(rows, "true_positive_rate")
        gaps["equalised_odds"] = max(
            gaps["equal_opportunity"], _gap(rows, "false_positive_rate")
        )
    return {
        "accuracy": float((predictions == labels).mean()),
        "groups": rows,
        "gaps": gaps,
        "worst_group": min(rows, key=lambda group: rows[group]["accuracy"]),
    }


def _rates(predictions, labels, positive):
    row = {
        "images": len(labels),
        "accuracy": float((predictions == labels).mean()),
    }
    if positive is None:
        return row
    chosen, is_positive = predictions == positive, labels == positive
    return row | {
        "positive_rate": _mean(chosen),
        "true_positive_rate": _mean(chosen[is_positive]),
        "false_positive_rate": _mean(chosen[~is_positive]),
    }


def _mean(values):
    return float(values.mean()) if len(values) else float("nan")


def _gap(rows, name):
    """Return the largest less the least, NaN if one is not known."""
    values = [row[name] for row in rows.values()]
    return float(np.max(values) - np.min(values))
