"""Audit the pairs of a project: all findings, ranked, as reports/audit.jsonl and reports/audit.csv."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.device import cpu_count
from vlp_models.common.io import write_together
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.captions import Finding, find_copied, find_empty, find_language
from vlp_models.contrib.audit.decisions import REPORT
from vlp_models.contrib.audit.mismatch import MIN_IMAGES, Mismatch, find_mismatches
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
    findings: list[list[Finding]] = [[] for _ in pairs.texts]
    better = [""] * len(pairs.texts)
    share = _add_mismatches(workspace, pairs, findings, better, seed=seed, tower=tower, device=device)
    for row, text in enumerate(pairs.texts):
        if finding := find_empty(text):
            findings[row].append(finding)
    for others in (find_copied(pairs.texts, pairs.owner_P.tolist()), find_language(pairs.texts, pairs.languages)):
        for row, finding in enumerate(others):
            if finding:
                findings[row].append(finding)
    if near_duplicates:
        _add_near_duplicates(params, workspace, datasets, pairs, findings)
    rows = _rank(pairs, findings, better)
    texts = {
        workspace.root / REPORT: "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows),
        (workspace.root / REPORT).with_suffix(".csv"): _to_csv(rows),
    }
    write_together(texts)
    counts = Counter(finding["kind"] for row in rows for finding in row["findings"])
    return Summary(
        pairs=len(pairs.texts), images=len(pairs.image_ids), listed=len(rows), counts=dict(counts), share=share
    )


def _add_mismatches(
    workspace: Workspace,
    pairs: Pairs,
    findings: list[list[Finding]],
    better: list[str],
    *,
    seed: int,
    tower: str,
    device: str,
) -> float | None:
    """Score how likely each caption belongs to another image; return the estimated share of those.

    None: too few images have vectors.
    """
    has_features = (workspace.features / "manifest.json").exists()
    towers = embed(workspace, tower, pairs, device) if tower else None
    if has_features or not tower:
        vectors = mean_features(workspace, pairs.image_ids)
    else:
        vectors = np.zeros((len(pairs.image_ids), 0), np.float32)
    # images without a vector, such as one without regions, are left out
    usable_I: NDArray[np.bool_] = np.asarray(np.isfinite(vectors).all(1))
    if towers:
        usable_I &= np.isfinite(towers[0]).all(1)
    rows_P = np.flatnonzero(usable_I[pairs.owner_P])
    number_I = np.cumsum(usable_I) - 1
    if left_out := len(pairs.texts) - len(rows_P):
        logger.warning("audit: %s captions of images without region features are not scored", f"{left_out:,}")
    if usable_I.sum() < MIN_IMAGES:
        logger.warning("audit: swapped captions are not searched for: fewer than %d images with features", MIN_IMAGES)
        return None
    mismatch = find_mismatches(
        vectors[usable_I],
        number_I[pairs.owner_P[rows_P]],
        [pairs.texts[row] for row in rows_P],
        seed=seed,
        towers=(towers[0][usable_I], towers[1][rows_P]) if towers else None,
    )
    for position, row in enumerate(rows_P.tolist()):
        if mismatch.probability_P[position] >= LEAST:
            findings[row].append(_describe(mismatch, position))
            better[row] = pairs.texts[rows_P[mismatch.better_P[position]]]
    return mismatch.share


def _describe(mismatch: Mismatch, position: int) -> Finding:
    reason = "all captions of this image fit" if mismatch.all_P[position] else "the caption fits"
    return Finding("swapped", float(mismatch.probability_P[position]), f"{reason} other images better")


def _add_near_duplicates(
    params: Params, workspace: Workspace, datasets: Sequence[str], pairs: Pairs, findings: list[list[Finding]]
) -> None:
    """List the training images that are near-duplicates of an earlier one, with all their captions.

    The other splits are compared with train by `validate`.
    """
    row_of = {name: row for row, name in enumerate(pairs.image_ids) if pairs.splits[row] == "train"}
    rules = NearRules.of(params.validate.near_duplicates)
    clusters = Clusters()
    for dataset in datasets:
        file = workspace.interim(dataset) / FINGERPRINTS
        if file.exists():
            workers = cpu_count(MAX_PROCESSES)
            for image_id, copy_of in find_near_duplicates(file, rules, workers=workers):
                if image_id in row_of and copy_of in row_of:
                    clusters.join(image_id, copy_of)
    copies: dict[int, str] = {}
    for name, row in row_of.items():
        if (first := clusters.first(name)) != name:
            copies[row] = first
    for row, owner in enumerate(pairs.owner_P.tolist()):
        if owner in copies:
            findings[row].append(Finding("near_duplicate", 0.5, f"the image is a copy of {copies[owner]}"))


def _rank(pairs: Pairs, findings: Sequence[Sequence[Finding]], better: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of the report: pairs with a finding, the highest score first."""
    rows = []
    for number, listed in enumerate(findings):
        if listed:
            owner = pairs.owner_P[number]
            score = max(finding.score for finding in listed)
            rows.append(
                {
                    "score": round(score, 4),
                    "caption_id": pairs.caption_ids[number],
                    "image_id": pairs.image_ids[owner],
                    "split": pairs.splits[owner],
                    "path": pairs.paths[owner],
                    "text": pairs.texts[number],
                    "findings": [asdict(finding) | {"score": round(finding.score, 4)} for finding in listed],
                    "better": better[number],
                }
            )
    rows.sort(key=lambda row: (-row["score"], row["caption_id"]))
    return [{"rank": rank, **row} for rank, row in enumerate(rows, start=1)]


def _to_csv(rows: Sequence[dict[str, Any]]) -> str:
    output = io.StringIO()
    writer = csv.DictWriter(output, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        kinds: dict[str, list[str]] = defaultdict(list)
        for finding in row["findings"]:
            kinds["kinds"].append(finding["kind"])
            kinds["reasons"].append(finding["reason"])
        joined = {name: "; ".join(values) for name, values in kinds.items()}
        # A spreadsheet would run a text that starts like a formula.
        texts = {k: f"'{row[k]}" if row[k][:1] in ("=", "+", "-", "@") else row[k] for k in ("text", "better")}
        writer.writerow(row | joined | texts)
    return output.getvalue()
