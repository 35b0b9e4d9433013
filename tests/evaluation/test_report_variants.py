"""Several models, variants and seeds in one report: rows over seeds, costs including the starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_variants import RUNS, variants_params, variants_workspace

from vlp_models.cli.results import print_results
from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.page import stories
from vlp_models.evaluation.report.records import evaluation_records
from vlp_models.evaluation.report.variants import variant_rows
from vlp_models.params import Params
from vlp_models.pipeline.stages import report


@pytest.fixture(scope="module")
def params() -> Params:
    return variants_params()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return variants_workspace(tmp_path)


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


def test_the_sentence_on_a_model_names_a_run_that_trains(params: Params, workspace: Workspace) -> None:
    first, second = dataclasses.replace(params.finetune["other"], max_epochs=0), params.finetune["other"]
    both = dataclasses.replace(params, finetune={"zero-shot": first, "trained": second})
    assert f"fine-tuned for visual question answering ({second.max_epochs} epoch" in stories(both, workspace)[0][1]
    untrained = dataclasses.replace(params, finetune={"zero-shot": first})
    assert "(0 epochs" in stories(untrained, workspace)[0][1]


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


def test_page_summary_and_table_hold_exactly_the_runs_of_params(
    params: Params, workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    report.run(params, workspace)
    print_results(workspace.reports / "summary.json")
    printed = capsys.readouterr().out
    assert "vqa: scenes test" in printed and "other" in printed and "regions-2" in printed
    text = (workspace.reports / "index.html").read_text(encoding="utf-8")
    for words in ("(text-only control)", "7,500", "2 seeds"):
        assert words in text, words
    assert "99.9" not in text and "gone" not in text and "gone" not in printed
    summary = read_json(workspace.reports / "summary.json")
    assert {record["run"] for record in summary} == {*RUNS, "blind"}
    assert {record["run"]: record["model"] for record in summary}["other"] == "small"
    metrics = read_json(workspace.reports / "metrics.json")
    assert set(metrics["evaluate"]) == {*RUNS, "blind"} and all(metrics["evaluate"].values())
