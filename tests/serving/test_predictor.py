"""Tasks that are not served."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_dataset import make_toy
from toy_tasks import make

from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.serving.bundle import write_content
from vlp_models.serving.predictor import Predictor
from vlp_models.tasks import TASKS


@pytest.mark.parametrize("task", [task for task in ("retrieval", "vcr") if task in TASKS])
def test_unserved_task_is_an_error_before_the_detector_loads(tmp_path: Path, task: str) -> None:
    task_model = make(make_toy(tmp_path), task)
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint(tmp_path / "checkpoint", task_model, task_model.info, task_model.tokenizer)
    write_content(tmp_path, [])
    with pytest.raises(CheckpointError, match=f"the task {task} cannot be served .*`dvc repro evaluate` scores it"):
        Predictor(tmp_path)
