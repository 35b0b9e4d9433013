"""finetune as a stage: from a pretrained model, from another run, from scratch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_world import write_workspace

from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.params import Params
from vlp_models.stages import finetune, pretrain
from vlp_models.tasks.load import load_task_model
from vlp_models.workspace.paths import Workspace


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained") / "workspace"
    pretrain.run(write_workspace(root), Workspace(root))
    return root


@pytest.fixture
def workspace(pretrained: Path, tmp_path: Path) -> Workspace:
    shutil.copytree(pretrained, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")


def params_of(workspace: Workspace, **runs: dict[str, Any]) -> Params:
    """params.yaml's runs with these changes: name -> {field: value}; the name says the task, up to a `-`."""
    from vlp_models.params import load_params

    params = load_params(workspace.root / "params.yaml")
    changed = {name: replace(params.finetune[name.partition("_")[0]], **fields) for name, fields in runs.items()}
    return replace(params, finetune={**params.finetune, **changed})


def weights(workspace: Workspace, name: str) -> dict[str, torch.Tensor]:
    return load_file(workspace.checkpoint(name) / "model.safetensors")


@pytest.mark.parametrize("task", ["captioning", "vqa", "nlvr", "retrieval", "vcr"])
def test_each_task_starts_from_the_pretrained_weights(workspace: Workspace, task: str) -> None:
    still = params_of(
        workspace, **{task: {"optimizer": replace(params_of(workspace).finetune[task].optimizer, lr=0.0)}}
    )
    finetune.run(still, workspace, task)
    before, after = weights(workspace, "pretrain"), weights(workspace, task)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert set(after) - set(before) == {name for name in after if name.startswith("head.")}
    assert load_task_model(workspace.checkpoint(task)).task == task
    assert (workspace.reports / "curves" / f"{task}.csv").exists()

    finetune.run(params_of(workspace), workspace, task)
    assert any(not torch.equal(weights(workspace, task)[name], tensor) for name, tensor in before.items())


def test_another_run_of_the_task_hands_on_its_head(workspace: Workspace) -> None:
    finetune.run(params_of(workspace), workspace, "vqa")
    still = replace(params_of(workspace).finetune["vqa"].optimizer, lr=0.0)
    finetune.run(params_of(workspace, vqa_more={"init": "vqa", "optimizer": still}), workspace, "vqa_more")
    before, after = weights(workspace, "vqa"), weights(workspace, "vqa_more")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_self_critical_training_goes_on_from_a_captioner(workspace: Workspace) -> None:
    """What it leaves is a captioning model, by its checkpoint and by its run."""
    scst = {"self_critical": {"samples": 2}}
    params = params_of(workspace, captioning_scst={"init": "captioning", "options": scst})
    finetune.run(params, workspace, "captioning")
    finetune.run(params, workspace, "captioning_scst")
    task_model = load_task_model(workspace.checkpoint("captioning_scst"))
    assert task_model.task == "captioning"
    header, *rows = (workspace.reports / "curves" / "captioning_scst.csv").read_text().splitlines()
    assert {"reward", "reward_greedy", "val_reward_greedy", "zero_rewards"} <= set(header.split(","))
    assert "reward_share" not in header, "a timing is of the machine, not of the result"
    assert len(rows) == 6, "an epoch has each image once: 44 by eights"
    with pytest.raises(ParamsError, match=r"vqa_scst\.options\.self_critical"):
        finetune.run(params_of(workspace, vqa_scst={"options": scst}), workspace, "vqa_scst")


def test_scratch_takes_the_architecture_alone(workspace: Workspace) -> None:
    still = replace(params_of(workspace).finetune["nlvr"].optimizer, lr=0.0)
    fields = {"scratch": True, "optimizer": still, "seed": 2}  # pretraining's seed would give parts of its weights
    finetune.run(params_of(workspace, nlvr_scratch=fields), workspace, "nlvr_scratch")
    before, after = weights(workspace, "pretrain"), weights(workspace, "nlvr_scratch")
    matrices = [name for name, tensor in before.items() if tensor.ndim == 2]
    assert not any(torch.equal(after[name], before[name]) for name in matrices)


def test_a_checkpoint_of_other_features_or_words_is_refused(workspace: Workspace) -> None:
    config = workspace.checkpoint("pretrain") / "config.json"
    text = config.read_text()
    (workspace.checkpoint("pretrain") / "SHA256SUMS").unlink()
    config.write_text(text.replace('"detector_id": "toy"', '"detector_id": "other"'))
    with pytest.raises(CheckpointError, match="detector_id 'other', the shards hold 'toy'"):
        finetune.run(params_of(workspace), workspace, "vqa")
    config.write_text(text)
    with (workspace.checkpoint("pretrain") / "vocab.txt").open("a") as file:
        file.write("new\n")
    with pytest.raises(CheckpointError, match="another vocabulary"):
        finetune.run(params_of(workspace), workspace, "vqa")


def test_what_is_missing_or_unknown_is_named(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match="there are: captioning, vqa, nlvr, retrieval, vcr"):
        finetune.run(params_of(workspace), workspace, "vcrr")
    with pytest.raises(ParamsError, match="no dataset `coco`"):
        finetune.run(params_of(workspace, vqa={"sources": {"coco": 1}}), workspace, "vqa")
    with pytest.raises(ParamsError, match=r"`finetune\.vqa\.options\.beams`: the task vqa has no such option"):
        finetune.run(params_of(workspace, vqa={"options": {"beams": 2}}), workspace, "vqa")
    with pytest.raises(DataError, match="dvc repro finetune@vqa"):
        finetune.run(params_of(workspace, nlvr={"init": "vqa"}), workspace, "nlvr")
