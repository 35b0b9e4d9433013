"""scheduled_sampling as a stage: off, after pretraining, from the start, and as the beginning of a fine-tuning."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from toy_world import write_workspace

from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.params import Params
from vlp_models.stages import finetune, pretrain, scheduled_sampling
from vlp_models.workspace.paths import Workspace

ROOT = Path(__file__).parent.parent.parent


def with_(params: Params, **changes: Any) -> Params:
    return replace(params, scheduled_sampling=replace(params.scheduled_sampling, **changes))


def weights(workspace: Workspace, name: str) -> dict[str, torch.Tensor]:
    return load_file(workspace.checkpoint(name) / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_goes_on_from_pretraining_and_a_fine_tuning_goes_on_from_it(tmp_path: Path) -> None:
    workspace, params = Workspace(tmp_path), write_workspace(tmp_path)
    with pytest.raises(DataError, match="dvc repro pretrain"):
        scheduled_sampling.run(with_(params, scheme="a"), workspace)
    pretrain.run(params, workspace)

    still = replace(params.scheduled_sampling.optimizer, lr=0.0, muon_lr=0.0)
    scheduled_sampling.run(with_(params, scheme="a", optimizer=still), workspace)
    assert same(weights(workspace, "scheduled_sampling"), weights(workspace, "pretrain")), "it began there"
    scheduled_sampling.run(with_(params, scheme="a"), workspace)
    assert not same(weights(workspace, "scheduled_sampling"), weights(workspace, "pretrain"))
    final = json.loads((tmp_path / "reports" / "scheduled_sampling.json").read_text())
    assert {"mlm", "msg", "ism", "mlm_pass2", "msg_pass2", "moc_pass2", "val_loss"} <= set(final)

    tuned = replace(params.finetune["captioning"], init="scheduled_sampling", optimizer=still)
    finetune.run(replace(params, finetune={"captioning": tuned}), workspace, "captioning")
    assert same(weights(workspace, "captioning"), weights(workspace, "scheduled_sampling"))
    with pytest.raises(ParamsError, match="can't be called `scheduled_sampling`"):
        finetune.run(replace(params, finetune={"scheduled_sampling": tuned}), workspace, "scheduled_sampling")

    config = workspace.checkpoint("pretrain") / "config.json"
    (config.parent / "SHA256SUMS").unlink()
    config.write_text(config.read_text().replace('"detector_id": "toy"', '"detector_id": "other"'))
    with pytest.raises(CheckpointError, match="detector_id 'other'"):
        scheduled_sampling.run(with_(params, scheme="b"), workspace)


def test_from_the_start_it_needs_no_pretraining(tmp_path: Path) -> None:
    workspace, params = Workspace(tmp_path), write_workspace(tmp_path)
    scheduled_sampling.run(with_(params, scheme="c", init="scratch"), workspace)
    assert not workspace.checkpoint("pretrain").exists()
    assert (workspace.checkpoint("scheduled_sampling") / "model.safetensors").exists()


def test_switched_off_it_hands_on_in_no_time_without_torch(tmp_path: Path) -> None:
    workspace, params = Workspace(tmp_path), write_workspace(tmp_path)
    assert params.scheduled_sampling.scheme == "none", "the default"
    before = workspace.checkpoint("pretrain")
    before.mkdir(parents=True)
    (before / "model.safetensors").write_bytes(b"weights")
    code = (
        "import sys, pathlib; from vlp_models.params import load_params; from vlp_models.workspace.paths import "
        "Workspace; from vlp_models.stages import scheduled_sampling as s; s.run(load_params(), Workspace()); "
        "sys.exit('torch' in sys.modules)"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert time.perf_counter() - start < 2
    assert (workspace.checkpoint("scheduled_sampling") / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "reports" / "curves" / "scheduled_sampling.csv").exists()


def test_dvc_runs_no_fine_tuning_again_because_of_it() -> None:
    """Only what names it depends on it."""
    pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    assert "checkpoints/pretrain" in pipeline["scheduled_sampling"]["deps"]
    assert pipeline["finetune"]["do"]["deps"][0] == "checkpoints/${item.init}"
    assert {run["init"] for run in params["finetune"].values()} == {"pretrain"}
