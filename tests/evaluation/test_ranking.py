"""Which run of a task is the best: numbers of different datasets never compete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.evaluation.ranking import candidates
from vlp_models.params import GateParams, Params, load_params

ROOT = Path(__file__).parents[2]


def world(tmp_path: Path, runs: dict[str, dict[str, float | None]], **tracking: Any) -> tuple[Params, Workspace]:
    """runs: run -> dataset -> accuracy of an NLVR run on test."""
    params = load_params(ROOT / "params.yaml")
    vqa = params.finetune["tden-vqa"]
    workspace = Workspace(tmp_path)
    for name, values in runs.items():
        workspace.evaluation(name).mkdir(parents=True)
        scores = [{"dataset": d, "split": "test", "metric": "accuracy", "value": v} for d, v in values.items()]
        (workspace.evaluation(name) / "scores.json").write_text(json.dumps(scores))
    finetune = {name: dataclasses.replace(vqa, task="nlvr", blank_images="blind" in name) for name in runs}
    tracked = dataclasses.replace(params.tracking, **tracking)
    return dataclasses.replace(params, finetune=finetune, tracking=tracked), workspace


def test_a_lesson_does_not_win_by_an_easier_test(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {
        "lesson": {"simple": 97.0, "boxes": 90.0},
        "final": {"boxes": 88.0, "nlvr": 84.0},
        "worse": {"nlvr": 80.0},
        "blind": {"nlvr": 99.0},
    }
    params, workspace = world(tmp_path, runs, dataset={"nlvr": "nlvr"})
    found = candidates(params, workspace)["nlvr"]
    assert [(c.run, c.value) for c in found] == [("final", 84.0), ("worse", 80.0), ("lesson", None)]


def test_the_best_is_chosen_on_val_where_all_were_scored_there(tmp_path: Path) -> None:
    """The best of several by the test, gated on the same items, would be its own judge."""
    params, workspace = world(tmp_path, {"a": {"x": 70.0}, "b": {"x": 60.0}})

    def add(run: str, value: float) -> None:
        file = workspace.evaluation(run) / "scores.json"
        record = {"dataset": "x", "split": "val", "metric": "accuracy", "value": value}
        file.write_text(json.dumps([*json.loads(file.read_text()), record]))

    add("a", 50.0)
    assert [(c.run, c.value) for c in candidates(params, workspace)["nlvr"]] == [("a", 70.0), ("b", 60.0)]
    add("b", 55.0)
    assert [(c.run, c.value) for c in candidates(params, workspace)["nlvr"]] == [("b", 55.0), ("a", 50.0)]
    on_test = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, select_on="test"))
    assert [c.run for c in candidates(on_test, workspace)["nlvr"]] == ["a", "b"]


def test_without_a_named_dataset_the_shared_ones_decide(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 99.0, "y": 50.0}, "b": {"y": 60.0}}
    params, workspace = world(tmp_path, runs)
    assert [c.run for c in candidates(params, workspace)["nlvr"]] == ["b", "a"]


def test_lower_is_better_where_the_gate_says_so(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 9.0}, "b": {"x": 3.0}, "c": {"x": None}}
    params, workspace = world(tmp_path, runs)
    gate = GateParams(metric="accuracy", direction="lower")
    params = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, tasks={"nlvr": gate}))
    assert [c.run for c in candidates(params, workspace)["nlvr"]] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("runs", "tracking", "says"),
    [
        ({"a": {"x": 9.0}, "b": {"y": 8.0}}, {}, r"a on x; b on y.*tracking.dataset: \{nlvr: NAME\}"),
        (
            {"a": {"x": 9.0}},
            {"dataset": {"nlvr": "z"}},
            "nlvr: no run was scored on `z`.*there are: x",
        ),
        ({"a": {}}, {}, "no run of nlvr has accuracy on test"),
    ],
)
def test_what_can_not_be_ranked_is_said(tmp_path: Path, runs: Any, tracking: Any, says: str) -> None:
    params, workspace = world(tmp_path, runs, **tracking)
    with pytest.raises(ParamsError, match=says):
        candidates(params, workspace)


def test_a_metric_that_no_run_could_compute_makes_no_challenger(tmp_path: Path) -> None:
    params, workspace = world(tmp_path, {"a": {"x": None}})
    assert [(c.run, c.value) for c in candidates(params, workspace)["nlvr"]] == [("a", None)]


def test_a_task_that_params_say_nothing_of_has_its_own_metric(tmp_path: Path) -> None:
    runs: dict[str, dict[str, float | None]] = {"a": {"x": 70.0}, "b": {"x": 80.0}}
    params, workspace = world(tmp_path, runs, metric={})
    params = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, tasks={}))
    assert [candidate.run for candidate in candidates(params, workspace)["nlvr"]] == ["b", "a"]
