"""Scores per item as every reader returns them, and what the readers share."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.metrics.score import Evidence, FloatArray, Statistic

MAX_BYTES = 4 << 30
WHOLE = re.compile(r"-?\d+\.0")
SCORE_NAMES = ("score", "hit", "eval_score", "correct", "accuracy", "acc", "exact_match", "match")
ITEM_NAMES = ("item", "index", "doc_id", "question_id", "id")
# Rotations of one question, which VLMEvalKit has in some files, have one g_index.
CLUSTER_NAMES = ("cluster", "group", "image_id", "video_id", "image_path", "video", "g_index")
MEDIA = "input_media"  # of a sample of lmms-eval: the image files that it shows, if the documents name files

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """The items of one metric of one run.

    parts_NK    statistics that add up over items
    contents    what identifies an item's content (its document, target or input) -> a text or hash for each item, "" if
                unknown: equal ids with other contents are not the same item
    test        of the test set as a whole
    derived     clusters are named after one of their items, which depends on the items in the file and on their order
    """

    items: Sequence[str]
    clusters: Sequence[str]
    parts_NK: FloatArray
    statistic: Statistic
    contents: Mapping[str, Sequence[str]] = field(default_factory=dict)
    test: str = ""
    derived: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One evaluated training of a model.

    seed        "" if unknown
    notes       what was taken for items, scores and clusters
    unfinished  why the file does not have all items of the test; "" if unknown
    """

    model: str
    seed: str
    source: Path
    metrics: Mapping[str, Scored]
    notes: Sequence[str]
    unfinished: str = ""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns (or keys) that the user states; "": by the names above."""

    item: str = ""
    score: str = ""
    cluster: str = ""


def mean_value(runs: Sequence[Evidence]) -> float:
    """Return the mean over runs of their values."""
    # (N, K) -> (1, K): the statistic of the sums over all items.
    return float(np.mean([float(run.statistic(run.parts_NK.sum(axis=0, keepdims=True))[0]) for run in runs]))


def plain_mean(sums_SK: FloatArray) -> FloatArray:
    """Return the mean. Columns: sum of values, number of items."""
    return sums_SK[:, 0] / sums_SK[:, 1]


def to_float(value: Any) -> float | None:
    """Return a number or a text as a number, which may be NaN; None if it is infinite or something else."""
    if isinstance(value, str) and "_" in value:  # float() would read 1_0 as 10
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isinf(number) else number


def text(value: Any) -> str:
    """Return a cell's text; whole numbers look the same from a spreadsheet (7.0) and from text (7)."""
    if isinstance(value, float) and value.is_integer():
        # 7.0 -> "7", so that ids of a spreadsheet and of a text file are equal.
        return str(int(value))
    return "" if value is None else str(value).strip()


def texts(cells: Iterable[Any]) -> list[str]:
    """Return the text of each cell."""
    return [cell.strip() if type(cell) is str else text(cell) for cell in cells]


def id_texts(cells: Iterable[Any]) -> list[str]:
    """Return the text of each cell of a column of ids; 0.0, 1.0, ... are 0, 1, ... if all cells are like that.

    pandas writes whole numbers so if one of the column's cells was once empty.
    """
    names = texts(cells)
    # The last characters first: few columns end like this, and the pattern takes longer.
    decimals = all(name.endswith(".0") for name in names) and all(map(WHOLE.fullmatch, names))
    return [name[:-2] for name in names] if decimals else names


def score_items(
    items: Sequence[str],
    values: Sequence[float] | FloatArray,
    clusters: Sequence[str],
    *,
    item: str,
    cluster: str,
    row_at: Callable[[int], Row],
    contents: Mapping[str, Sequence[str]] | None = None,
) -> Scored:
    """Return the items with their scores.

    Args:
        clusters: empty if every item counts by itself.
        item, cluster: names of their columns, for messages.
        row_at: returns a row for a message.

    Raises:
        ValueError: an item has no name or occurs twice, or has no cluster.
    """
    if not all(items):
        row = row_at(list(items).index(""))
        raise ValueError(f"a row without {item}: {json.dumps(row, default=str)[:200]}")
    if len(set(items)) < len(items):
        repeated = next(name for name, count in Counter(items).items() if count > 1)
        raise ValueError(f"{item} {repeated} occurs more than once; name a column that distinguishes rows with --item")
    # An empty cell would put unrelated items into one cluster.
    if not all(clusters):
        blank = [name for name, label in zip(items, clusters, strict=True) if not label]
        raise ValueError(
            f"{cluster} is empty for {len(blank):,} items ({', '.join(blank[:5])}), so it cannot form the clusters; "
            f"fill it, or name another column with --cluster ({item}: each item by itself)"
        )
    return Scored(
        items=items,
        clusters=clusters or items,
        # (N, 2): value and count of each item, whose sums over items give the mean.
        parts_NK=np.column_stack([np.asarray(values, dtype=np.float64), np.ones(len(values))]),
        statistic=plain_mean,
        contents=contents or {},
        derived=cluster == MEDIA,
    )


def first_named(names: Iterable[str], column: Callable[[str], Iterable[Any]]) -> str:
    """Return the first name whose column has a cell that is not empty; "" if all are empty."""
    return next((name for name in names if any(map(text, column(name)))), "")


def explain_unscored(name: str, items: Sequence[str]) -> str:
    return f"{len(items):,} items have no number for {name} and are left out: {', '.join(items[:5])}" + (
        ", ..." if len(items) > 5 else ""
    )


def explain_clusters(cluster: str) -> str:
    return f"clusters: {cluster}" if cluster else "clusters: none known, so every item counts by itself (--cluster)"


def check_size(path: Path, archive: zipfile.ZipFile) -> None:
    size = sum(member.file_size for member in archive.infolist())
    if size > MAX_BYTES:
        raise ValueError(f"unpacks to {size:,} bytes, more than {MAX_BYTES:,}")
