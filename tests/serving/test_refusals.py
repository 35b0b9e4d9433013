"""What isn't served says so, before any detector is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_tasks import make, written
from toy_world import make_toy

from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.serving.predictor import Predictor


@pytest.mark.parametrize("task", ["retrieval", "vcr"])
def test_a_task_that_is_not_served_is_refused_with_the_way_out(tmp_path: Path, task: str) -> None:
    task_model = make(make_toy(tmp_path), task)
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint(tmp_path / "checkpoint", task_model, written(task_model), task_model.tokenizer)
    with pytest.raises(CheckpointError, match=f"the task {task} is not served: .*`dvc repro evaluate` scores it"):
        Predictor(tmp_path)
