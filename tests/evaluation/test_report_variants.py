"""Several models, variants and seeds in one report: rows over seeds, compared pairs, costs including the starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlp_models.cli.results import print_results
from vlp_models.common.io import read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.records import evaluation_records
from vlp_models.evaluation.report.variants import compare, variant_rows
from vlp_models.metrics.score import item_scores, mean_score, write_items
from vlp_models.params import Params, parse_params, read_yaml
from vlp_models.pipeline.stages import report

ROOT = Path(__file__).parents[2]
IMAGES = 80
# run -> (start, variant, seed, share of right answers)
RUNS = {
    "regions-1": ("pretrain/tden", "regions", 1, 0.80),
    "regions-2": ("pretrain/tden", "regions", 2, 0.82),
    "fresh-1": ("initial/tden", "fresh", 1, 0.40),
    "fresh-2": ("initial/tden", "fresh", 2, 0.41),
    "other": ("pretrain/second", "", 1, 0.81),
}


@pytest.fixture(scope="module")
def params() -> Params:
    raw = read_yaml(ROOT / "params.yaml")
    raw["models"]["small"] = {"family": "tden", "config": {"hidden": 16, "heads": 2}}
    raw["pretrain"]["second"] = {**raw["pretrain"]["tden"], "model": "small"}
    raw["finetune"] = {
        name: {"task": "vqa", "start": start, "variant": variant, "seed": seed}
        for name, (start, variant, seed, _) in RUNS.items()
    }
    raw["finetune"]["blind"] = {"task": "vqa", "start": "pretrain/tden", "blank_images": True}
    return parse_params(raw)


def evaluation(workspace: Workspace, run: str, share: float, seed: int, *, test: str = "t") -> None:
    """Write the scores of a run."""
    difficulty = np.random.default_rng(1).random(IMAGES)
    right = (difficulty + np.random.default_rng(seed + 10).normal(0, 0.05, IMAGES) < share).astype(float)
    names = [f"scenes/{i}" for i in range(IMAGES)]
    score = mean_score("accuracy", right, names, items=names)
    items = item_scores(score, dataset="scenes", split="test", test=test, slices={})
    assert items is not None and score.value is not None
    record: dict[str, Any] = {"dataset": "scenes", "split": "test", "metric": "accuracy", "value": score.value}
    record |= {"run": run, "task": "vqa", "model": "tden", "seed": seed, "low": 1.0, "high": 99.0, "n": IMAGES}
    record |= {"baselines": {"majority answer": 30.0}, "note": "", "seconds": 1.0, "peak_memory_mb": 9.0}
    record |= {"git": "abc", "data": "def", "family": "tden", "variant": "x", "leakage": None}
    folder = workspace.evaluation(run)
    folder.mkdir(parents=True)
    write_json(folder / "scores.json", [record])
    write_items(folder / "items.parquet", [items])


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path)
    for run, (_, _, seed, share) in RUNS.items():
        evaluation(made, run, share, seed)
        training = {"parameters": 1000, "samples": 500, "seconds": 10.0, "peak_memory_mb": 300.0}
        write_json(made.training(f"finetune/{run}"), training)
    evaluation(made, "blind", 0.3, 5)
    evaluation(made, "gone", 0.99, 1)  # a run that params.yaml no longer has
    pretraining = {"parameters": 900, "samples": 7000, "seconds": 60.5, "peak_memory_mb": 800.0}
    write_json(made.training("pretrain/tden"), pretraining)
    return made


def rows_of(params: Params, workspace: Workspace) -> dict[str, Any]:
    return {row.variant: row for row in variant_rows(evaluation_records(params, workspace))}


def test_runs_that_differ_only_in_seed_form_one_row(params: Params, workspace: Workspace) -> None:
    rows = rows_of(params, workspace)
    assert list(rows) == ["regions", "fresh", "other", "blind"]
    regions = rows["regions"]
    values = [read_json(workspace.evaluation(run) / "scores.json")[0]["value"] for run in ("regions-1", "regions-2")]
    assert regions.seeds == 2 and regions.value == pytest.approx(np.mean(values))
    assert regions.deviation == pytest.approx(np.std(values, ddof=1))
    assert (regions.low, regions.high) == (min(values), max(values))
    assert (rows["other"].deviation, rows["other"].low, rows["other"].high) == (None, 1.0, 99.0)
    assert rows["other"].model == "small", "the model is that of params.yaml, not of the record"


def test_runs_of_one_name_with_other_settings_are_other_variants(params: Params, workspace: Workspace) -> None:
    """As the gate has it, whose hash covers the same settings."""
    runs, pretrain = dict(params.finetune), dict(params.pretrain)
    runs["regions-2"] = dataclasses.replace(runs["regions-2"], max_epochs=5)
    runs["regions-1"] = dataclasses.replace(runs["regions-1"], max_epochs=4)
    runs["fresh-2"] = dataclasses.replace(runs["fresh-2"], start="pretrain/tden")
    changed = dataclasses.replace(params, finetune=runs)
    found = rows_of(changed, workspace)
    assert list(found) == [
        *("regions (4 epochs)", "regions (5 epochs)", "fresh (without pretraining)", "fresh (pretrained)"),
        *("other", "blind"),
    ]
    assert [found[f"regions ({n} epochs)"].runs for n in (4, 5)] == [("regions-1",), ("regions-2",)]
    assert {row.seeds for row in found.values()} == {1}

    runs["regions-2"] = dataclasses.replace(params.finetune["regions-2"], start="pretrain/longer")
    runs["regions-1"] = params.finetune["regions-1"]
    pretrain["tden"] = dataclasses.replace(pretrain["tden"], max_epochs=2)
    pretrain["longer"] = dataclasses.replace(pretrain["tden"], max_epochs=9)
    changed = dataclasses.replace(params, finetune=runs, pretrain=pretrain)
    assert {"regions (pretrain 2 epochs)", "regions (pretrain 9 epochs)"} <= set(rows_of(changed, workspace))
    pretrain["longer"] = dataclasses.replace(pretrain["tden"], seed=9)
    changed = dataclasses.replace(params, finetune=runs, pretrain=pretrain)
    assert rows_of(changed, workspace)["regions"].seeds == 2, "another seed of the pretraining is the same variant"


def test_costs_include_the_starts_and_unknown_ones_stay_unknown(params: Params, workspace: Workspace) -> None:
    rows = rows_of(params, workspace)
    assert rows["regions"].costs == {
        "parameters": 1000,
        "samples_seen": 7500,
        "training_seconds": 70.5,
        "training_memory_mb": 800.0,
    }
    assert rows["fresh"].costs["samples_seen"] == 500
    assert rows["other"].costs["samples_seen"] is None, "its pretraining left no record"
    assert rows["other"].costs["parameters"] == 1000


def test_variants_are_compared_in_pairs_on_the_same_test(params: Params, workspace: Workspace) -> None:
    records = evaluation_records(params, workspace)
    found = compare(workspace, records, "accuracy", "higher", resamples=500)
    assert found is not None
    pairs = {(pair.a, pair.b): pair for pair in found.pairs}
    assert list(pairs) == [("regions", "fresh"), ("regions", "other"), ("fresh", "other")], (
        "text-only controls are not compared"
    )
    assert found.verdict(pairs["regions", "fresh"]) == "regions is better"
    assert found.describe_interval(pairs["regions", "fresh"]) == "items and seeds (2 and 2)"
    assert found.verdict(pairs["regions", "other"]) == "inconclusive"
    assert found.describe_interval(pairs["regions", "other"]) == "items and seeds (2 and 1)"
    lower = compare(workspace, records, "accuracy", "lower", resamples=500)
    assert lower is not None and lower.verdict(lower.pairs[0]) == "fresh is better"


def test_incomparable_runs_are_listed_with_the_reason(params: Params, workspace: Workspace) -> None:
    for file in workspace.evaluation("other").iterdir():
        file.unlink()
    workspace.evaluation("other").rmdir()
    evaluation(workspace, "other", 0.7, 1, test="another")
    (workspace.evaluation("fresh-2") / "items.parquet").unlink()
    found = compare(workspace, evaluation_records(params, workspace), "accuracy", "higher", resamples=100)
    assert found is not None and [(p.a, p.b, p.seeds) for p in found.pairs] == [("regions", "fresh", (2, 1))]
    left_out = "\n".join(found.left_out)
    assert "other: measured on another test" in left_out and "fresh-2: " in left_out


def test_page_summary_and_table_hold_exactly_the_runs_of_params(
    params: Params, workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    report.run(params, workspace)
    print_results(workspace.reports / "summary.json")
    printed = capsys.readouterr().out
    assert "vqa: scenes test" in printed and "other" in printed and "regions-2" in printed
    text = (workspace.reports / "index.html").read_text(encoding="utf-8")
    for words in ("regions − fresh", "inconclusive", "regions is better", "(text-only control)", "7,500", "2 seeds"):
        assert words in text, words
    assert "99.9" not in text and "gone" not in text and "gone" not in printed
    summary = read_json(workspace.reports / "summary.json")
    assert {record["run"] for record in summary} == {*RUNS, "blind"}
    assert {record["run"]: record["model"] for record in summary}["other"] == "small"
    metrics = read_json(workspace.reports / "metrics.json")
    assert set(metrics["evaluate"]) == {*RUNS, "blind"} and all(metrics["evaluate"].values())


def test_single_variant_is_not_compared(params: Params, workspace: Workspace) -> None:
    alone = dataclasses.replace(params, finetune={"other": params.finetune["other"]})
    assert compare(workspace, evaluation_records(alone, workspace), "accuracy", "higher", resamples=100) is None
