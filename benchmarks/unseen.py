"""A run bundle's score and its baselines on the unseen test items, from the bundle's predictions, without its weights.

    python benchmarks/unseen.py PROJECT BUNDLE
    python benchmarks/unseen.py PROJECT BUNDLE --baseline "text only" OTHER_BUNDLE

For bundles that were packed before `vlp pack` recorded the baselines per item. PROJECT has the bundle's data up to the
stage `shards`. Stops if what is computed on all items, or the number of unseen items, is not what the bundle has.
Adds the run to benchmarks/results/unseen.json; its `leakage` is that of scores.json (docs/reference/scores.md).
`--baseline` adds another model of the same test as a baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, write_result
from torch import nn

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bundles.run_bundle import RunBundle, open_bundle
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.views.hypotheses import ENTAILMENT
from vlp_models.evaluation.contamination import TrainingData, training_sources
from vlp_models.evaluation.predict import NearestTrainImages
from vlp_models.metrics.score import FloatArray, ItemScores, Score, item_scores
from vlp_models.metrics.unseen import score_unseen
from vlp_models.params import parse_params
from vlp_models.tasks import task_class
from vlp_models.tasks.scoring import EvalContext, read_item_scores

NAME = "unseen"


def score_again(bundle: RunBundle, workspace: Workspace, others: Mapping[str, RunBundle]) -> dict[str, Any]:
    """Return the score of the task's metric on test, with its baselines, on all and on the unseen items.

    Args:
        others: models that are further baselines, by name.
    """
    params = parse_params(bundle.params(), str(bundle.path), workspace.root)
    task = task_class(bundle.task)
    # Scoring reads the task's settings, and no weights.
    model: Any = object.__new__(task)
    nn.Module.__init__(model)
    model.labels, model._index = ENTAILMENT, dict.fromkeys(ENTAILMENT)  # other tasks do not read them
    rows = [json.loads(line) for line in bundle.files["predictions-test.jsonl"].decode().splitlines()]
    records = [r for r in bundle.json("scores.json") if (r["split"], r["metric"]) == ("test", task.metric)]
    (record,) = [r for r in records if r["value"] is not None]
    source = record["dataset"]

    dataset = ShardDataset(workspace.shards, "test", task.prediction_view, {source: 1}, regions=False)
    by_id = {sample.sample_id: sample for sample in (dataset[i] for i in range(len(dataset)))}
    samples = [by_id[row[task.id_key]] for row in rows]
    nearest = partial(NearestTrainImages(workspace.shards, source).find, "test")
    scored = model.score(rows, samples, EvalContext(source=source, validated=workspace.validated, nearest=nearest))
    (score,) = [s for s in scored.scores if s.metric == task.metric]

    with tempfile.TemporaryDirectory() as scratch:
        training_data = TrainingData(workspace.validated, training_sources(params, bundle.run), Path(scratch))
        seen = training_data.find_seen(samples)
    baselines = scored.baselines[task.metric]
    items = item_scores(
        score,
        dataset=source,
        split="test",
        test="",
        slices={},
        statistics=task.statistics,
        seen=seen,
        baselines=baselines,
    )
    assert items is not None
    values = scored.baseline_values(task.metric)
    constants = {name: values[name] for name in values if not isinstance(baselines[name], Score)}
    unseen = score_unseen(items, constants, resamples=bundle.manifest["bootstrap"], seed=record["seed"])
    _check(bundle, record, {"value": score.value, "baselines": values, "leakage": unseen})
    if others:
        parts = {name: _parts(other, items) for name, other in others.items()}
        items = replace(items, baselines={**items.baselines, **parts})
        unseen = score_unseen(items, constants, resamples=bundle.manifest["bootstrap"], seed=record["seed"])
    return {name: record[name] for name in ("dataset", "split", "metric", "value", "low", "high", "n")} | {
        "bundle": bundle.path.name,
        "baselines": values,
        "leakage": unseen,
    }


def _parts(bundle: RunBundle, items: ItemScores) -> FloatArray:
    """Return the parts of a bundle's scores of the same items."""
    (other,) = [
        s
        for s in read_item_scores(bundle.files["items.parquet"])
        if (s.dataset, s.split, s.metric) == (items.dataset, items.split, items.metric)
    ]
    row_of = {item: i for i, item in enumerate(other.items)}
    return other.parts_NK[[row_of[item] for item in items.items]]


def _check(bundle: RunBundle, record: dict[str, Any], computed: dict[str, Any]) -> None:
    """Stop if a figure that the bundle has is another one now."""

    def compare(name: str, before: Any, now: Any) -> None:
        if isinstance(before, dict):
            for key in before:
                compare(f"{name}.{key}", before[key], now.get(key) if isinstance(now, dict) else None)
        elif before != now and not (before is not None and now is not None and abs(before - now) < 1e-3):
            sys.exit(f"{bundle.path.name}: {name} is {before}, computed again {now}")

    for name, value in computed.items():
        compare(name, record[name], value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--baseline", nargs=2, action="append", default=[], metavar=("NAME", "BUNDLE"))
    arguments = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    others = {name: open_bundle(Path(other)) for name, other in arguments.baseline}
    run = score_again(open_bundle(arguments.bundle), Workspace(arguments.project.resolve()), others)
    runs = [*(other for other in runs if other["bundle"] != run["bundle"]), run]
    write_result(NAME, {"runs": sorted(runs, key=lambda r: str(r["bundle"]))})
    print(json.dumps(run, indent=2))


if __name__ == "__main__":
    main()
