"""NLVR (Suhr et al., 2017) and NLVR2 (Suhr et al., 2019): accuracy over statements about a picture or two, consistency
over sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vlp_models.metrics.score import Score, mean_score


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A statement about one image or two, and what the model says of it.

    group: the sentence; in NLVR v1 all pictures of it and all six permutations of each, in NLVR2 its pairs of a set.
    item: the statement's id.
    """

    group: str
    label: bool
    prediction: bool
    item: str = ""


def score_nlvr(judgements: Sequence[Judgement], name: str = "accuracy") -> list[Score]:
    """accuracy: share of (statement, image) pairs judged right. consistency: share of groups judged right in every
    pair. Both as the scripts of the NLVR repository count them."""
    right = [judgement.label == judgement.prediction for judgement in judgements]
    groups = [judgement.group for judgement in judgements]
    whole: dict[str, bool] = {}
    for group, correct in zip(groups, right, strict=True):
        whole[group] = whole.get(group, True) and correct
    consistency = name.replace("accuracy", "consistency")
    return [
        mean_score(name, [float(correct) for correct in right], groups, items=[j.item for j in judgements]),
        mean_score(consistency, [float(correct) for correct in whole.values()], list(whole)),
    ]


def majority_label(labels: Iterable[bool]) -> bool:
    """The commoner label; true among equals."""
    values = list(labels)
    return 2 * sum(values) >= len(values)


def official_csv(rows: Iterable[tuple[str, bool]]) -> str:
    """Predictions as the official scripts read them: NLVR's `metrics_images.py` one image a line,
    `dev-12-0-3.png,true`; NLVR2's one identifier a line, `dev-850-0-0,true`. Upper and lower case are one to both."""
    return "".join(f"{image},{str(prediction).lower()}\n" for image, prediction in rows)
