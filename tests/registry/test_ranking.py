"""Ranking the runs of a task: values on different datasets never compete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import GateParams, Params, load_params
from vlp_models.registry.promotion.gate_rule import gate_rule
from vlp_models.registry.promotion.ranking import describe_ranking, rank_runs
from vlp_models.tasks.judging import CORE

ROOT = Path(__file__).parents[2]


def make_project(tmp_path: Path, runs: dict[str, dict[str, float | None]], **tracking: Any) -> tuple[Params, Workspace]:
    """runs: run -> dataset -> accuracy of a VQA run on test."""
    params = load_params(ROOT / "params.yaml")
    vqa = params.finetune["tden-vqa"]
    workspace = Workspace(tmp_path)
    for name, values in runs.items():
        workspace.evaluation(name).mkdir(parents=True)
        scores = [{"dataset": d, "split": "test", "metric": "accuracy", "value": v} for d, v in values.items()]
        (workspace.evaluation(name) / "scores.json").write_text(json.dumps(scores))
    finetune = {name: dataclasses.replace(vqa, task="vqa", blank_images="blind" in name) for name in runs}
    tracked = dataclasses.replace(params.tracking, **tracking)
    return dataclasses.replace(params, finetune=finetune, tracking=tracked), workspace


def test_run_does_not_win_by_an_easier_dataset(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {
        "lesson": {"simple": 97.0, "boxes": 90.0},
        "final": {"boxes": 88.0, "nlvr": 84.0},
        "worse": {"nlvr": 80.0},
        "blind": {"nlvr": 99.0},
    }
    params, workspace = make_project(tmp_path, runs, dataset={"vqa": "nlvr"})
    found = rank_runs(params, workspace)["vqa"]
    assert [(c.run, c.value) for c in found] == [("final", 84.0), ("worse", 80.0), ("lesson", None)]


def test_runs_are_ranked_on_val_if_all_were_scored_there(tmp_path: Path) -> None:
    """Selecting on the test split and gating on the same items would be biased."""
    params, workspace = make_project(tmp_path, {"a": {"x": 70.0}, "b": {"x": 60.0}})

    def add(run: str, value: float) -> None:
        file = workspace.evaluation(run) / "scores.json"
        record = {"dataset": "x", "split": "val", "metric": "accuracy", "value": value}
        file.write_text(json.dumps([*json.loads(file.read_text()), record]))

    def sentence(params: Params) -> str:
        runs = rank_runs(params, workspace)["vqa"]
        return describe_ranking(params, "vqa", {c.run: c.scores for c in runs})

    add("a", 50.0)
    on_test = (
        "vqa: runs are ranked on test by accuracy, and the best is judged there too ({}), so its gain is biased upward"
    )
    assert sentence(params) == on_test.format("not scored on val: b")
    assert [(c.run, c.value) for c in rank_runs(params, workspace)["vqa"]] == [("a", 70.0), ("b", 60.0)]
    add("b", 55.0)
    assert [(c.run, c.value) for c in rank_runs(params, workspace)["vqa"]] == [("b", 55.0), ("a", 50.0)]
    assert sentence(params) == "vqa: runs are ranked on val by accuracy; the best is judged on test"
    by_test = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, select_on="test"))
    assert [c.run for c in rank_runs(by_test, workspace)["vqa"]] == ["a", "b"]
    assert sentence(by_test) == on_test.format("`promotion.select_on` is test")
    alone = describe_ranking(params, "vqa", {"a": rank_runs(params, workspace)["vqa"][1].scores})
    assert alone == "vqa: one run, so nothing is ranked; it is judged on test by accuracy"


def test_without_tracking_dataset_the_shared_ones_decide(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 99.0, "y": 50.0}, "b": {"y": 60.0}}
    params, workspace = make_project(tmp_path, runs)
    assert [c.run for c in rank_runs(params, workspace)["vqa"]] == ["b", "a"]


def test_gate_direction_lower_reverses_the_order(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 9.0}, "b": {"x": 3.0}, "c": {"x": None}}
    params, workspace = make_project(tmp_path, runs)
    gate = GateParams(metric="accuracy", direction="lower")
    params = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, tasks={"vqa": gate}))
    assert [c.run for c in rank_runs(params, workspace)["vqa"]] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("runs", "tracking", "message"),
    [
        ({"a": {"x": 9.0}, "b": {"y": 8.0}}, {}, r"a on x; b on y.*tracking.dataset: \{vqa: NAME\}"),
        ({"a": {"x": 9.0}}, {"dataset": {"vqa": "z"}}, "vqa: no run was scored on `z`.*datasets with scores: x"),
        ({"a": {}}, {}, "no run of vqa has accuracy on test"),
    ],
)
def test_unrankable_runs_are_an_error(tmp_path: Path, runs: Any, tracking: Any, message: str) -> None:
    params, workspace = make_project(tmp_path, runs, **tracking)
    with pytest.raises(ParamsError, match=message):
        rank_runs(params, workspace)


def test_run_without_a_computed_metric_has_no_value(tmp_path: Path) -> None:
    params, workspace = make_project(tmp_path, {"a": {"x": None}})
    assert [(c.run, c.value) for c in rank_runs(params, workspace)["vqa"]] == [("a", None)]


def test_default_metric_is_the_tasks_own(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 70.0}, "b": {"x": 80.0}}
    params, workspace = make_project(tmp_path, runs, metric={})
    params = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, tasks={}))
    assert [candidate.run for candidate in rank_runs(params, workspace)["vqa"]] == ["b", "a"]


def test_default_direction_is_that_of_the_tasks_own_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 70.0}, "b": {"x": 80.0}}
    params, workspace = make_project(tmp_path, runs, metric={})
    params = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, tasks={}))
    monkeypatch.setitem(CORE, "vqa", dataclasses.replace(CORE["vqa"], direction="lower"))
    assert [candidate.run for candidate in rank_runs(params, workspace)["vqa"]] == ["a", "b"]
    other = dataclasses.replace(params.promotion, tasks={"vqa": GateParams(metric="R@1")})
    assert gate_rule(dataclasses.replace(params, promotion=other), "vqa").direction == "higher"
    median = dataclasses.replace(params.promotion, tasks={"vqa": GateParams(metric="median rank (de)")})
    assert gate_rule(dataclasses.replace(params, promotion=median), "vqa").direction == "lower"
