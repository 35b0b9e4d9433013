"""A fine-tuning run with `lora`: the stage trains adapters, and what comes after reads an ordinary checkpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from toy_dataset import write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.lora.adapters import read_adapter
from vlp_models.errors import MissingToolError
from vlp_models.models.checkpoint import ADAPTER_FOLDER, WEIGHTS, read_weights
from vlp_models.pipeline.stages import finetune, initial, pretrain
from vlp_models.serving.bundle import CHECKPOINT, write_bundle
from vlp_models.tasks.base import load_task_model


def test_a_run_trains_adapters_only_and_publishes_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    lora = {"rank": 2, "alpha": 4, "dropout": 0.1, "targets": ["qkv"]}
    params = write_workspace(tmp_path, finetune={"vqa": {"task": "vqa", "start": "pretrain/tden", "lora": lora}})
    initial.run(params, workspace, "tden")
    pretrain.run(params, workspace, "tden")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "peft", None)
        with pytest.raises(MissingToolError, match=r"`finetune\.vqa\.lora` needs peft.*extra `lora`"):
            finetune.run(params, workspace, "vqa")
    pytest.importorskip("peft", reason="an extra: requirements-lora.lock")
    finetune.run(params, workspace, "vqa")

    checkpoint, base = workspace.checkpoint("finetune/vqa"), workspace.checkpoint("pretrain/tden")
    found, before = read_weights(checkpoint), read_weights(base)
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    assert changed and all(name.endswith(".qkv.weight") for name in changed)
    assert set(found) - set(before) == {name for name in found if name.startswith("head.")}
    load_task_model(checkpoint)

    adapter = read_adapter(checkpoint / ADAPTER_FOLDER)
    assert set(adapter) == set(found)
    for name, weight in adapter.items():
        torch.testing.assert_close(weight, found[name], atol=1e-6, rtol=1e-5)
    small = (checkpoint / ADAPTER_FOLDER / "adapter.safetensors").stat().st_size
    assert small < (checkpoint / WEIGHTS).stat().st_size / 2

    bundle = tmp_path / "bundle"
    for folder in (bundle, tmp_path / "detector"):
        folder.mkdir()
    write_bundle(bundle, checkpoint=checkpoint, detector=tmp_path / "detector", features={"source": "grid"})
    assert (bundle / CHECKPOINT / WEIGHTS).exists() and not (bundle / CHECKPOINT / ADAPTER_FOLDER).exists()

    # the same run again is the same, to the bit
    (checkpoint / ADAPTER_FOLDER).rename(tmp_path / "first")
    for path in workspace.root.glob(".work/*"):
        shutil.rmtree(path)
    finetune.run(params, workspace, "vqa")
    assert all(torch.equal(weight, found[name]) for name, weight in read_weights(checkpoint).items())
