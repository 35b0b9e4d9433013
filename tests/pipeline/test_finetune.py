"""finetune as a stage: from a pretrained model, from another run, from scratch."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_dataset import write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.checkpoint import read_config
from vlp_models.params import Params
from vlp_models.pipeline.stages import finetune, pretrain
from vlp_models.tasks import TASKS
from vlp_models.tasks.base import load_task_model


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained") / "workspace"
    pretrain.run(write_workspace(root), Workspace(root), "tden")
    return root


@pytest.fixture
def workspace(pretrained: Path, tmp_path: Path) -> Workspace:
    shutil.copytree(pretrained, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")


def params_of(workspace: Workspace, **runs: dict[str, Any]) -> Params:
    """params.yaml's runs with these changes: name -> {field: value}; the name names the task, up to a `-`."""
    from vlp_models.params import load_params

    params = load_params(workspace.root / "params.yaml")
    changed = {name: replace(params.finetune[name.partition("_")[0]], **fields) for name, fields in runs.items()}
    return replace(params, finetune={**params.finetune, **changed})


def weights(workspace: Workspace, name: str) -> dict[str, torch.Tensor]:
    return load_file(workspace.checkpoint(name) / "model.safetensors")


@pytest.mark.parametrize("task", TASKS)
def test_each_task_starts_from_the_pretrained_weights(workspace: Workspace, task: str) -> None:
    still = params_of(
        workspace, **{task: {"optimizer": replace(params_of(workspace).finetune[task].optimizer, lr=0.0)}}
    )
    finetune.run(still, workspace, task)
    before, after = weights(workspace, "pretrain/tden"), weights(workspace, f"finetune/{task}")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert set(after) - set(before) == {name for name in after if name.startswith("head.")}
    assert load_task_model(workspace.checkpoint(f"finetune/{task}")).task == task
    assert workspace.curve(f"finetune/{task}").exists()

    finetune.run(params_of(workspace), workspace, task)
    assert any(not torch.equal(weights(workspace, f"finetune/{task}")[name], tensor) for name, tensor in before.items())


def test_head_is_loaded_from_a_run_of_the_same_task(workspace: Workspace) -> None:
    finetune.run(params_of(workspace), workspace, "vqa")
    still = replace(params_of(workspace).finetune["vqa"].optimizer, lr=0.0)
    finetune.run(params_of(workspace, vqa_more={"start": "finetune/vqa", "optimizer": still}), workspace, "vqa_more")
    before, after = weights(workspace, "finetune/vqa"), weights(workspace, "finetune/vqa_more")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_self_critical_training_starts_from_a_captioner(workspace: Workspace) -> None:
    """What it leaves is a captioning model, by its checkpoint and by its run."""
    scst = {"self_critical": {"samples": 2}}
    params = params_of(workspace, captioning_scst={"start": "finetune/captioning", "options": scst})
    finetune.run(params, workspace, "captioning")
    finetune.run(params, workspace, "captioning_scst")
    task_model = load_task_model(workspace.checkpoint("finetune/captioning_scst"))
    assert task_model.task == "captioning"
    header, *rows = workspace.curve("finetune/captioning_scst").read_text().splitlines()
    assert {"reward", "reward_greedy", "val_reward_greedy", "zero_rewards"} <= set(header.split(","))
    assert "reward_share" not in header, "a timing is of the machine, not of the result"
    assert len(rows) == 6, "an epoch has each image once: 44 by eights"
    with pytest.raises(ParamsError, match=r"vqa_scst\.options\.self_critical"):
        finetune.run(params_of(workspace, vqa_scst={"options": scst}), workspace, "vqa_scst")


def test_without_pretraining_it_starts_from_the_initial_weights(workspace: Workspace) -> None:
    still = replace(params_of(workspace).finetune["vqa"].optimizer, lr=0.0)
    fields = {"start": "initial/tden", "optimizer": still}
    finetune.run(params_of(workspace, vqa_fresh=fields), workspace, "vqa_fresh")
    before, after = weights(workspace, "initial/tden"), weights(workspace, "finetune/vqa_fresh")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    words = "model.text_embedding.words.weight"
    assert not torch.equal(weights(workspace, "pretrain/tden")[words], before[words])


def test_config_updates_the_config_of_the_start(workspace: Workspace) -> None:
    run = {"config": {"dropout": 0.3}, "max_steps": 1}
    finetune.run(params_of(workspace, vqa_dropped=run), workspace, "vqa_dropped")
    info = read_config(workspace.checkpoint("finetune/vqa_dropped"))
    assert info.model_config["dropout"] == 0.3 and info.name == "tden"
    assert read_config(workspace.checkpoint("pretrain/tden")).model_config["dropout"] != 0.3


def test_checkpoint_with_other_features_classes_or_vocabulary_is_refused(workspace: Workspace) -> None:
    """Classes count by name: imported features may share a detector_id. Nothing is trained."""
    config = workspace.checkpoint("pretrain/tden") / "config.json"
    text = config.read_text()
    (config.parent / "SHA256SUMS").unlink()
    classes = ["background", "disc", "box", "star"]
    for change, message in (
        ({"detector_id": "other"}, "detector_id 'other', but the shards have 'toy'"),
        (
            {"classes": classes},
            r"pretrain/tden: made from features with 3 classes \(disc, box, \.\.\.\), but the shards have "
            r"another detector's or backbone's with 3 classes \(circle, square, \.\.\.\); run `dvc repro`",
        ),
    ):
        config.write_text(json.dumps(json.loads(text) | change))
        with pytest.raises(CheckpointError, match=message):
            finetune.run(params_of(workspace), workspace, "vqa")
    config.write_text(text)
    with (config.parent / "vocab.txt").open("a") as file:
        file.write("new\n")
    with pytest.raises(CheckpointError, match="vocabulary differs"):
        finetune.run(params_of(workspace), workspace, "vqa")
    assert not workspace.checkpoint("finetune/vqa").exists()


def test_what_is_missing_or_unknown_is_named(workspace: Workspace) -> None:
    with pytest.raises(ParamsError, match="no fine-tuning run `vqqa`; did you mean `vqa`"):
        finetune.run(params_of(workspace), workspace, "vqqa")
    with pytest.raises(ParamsError, match="no dataset `coco`"):
        finetune.run(params_of(workspace, vqa={"sources": {"coco": 1}}), workspace, "vqa")
    with pytest.raises(ParamsError, match=r"`finetune\.vqa\.options\.beams`: unknown option of the task vqa"):
        finetune.run(params_of(workspace, vqa={"options": {"beams": 2}}), workspace, "vqa")
    with pytest.raises(DataError, match="dvc repro finetune@vqa"):
        finetune.run(params_of(workspace, retrieval={"start": "finetune/vqa"}), workspace, "retrieval")


def test_texts_per_image_needs_a_supporting_task(workspace: Workspace) -> None:
    finetune.run(params_of(workspace, vqa={"texts_per_image": 2}), workspace, "vqa")
    report = json.loads((workspace.root / "reports/training/finetune/vqa.json").read_text())
    assert report["samples"] == report["train_samples"] * params_of(workspace).finetune["vqa"].max_epochs
    with pytest.raises(ParamsError, match=r"finetune\.retrieval\.texts_per_image: 2`.*remove it"):
        finetune.run(params_of(workspace, retrieval={"texts_per_image": 2}), workspace, "retrieval")
