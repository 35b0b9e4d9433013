"""Scoring helpers that the tasks share: baselines, the blind baseline, and rows of the training split."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import ParamsError
from vlp_models.metrics import METRICS
from vlp_models.metrics.bootstrap import paired
from vlp_models.metrics.extra import load_metric
from vlp_models.metrics.score import STATISTICS, ItemScores, Score, Statistic, read_items
from vlp_models.tasks import TASKS, task_class

if TYPE_CHECKING:
    import pyarrow as pa

    from vlp_models.metrics.caption import SharedMeteor
    from vlp_models.metrics.consensus import ConsensusCaptions

Prediction = Mapping[str, Any]
Baselines = dict[str, dict[str, Score | float]]
BLIND = "blind baseline"  # the same model with every image blanked
CHANCE, MAJORITY = "chance", "majority label"
CONSTANT, NEAREST = "constant caption", "nearest-neighbor caption"


@dataclass(frozen=True, kw_only=True)
class EvalContext:
    """The dataset that is being scored, and what baselines may read.

    source        name of the dataset
    validated     folder of the validated tables: training rows for baselines, ground truth of synthetic scenes
    nearest       image ids -> the most similar training images of each, nearest first; empty if there are no features
    progress      called with a short description of the current step
    meteor        a METEOR process for all datasets and splits, started by the first captions to score; None: one each
    consensus     dataset -> its training captions, compared once for all splits (filled by captioning)
    """

    source: str
    validated: Path
    nearest: Callable[[Sequence[str]], Mapping[str, Sequence[str]]] = lambda image_ids: {}
    progress: Callable[[str], None] = lambda text: None
    meteor: SharedMeteor | None = None
    consensus: dict[str, ConsensusCaptions] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of one dataset and split; baselines: metric -> baseline name -> its score or a constant."""

    scores: list[Score]
    baselines: Baselines = field(default_factory=dict)

    def baseline_values(self, metric: str) -> dict[str, float]:
        """Return the values of a metric's baselines in percent, by name."""
        values = {name: b.value if isinstance(b, Score) else b for name, b in self.baselines.get(metric, {}).items()}
        return {name: round(value, 4) for name, value in values.items() if value is not None}


def baselines_by_metric(scores: Mapping[str, Sequence[Score]]) -> Baselines:
    """Turn {baseline: its scores} into {metric: {baseline: score}}, the form of `TaskScores.baselines`."""
    result: Baselines = {}
    for name, baseline_scores in scores.items():
        for score in baseline_scores:
            if score.value is not None:
                result.setdefault(score.metric, {})[name] = score
    return result


def with_suffix(score: Score, name: str) -> Score:
    """Return the score under `METRIC (NAME)`, such as `CIDEr (greedy)`, not kept per item and so invisible to gates."""
    return replace(score, metric=f"{score.metric} ({name})", kept=False)


def blind_baseline(score: Score, blind: Score) -> list[Score]:
    """Return the blind model's score and the gain over it: what text alone achieves, and what the image adds."""
    return [with_suffix(blind, BLIND), *gain_over(score, blind, f"gain over {BLIND}")]


def gain_over(score: Score, other: Score, metric: str) -> list[Score]:
    """Return the paired difference of two scores of the same items as a score named `metric`, invisible to gates.

    The list is empty if either could not be computed.
    """
    if score.value is None or other.value is None or not score.evidence or not other.evidence:
        return []
    # Both sides are resampled with the same draws, so the interval is that of the difference.
    gain = paired(score.evidence, other.evidence)
    return [Score(metric=metric, value=score.value - other.value, n=score.n, evidence=gain, kept=False)]


def id_in_source(identifier: str) -> int | str:
    """Return the id without the dataset's prefix; as an int where it is one, as in COCO and VQA."""
    short_id = identifier.partition("/")[2]
    # 18 digits fit into 64 bits in any case; a longer number stays text.
    is_int64 = short_id.isascii() and short_id.isdigit() and len(short_id) < 19
    return int(short_id) if is_int64 else short_id


def read_train_rows(table: str, context: EvalContext, columns: Sequence[str]) -> pa.Table:
    """Read these columns of a table for the training images of the context's dataset."""
    import pyarrow.compute as pc

    from vlp_models.data.tables import read_rows, read_rows_of

    def is_train(images: pa.Table) -> Any:
        return pc.and_(pc.equal(images["source"], context.source), pc.equal(images["split"], "train"))

    # The table may have no split of its own: its rows are of the split of their image.
    images = read_rows("images", context.validated, is_train, ["image_id", "source", "split"])
    return read_rows_of(images["image_id"].combine_chunks(), table, context.validated, ["image_id", *columns])


def read_scenes(path: Path, image_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Read the scene graphs of those of `image_ids` that have one: image id -> scene. `path` is truth.jsonl."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as lines:
        # A generator: one line is parsed at a time, and only scenes of these images stay in memory.
        scenes = (json.loads(line) for line in lines)
        return {scene["image_id"]: scene for scene in scenes if scene["image_id"] in image_ids and "objects" in scene}


class _AllStatistics(Mapping[str, Statistic]):
    """The common statistics, then those of tasks and of plugins' metrics, which are imported only to look up a name."""

    def __getitem__(self, name: str) -> Statistic:
        if name in STATISTICS:
            return STATISTICS[name]
        for task in TASKS:
            task_statistics = task_class(task).statistics
            if name in task_statistics:
                return task_statistics[name]
        for metric in METRICS:
            with contextlib.suppress(ParamsError):  # another plugin that cannot be imported
                metric_statistics = load_metric(metric).statistics
                if name in metric_statistics:
                    return metric_statistics[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(STATISTICS)

    def __len__(self) -> int:
        return len(STATISTICS)


def read_item_scores(file: Path | bytes, *, name: str = "") -> list[ItemScores]:
    """Read items.parquet of any task; see `read_items`.

    Raises:
        DataError: the file is missing, too large, or was not written by `write_items`.
    """
    return read_items(file, _AllStatistics(), name=name)
