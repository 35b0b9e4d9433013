"""Scores per item as every reader returns them, and what the readers share."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.metrics.score import FloatArray, Statistic

MAX_BYTES = 4 << 30
SCORE_NAMES = ("score", "hit", "eval_score", "correct", "accuracy", "acc", "exact_match", "match")
ITEM_NAMES = ("item", "index", "doc_id", "question_id", "id")
CLUSTER_NAMES = ("cluster", "group", "image_id", "video_id", "image_path", "video")
MEDIA = "input_media"  # of a sample of lmms-eval: the image files that it shows, if the documents name files

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """The items of one metric of one run.

    parts_NK    statistics that add up over items
    documents   item -> hash of its content, if the file has one: equal ids with other contents are not the same item
    derived     clusters are named after one of their items, which depends on the items in the file and on their order
    """

    items: Sequence[str]
    clusters: Sequence[str]
    parts_NK: FloatArray
    statistic: Statistic
    documents: Mapping[str, str] = field(default_factory=dict)
    derived: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One evaluated training of a model.

    seed   "" if unknown
    notes  what was taken for items, scores and clusters
    """

    model: str
    seed: str
    source: Path
    metrics: Mapping[str, Scored]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of columns (or keys) that the user states; "": by the names above."""

    item: str = ""
    score: str = ""
    cluster: str = ""


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


def score_items(rows: Sequence[Row], values: Sequence[float], item: str, cluster: str) -> Scored:
    lacking = next((row for row in rows if not text(row.get(item))), None)
    if lacking is not None:
        raise ValueError(f"a row without {item}: {json.dumps(lacking, default=str)[:200]}")
    items = [text(row[item]) for row in rows]
    if len(set(items)) < len(items):
        seen: set[str] = set()
        # `add` returns None, so the condition is true of the first name that has occurred before.
        repeated = next(name for name in items if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{item} {repeated} occurs more than once; name a column that distinguishes rows with --item")
    # An empty cell would put unrelated items into one cluster.
    blank = [name for name, row in zip(items, rows, strict=True) if cluster and not text(row.get(cluster))]
    if blank:
        raise ValueError(
            f"{cluster} is empty for {len(blank):,} items ({', '.join(blank[:5])}), so it cannot form the clusters; "
            f"fill it, or name another column with --cluster ({item}: each item by itself)"
        )
    return Scored(
        items=items,
        clusters=[text(row[cluster]) for row in rows] if cluster else items,
        # (N, 2): value and count of each item, whose sums over items give the mean.
        parts_NK=np.column_stack([np.asarray(values, dtype=np.float64), np.ones(len(values))]),
        statistic=plain_mean,
        documents={name: str(row["doc_hash"]) for name, row in zip(items, rows, strict=True) if row.get("doc_hash")},
        derived=cluster == MEDIA,
    )


def first_named(names: Iterable[str], rows: Sequence[Row]) -> str:
    return next((name for name in names if any(text(row.get(name)) for row in rows)), "")


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
