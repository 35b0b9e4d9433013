"""A version that looks up captions was exposed to every image whose captions it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR
from toy_registry import TRACKING, answers, toy_items, write_evaluation

from vlp_models.common.workspace import SEARCH
from vlp_models.contrib.forgetting.registered import stores_captions_of
from vlp_models.registry.client import connect
from vlp_models.registry.versions import VersionRecord, register
from vlp_models.tasks.caption_search import CAPTIONS


@pytest.mark.slow
@pytest.mark.parametrize("holds", [True, False])
def test_image_is_found_in_a_version_that_holds_its_captions(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # MLflow sets it
    bundle = tmp_path / "made" / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    (bundle / "checkpoint" / "weights").write_text("1")
    if holds:
        (bundle / SEARCH).mkdir()
        (bundle / SEARCH / CAPTIONS).write_text(json.dumps([["mine/a", ["a dog"]], ["mine/b", ["a cat"]]]))
    client = connect(TRACKING, tmp_path)
    record = VersionRecord(
        name="toy-captioning",
        task="captioning",
        run="first",
        bundle=bundle,
        content="c",
        evaluation=write_evaluation(tmp_path / "evaluation", [toy_items(answers(0.5))]),
        tags={"run": "first"},
        prediction={"caption": "a dog"},
    )
    made = register(client, record)
    version = client.get_model_version("toy-captioning", str(made.version))
    assert stores_captions_of(version, {"mine/b", "other"}) is holds
    assert not stores_captions_of(version, {"mine/c"})
    with monkeypatch.context() as broken:
        broken.setattr("json.loads", lambda text: [["mine/b"]])
        if holds:
            with pytest.raises(OSError, match="is damaged"):
                stores_captions_of(version, {"mine/b"})

    def fails(*_: Any, **__: Any) -> str:  # as a bucket does for a missing file as well
        raise MlflowException("An error occurred (404)", error_code=INTERNAL_ERROR)

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", fails)
    assert not stores_captions_of(version, frozenset())
    if not holds:
        assert not stores_captions_of(version, {"mine/b"})
