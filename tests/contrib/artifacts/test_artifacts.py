"""Artifacts of a run: Prefect accepts their keys."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from prefect.client.schemas.actions import ArtifactCreate

from vlp_models.common.io import write_json
from vlp_models.contrib.artifacts.tables import describe_results, make_artifacts
from vlp_models.flows.pipeline import Outcome
from vlp_models.params import load_params

ROOT = Path(__file__).parents[3]


def test_the_champion_is_next_to_the_metric_that_the_gate_judges_by(tmp_path: Path) -> None:
    params = load_params(ROOT / "params.yaml")
    params = dataclasses.replace(params, tracking=dataclasses.replace(params.tracking, metric={}))
    reports = tmp_path / "reports"
    (reports / "promotion").mkdir(parents=True)
    rows = [{"task": "vqa", "run": "a", "metric": metric, "value": 60.0} for metric in ("accuracy", "yes/no")]
    (reports / "summary.json").write_text(json.dumps(rows))
    (reports / "registered.json").write_text(json.dumps({"vqa": [{"name": "vlp-vqa", "version": 1, "run": "a"}]}))

    def table(key: str) -> list[dict[str, Any]]:
        return next(artifact.rows or [] for artifact in make_artifacts(tmp_path, params, []) if artifact.key == key)

    # Before any decision: the task's own metric, although `tracking.metric` has no entry.
    assert table("candidates")[0]["metric"] == "accuracy"
    decision = {"run": "a", "numbers": {"metric": "yes/no", "champion_value": 55.0}}
    (reports / "promotion" / "vqa.json").write_text(json.dumps(decision))
    assert [row["champion"] for row in table("results")] == [None, 55.0]


def test_a_run_is_named_by_its_verdict_which_is_also_its_first_artifact(tmp_path: Path) -> None:
    numbers = {"metric": "CIDEr", "value": 40.02, "champion_value": 29.0}
    decision = {"action": "refused", "outcome": "inconclusive", "version": 3, "champion": 2, "numbers": numbers}
    ran = [Outcome("evaluate", "ran"), Outcome("promote captioning", "refused", "refused (inconclusive): version 3")]
    assert describe_results(ran, {"captioning": decision}) == "CIDEr 40.0, refused"
    assert describe_results(ran[:1], {"captioning": decision}) == "ran evaluate"
    assert describe_results([Outcome("promote captioning", "up to date")], {}) == "nothing was stale"
    write_json(tmp_path / "reports" / "promotion" / "captioning.json", decision)
    first = make_artifacts(tmp_path, load_params(ROOT / "params.yaml"), ran)[0]
    verdict = "captioning: CIDEr 40.0, refused (refused: version 3 (inconclusive); champion: version 2, 29.0)"
    assert first.key == "promotion" and first.description.startswith(verdict)


def test_tasks_of_plugins_give_valid_keys(tmp_path: Path) -> None:
    receipt = {"name": "vlp-guess_color", "version": 1, "run": "a", "model": "tden", "challenger": True}
    scores = [{"task": "guess_color", "metric": "accuracy", "value": 40.0}]
    folder = tmp_path / "reports" / "aliases" / "guess_color-Best_one"
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps(scores))
    (tmp_path / "reports" / "registered.json").write_text(json.dumps({"guess_color": [receipt]}))
    keys = [artifact.key for artifact in make_artifacts(tmp_path, load_params(ROOT / "params.yaml"), [])]
    assert {"alias-guess-color-best-one", "mlflow-guess-color"} <= set(keys)
    assert [ArtifactCreate(key=key).key for key in keys] == keys
