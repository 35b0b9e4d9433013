"""`vlp verify-resume`: a short training of the project, killed for real and resumed, against one that ran through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_dataset import write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.verify.resume import _difference, verify_resume
from vlp_models.errors import DataError, ParamsError


@pytest.mark.pipeline
def test_resumed_training_equals_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    found = verify_resume(params, workspace, "pretrain/tden", steps=8)
    assert found.differ == [] and found.files > 3 and 0 < found.killed_at <= 8
    assert not list((tmp_path / ".work").glob(".verify-resume*")) and not workspace.checkpoint("pretrain/tden").exists()
    with pytest.raises(DataError, match=r"run: dvc repro pretrain@tden|pretrain@tden"):
        verify_resume(params, workspace, "finetune/vqa")  # what it starts from is not here
    with pytest.raises(ParamsError, match="pretrain/tdn: no such run"):
        verify_resume(params, workspace, "pretrain/tdn")


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    weights = {"a": np.zeros(4, np.float32), "b": np.ones(2, np.float32)}
    one, other = tmp_path / "model.safetensors", tmp_path / "other" / "model.safetensors"
    other.parent.mkdir()
    save_file(weights, one)
    assert "missing in one" in _difference(one, other)
    save_file(weights, other)
    assert _difference(one, other) == ""
    save_file(weights | {"b": np.nextafter(np.ones(2, np.float32), np.float32(2))}, other)
    assert "1 of 2 tensors differ, by up to 1.19e-07" in _difference(one, other)
