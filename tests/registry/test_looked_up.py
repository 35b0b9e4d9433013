"""A version that looks captions up has seen each picture whose captions it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR
from toy_registry import TRACKING, answers, toy_items, write_evaluation

from vlp_models.common.workspace import SEARCH
from vlp_models.forgetting.versions import looks_up
from vlp_models.registry.client import connect
from vlp_models.registry.versions import register
from vlp_models.tasks.caption_search import CAPTIONS


@pytest.mark.parametrize("holds", [True, False])
def test_a_picture_whose_captions_a_version_holds_is_found_in_it(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # which MLflow sets
    bundle = tmp_path / "made" / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    (bundle / "checkpoint" / "weights").write_text("1")
    if holds:
        (bundle / SEARCH).mkdir()
        (bundle / SEARCH / CAPTIONS).write_text(json.dumps([["mine/a", ["a dog"]], ["mine/b", ["a cat"]]]))
    client = connect(TRACKING, tmp_path)
    made = register(
        client,
        name="toy-captioning",
        task="captioning",
        run="first",
        bundle=bundle,
        content="c",
        metrics={},
        tags={"run": "first"},
        card="",
        evaluation=write_evaluation(tmp_path / "evaluation", [toy_items(answers(0.5))]),
        predicted={"caption": "a dog"},
        inputs=[],
        trained_in="",
        lineage={},
        files={},
    )
    version = client.get_model_version("toy-captioning", str(made.version))
    assert looks_up(version, {"mine/b", "other"}) is holds
    assert not looks_up(version, {"mine/c"})
    with monkeypatch.context() as broken:
        broken.setattr("json.loads", lambda text: [["mine/b"]])
        if holds:
            with pytest.raises(OSError, match="is damaged"):
                looks_up(version, {"mine/b"})

    def fails(*_: Any, **__: Any) -> str:  # as a bucket does, also for a file that is not there
        raise MlflowException("An error occurred (404)", error_code=INTERNAL_ERROR)

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", fails)
    assert not looks_up(version, frozenset())
    if not holds:
        assert not looks_up(version, {"mine/b"})
