"""Audit the pairs of a project: all findings, ranked, as reports/audit.jsonl and reports/audit.csv."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlp_models.common.device import cpu_count
from vlp_models.common.io import write_together
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.captions import Finding, find_copied, find_empty, find_language
from vlp_models.contrib.audit.decisions import REPORT
from vlp_models.contrib.audit.mismatch import MIN_IMAGES, find_mismatches
from vlp_models.contrib.audit.pairs import Pairs, read_pairs
from vlp_models.contrib.audit.vectors import embed, mean_features
from vlp_models.curation.duplicates.leakage import FINGERPRINTS, find_near_duplicates
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.data.formats.splits import Clusters
from vlp_models.params import Params

logger = get_logger(__name__)

LEAST = 0.05  # score from which a pair is listed
MAX_PROCESSES = 8  # for the search of near-duplicates
COLUMNS = ("rank", "score", "kinds", "caption_id", "image_id", "split", "path", "text", "reasons", "better")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """counts: kind -> listed pairs; share: estimated share of mismatched pairs, None if they were not scored."""

    pairs: int
    images: int
    listed: int
    counts: dict[str, int]
    share: float | None


def audit(
    params: Params,
    workspace: Workspace,
    datasets: Sequence[str],
    *,
    seed: int = 1,
    tower: str = "",
    near_duplicates: bool = True,
    device: str = "cpu",
) -> Summary:
    """Score all pairs of the datasets and write the report.

    Args:
        tower: a checkpoint with two towers, `resolve_tower`; empty: none.

    Raises:
        DataError: there are no pairs, or no vectors of their images.
        CheckpointError: see `embed`.
    """
    pairs = read_pairs(workspace, datasets)
    swapped, share = _find_swapped(workspace, pairs, seed=seed, tower=tower, device=device)
    columns = [
        swapped,
        [find_empty(text) for text in pairs.texts],
        find_copied(pairs.texts, pairs.owner_P.tolist()),
        find_language(pairs.texts, pairs.languages),
    ]
    if near_duplicates:
        columns.append(_find_near_duplicates(params, workspace, datasets, pairs))
    rows = _rank(pairs, columns)
    report = workspace.root / REPORT
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    write_together({report: lines, report.with_suffix(".csv"): _to_csv(rows)})
    counts = Counter(finding["kind"] for row in rows for finding in row["findings"])
    return Summary(
        pairs=len(pairs.texts), images=len(pairs.image_ids), listed=len(rows), counts=dict(counts), share=share
    )


def _find_swapped(
    workspace: Workspace, pairs: Pairs, *, seed: int, tower: str, device: str
) -> tuple[list[Finding | None], float | None]:
    """Return the captions that probably belong to another image, and the estimated share of those.

    The share is None if too few images have vectors.
    """
    findings: list[Finding | None] = [None] * len(pairs.texts)
    towers = embed(workspace, tower, pairs, device) if tower else None
    vectors = mean_features(workspace, pairs.image_ids, needed=not tower)
    # images without a vector, such as one without regions, are left out
    usable_I = np.asarray(np.isfinite(vectors).all(1))
    if towers:
        usable_I &= np.isfinite(towers[0]).all(1)
    rows_P = np.flatnonzero(usable_I[pairs.owner_P])
    if left_out := len(pairs.texts) - len(rows_P):
        logger.warning("audit: %s captions of images without region features are not scored", f"{left_out:,}")
    if usable_I.sum() < MIN_IMAGES:
        logger.warning("audit: swapped captions are not searched for: fewer than %d images with features", MIN_IMAGES)
        return findings, None
    number_I = np.cumsum(usable_I) - 1
    mismatch = find_mismatches(
        vectors[usable_I],
        number_I[pairs.owner_P[rows_P]],
        [pairs.texts[row] for row in rows_P],
        seed=seed,
        towers=(towers[0][usable_I], towers[1][rows_P]) if towers else None,
    )
    for position in np.flatnonzero(mismatch.probability_P >= LEAST):
        subject = "all captions of this image fit" if mismatch.all_P[position] else "the caption fits"
        better = pairs.texts[rows_P[mismatch.better_P[position]]]
        score = float(mismatch.probability_P[position])
        findings[rows_P[position]] = Finding("swapped", score, f"{subject} other images better", better)
    return findings, mismatch.share


def _find_near_duplicates(
    params: Params, workspace: Workspace, datasets: Sequence[str], pairs: Pairs
) -> list[Finding | None]:
    """Return the captions of training images that are near-duplicates of an earlier one.

    The other splits are compared with train by `validate`.
    """
    train = {name for name, split in zip(pairs.image_ids, pairs.splits, strict=True) if split == "train"}
    rules = NearRules.of(params.validate.near_duplicates)
    clusters = Clusters()
    for dataset in datasets:
        file = workspace.interim(dataset) / FINGERPRINTS
        if file.exists():
            for image_id, copy_of in find_near_duplicates(file, rules, workers=cpu_count(MAX_PROCESSES)):
                if {image_id, copy_of} <= train:
                    clusters.join(image_id, copy_of)
    firsts = [clusters.first(name) for name in pairs.image_ids]
    return [
        Finding("near_duplicate", 0.5, f"the image is a copy of {firsts[owner]}", copy_of=firsts[owner])
        if firsts[owner] != pairs.image_ids[owner]
        else None
        for owner in pairs.owner_P
    ]


def _rank(pairs: Pairs, columns: Sequence[Sequence[Finding | None]]) -> list[dict[str, Any]]:
    """Return the rows of the report: pairs with a finding, the highest score first."""
    rows = []
    path_of = {"": "", **dict(zip(pairs.image_ids, pairs.paths, strict=True))}
    for number, owner in enumerate(pairs.owner_P):
        findings = [column[number] for column in columns]
        listed = [finding for finding in findings if finding]
        if listed:
            copy_of = "".join(finding.copy_of for finding in listed)
            rows.append(
                {
                    "score": round(max(finding.score for finding in listed), 4),
                    "caption_id": pairs.caption_ids[number],
                    "image_id": pairs.image_ids[owner],
                    "split": pairs.splits[owner],
                    "path": pairs.paths[owner],
                    "text": pairs.texts[number],
                    "findings": [{"kind": f.kind, "score": round(f.score, 4), "reason": f.reason} for f in listed],
                    "better": "".join(finding.better for finding in listed),
                    "copy_of": copy_of,
                    "copy_of_path": path_of[copy_of],
                }
            )
    rows.sort(key=lambda row: (-row["score"], row["caption_id"]))
    return [{"rank": rank, **row} for rank, row in enumerate(rows, start=1)]


def _to_csv(rows: Sequence[dict[str, Any]]) -> str:
    output = io.StringIO()
    writer = csv.DictWriter(output, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        joined = {f"{name}s": "; ".join(f[name] for f in row["findings"]) for name in ("kind", "reason")}
        # A spreadsheet would run a text that starts like a formula.
        texts = {k: f"'{row[k]}" if row[k][:1] in ("=", "+", "-", "@") else row[k] for k in ("text", "better")}
        writer.writerow(row | joined | texts)
    return output.getvalue()
