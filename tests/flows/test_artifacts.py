"""Artifacts of a run: Prefect accepts their keys."""

from __future__ import annotations

import json
from pathlib import Path

from prefect.client.schemas.actions import ArtifactCreate

from vlp_models.flows.artifacts import make_artifacts
from vlp_models.params import load_params

ROOT = Path(__file__).parents[2]


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
