"""`vlp drift`: compare batches that are newer than the last training with its data (data/training_stats.json)."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import read_json, write_json
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.contrib.drift.measures import compare, compare_embeddings, describe
from vlp_models.contrib.drift.params import DriftParams
from vlp_models.contrib.drift.training_stats import embed, training_stats_path
from vlp_models.data.batches import PAIRS, batch_folders
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.params import Params

MIN_IMAGES = 20  # below it embeddings are not compared


def run(params: Params, workspace: Workspace, key: str = "") -> dict[str, Any]:
    """Compare new batches with the training statistics; write reports/drift.json and return its content.

    Raises:
        DataError: a batch or the tokenizer is missing or damaged.
    """
    p = params.section(DriftParams)
    path = training_stats_path(workspace)
    report: dict[str, Any] = {"gate": p.gate, "drifted": False, "measures": [], "notes": [], "batches": []}
    if not path.exists():
        report["notes"].append(f"no {path.name} yet: run `dvc repro training_stats` after a training")
        return _finish(report, workspace)
    reference = read_json(path)
    dataset = workspace.root / params.ingest.dataset
    # batches that the last training did not have
    new = [batch.name for batch in batch_folders(dataset) if batch.name not in reference["batches"]]
    rows = Rows(dataset, new)
    # A batch may have evaluation pairs only.
    if not new or not any(True for _ in rows):
        report["notes"].append("no new training pairs since the last training")
        return _finish(report, workspace)
    tokenizer = Tokenizer.load(require_output(workspace.tokenizer, "tokenizer"))
    sizes = ((row["width"], row["height"]) for row in rows.images())
    statistics = describe((row["caption"] for row in rows), sizes, tokenizer, most_words=None)
    report |= {"batches": new, "captions": statistics["captions"], "images": statistics["images"]}
    report["measures"] = compare(reference, statistics, p)
    _add_embeddings(report, reference["embedding"], rows, params, workspace)
    report["drifted"] = any(measure["drifted"] for measure in report["measures"])
    return _finish(report, workspace)


class Rows:
    """The training pairs of batches, read from disk each time."""

    def __init__(self, dataset: Path, batches: list[str]) -> None:
        self._dataset = dataset
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for name in self._batches:
            with (self._dataset / name / PAIRS).open(encoding="utf-8") as lines:
                for line in lines:
                    row = json.loads(line)
                    if row["split"] == "train":
                        yield {**row, "path": self._dataset / name / row["image"]}

    def images(self) -> Iterator[dict[str, Any]]:
        """Yield the first row of each image."""
        # Rows of one image are adjacent, so the last hash is enough.
        last = ""
        for row in self:
            if row["sha256"] != last:
                last = row["sha256"]
                yield row


def _add_embeddings(
    report: dict[str, Any], reference: dict[str, Any], rows: Rows, params: Params, workspace: Workspace
) -> None:
    """Add the two-sample test on region features (mean over regions), if the same features can be extracted here."""
    from vlp_models.vision.extractors import FROM_IMAGES, open_source
    from vlp_models.vision.region_source import SourceRequest

    p = params.section(DriftParams)
    if not reference["points"]:
        report["notes"].append("embeddings not compared: the training statistics have none (no image has regions)")
        return
    # a sample that does not depend on the order of batches
    sample = heapq.nsmallest(p.images, rows.images(), key=lambda row: row["sha256"]) if p.images else []
    if min(len(sample), len(reference["points"])) < MIN_IMAGES:
        report["notes"].append(f"embeddings not compared: fewer than {MIN_IMAGES} images")
        return
    kind, source = params.features.source, None
    if kind == "grid" or (kind in FROM_IMAGES and workspace.detector.exists()):
        source = open_source(SourceRequest(params=params.features, workspace=workspace))
    if source is None or source.detector_id != reference["detector_id"]:
        report["notes"].append("embeddings not compared: the training data's regions cannot be extracted here")
        return
    images = []
    for row in sample:
        size = {"width": row["width"], "height": row["height"]}
        images.append({"image_id": row["sha256"], "path": workspace.relative(row["path"]), **size})
    regions, _ = source.regions(images, lambda count: None)
    # per image the mean feature of its regions, [D]
    means = [region.features.astype(np.float32).mean(axis=0) for region in regions if len(region.features)]
    if len(means) < MIN_IMAGES:
        report["notes"].append("embeddings not compared: too few images have regions")
        return
    # The projection of the training statistics: under another seed the points could not be compared.
    points = np.array(embed(np.stack(means), reference["seed"]))
    report["measures"].append(compare_embeddings(np.array(reference["points"]), points, p))


def _finish(report: dict[str, Any], workspace: Workspace) -> dict[str, Any]:
    write_json(workspace.reports / "drift.json", report)
    for measure in report["measures"]:
        flag = "DRIFTED" if measure["drifted"] else "ok"
        # A value above its limit may be within what chance alone gives.
        noise = f", noise {measure['noise']:.4f}" if "noise" in measure else ""
        print(f"{measure['name']:16} {measure['value']:8.4f}  limit {measure['limit']:g}{noise}  {flag}")
    for note in report["notes"]:
        print(note)
    if report["drifted"]:
        print("drift: new pairs differ from the training data" + ("; stopped by drift.gate" if report["gate"] else ""))
    elif report["measures"]:
        print("drift: within the limits")
    return report
