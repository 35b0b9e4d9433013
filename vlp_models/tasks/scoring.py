"""What the tasks share in scoring: baselines, the control with blanked images, and what the training split held."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.tables import read_table
from vlp_models.metrics.bootstrap import paired
from vlp_models.metrics.score import Score

Prediction = Mapping[str, Any]
BLANKED = "image blanked"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where scores are of.

    source     the dataset
    validated  the folder of the validated tables, for baselines and ground truth
    neighbours image ids -> for each the training images of the dataset that look most alike, nearest first; nothing
               where nobody knows
    progress   is told what is being worked out
    """

    source: str
    validated: Path
    neighbours: Callable[[Sequence[str]], Mapping[str, Sequence[str]]] = lambda image_ids: {}
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """baselines: metric -> baseline name -> value in percent."""

    scores: list[Score]
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)


def by_metric(scores: Mapping[str, Sequence[Score]]) -> dict[str, dict[str, float]]:
    """Baseline name -> its scores, turned round for `Scored.baselines`."""
    result: dict[str, dict[str, float]] = {}
    for name, several in scores.items():
        for score in several:
            if score.value is not None:
                result.setdefault(score.metric, {})[name] = round(score.value, 4)
    return result


def variant(score: Score, name: str) -> Score:
    """The score of a variant of the model, which no gate looks at: `CIDEr (greedy)`."""
    return replace(score, metric=f"{score.metric} ({name})", kept=False)


def blank_control(score: Score, blank: Score) -> list[Score]:
    """What text alone can do, and how much the image adds to it."""
    return [variant(blank, BLANKED), *gain_over(score, blank, f"gain over {BLANKED}")]


def gain_over(score: Score, other: Score, metric: str) -> list[Score]:
    """The difference of two scores of the same items as a score `metric` of its own, which no gate looks at. None where
    one of them could not be computed."""
    if score.value is None or other.value is None or not score.evidence or not other.evidence:
        return []
    gain = paired(score.evidence, other.evidence)
    return [Score(metric=metric, value=score.value - other.value, n=score.n, evidence=gain, kept=False)]


def own_id(identifier: str) -> int | str:
    """The id within its source; a number where it is one, as COCO and VQA have it."""
    own = identifier.partition("/")[2]
    return int(own) if own.isascii() and own.isdigit() and len(own) < 19 else own


def train_rows(table: str, place: Place, columns: Sequence[str]) -> pa.Table:
    """These columns of a table's rows, of the dataset's train split."""
    images = read_table("images", place.validated, columns=["image_id", "source", "split"])
    chosen = pc.and_(pc.equal(images["source"], place.source), pc.equal(images["split"], "train"))
    ids = images.filter(chosen)["image_id"].combine_chunks()
    rows = read_table(table, place.validated, columns=["image_id", *columns])
    return rows.filter(pc.is_in(rows["image_id"], value_set=ids))


def read_truth(path: Path, image_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Image id -> scene graph, for those of `image_ids` whose scene is known."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as lines:
        scenes = (json.loads(line) for line in lines)
        return {scene["image_id"]: scene for scene in scenes if scene["image_id"] in image_ids and "objects" in scene}
