"""peft's LoRA on every family: no layer is bypassed, and merged weights compute the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vlp_models.common.checksums import SUMS
from vlp_models.contrib.lora.adapters import ADAPTER, add_lora, merge_adapter, publish_adapters, read_adapter
from vlp_models.contrib.lora.params import LoraParams
from vlp_models.contrib.plugin_kit.conformance.families import outputs
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import (
    MASK_PROBABILITY,
    Trial,
    build_trial,
    generator,
    make_task,
    pretraining_batch,
    small_config,
    train,
)
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models.checkpoint import WEIGHTS, read_weights, write_checkpoint
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.protocols import Generates
from vlp_models.tasks.base import TaskModel, load_task_model

peft = pytest.importorskip("peft", reason="an extra: requirements-lora.lock")
from peft.tuners.lora import LoraLayer  # noqa: E402

CONFIGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "tden": ("tden", {}),
    "tden-untied": ("tden", {"tie_lm_head": False}),
    "unified_vlp": ("unified_vlp", {}),
    "xgpt": ("xgpt", {}),
    "xgpt-one-stack": ("xgpt", {"structure": "enc", "signal": "kv"}),
    "xgpt-two-stacks": ("xgpt", {"structure": "enc_dec"}),
    "vlmo": ("vlmo", {}),
    "soho": ("soho", {}),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


def wrap(model: nn.Module) -> dict[str, Any]:
    """Put an adapter that is not zero on every linear layer and embedding; return the wrapped modules by name."""
    targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert sorted(wrapped) == sorted(targets)
    return wrapped


def losses(trial: Trial) -> dict[str, Tensor]:
    """Return the loss of each objective."""
    batch, found = pretraining_batch(trial), {}
    for name in trial.model.objectives:
        torch.manual_seed(0)
        loss = trial.model.eval().pretraining_losses(
            batch, objectives={name: None}, generator=generator(), mask_probability=MASK_PROBABILITY
        )
        found[name] = loss[name].mean
    return found


@torch.no_grad()
def everything(trial: Trial) -> dict[str, Tensor]:
    """Return all that the model computes: its outputs, its losses, and the logits of three decoded words."""
    batch = pretraining_batch(trial, seeded=False, last=4)
    found = {name: torch.cat([row.flatten() for row in rows]) for name, rows in outputs(trial.model, batch).items()}
    found |= losses(trial)
    if isinstance(trial.model, Generates):
        state = trial.model.start(batch.image, max_len=3)
        for step, token in enumerate((2, 7, 9)):
            logits, state = trial.model.step(torch.full((len(batch.image),), token), state)
            found[f"step {step}"] = logits.flatten()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_reach_every_layer_and_merge(name: str, scenes: SampleScenes) -> None:
    family, config = CONFIGS[name]
    trial = build_trial(family, small_config(family, config), scenes)
    before = everything(trial)
    wrapped = wrap(trial.model)

    # Gradients reach adapters only, and those of every layer that is used at all.
    plain = build_trial(family, small_config(family, config), scenes)
    torch.stack(list(losses(plain).values())).sum().backward()
    used = {n.rpartition(".")[0] for n, p in plain.model.named_parameters() if p.grad is not None and p.grad.any()}
    torch.stack(list(losses(trial).values())).sum().backward()
    for layer, module in wrapped.items():
        parts = [p for n, p in module.named_parameters() if "lora_" in n]
        if layer in used:
            assert all(p.grad is not None and bool(p.grad.any()) for p in parts), f"{layer} is bypassed"
        assert all(p.grad is None for n, p in module.named_parameters() if "lora_" not in n), layer

    # The adapters change all outputs, and merging them changes none: both read the same weights.
    adapted = everything(trial)
    assert all(not torch.allclose(adapted[key], before[key], atol=1e-4) for key in before if "boxes" not in key)
    for module in wrapped.values():
        module.merge()
    merged = everything(trial)
    for key, value in adapted.items():
        difference, largest = float((merged[key] - value).abs().max()), float(value.abs().max())
        assert difference <= 1e-5 * max(1.0, largest), f"{key}: {difference}"


def test_each_part_of_a_packed_projection_has_its_rows_of_the_adapter() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2).eval()
    x, context = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    base = copy.deepcopy(attention)
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_alpha=4, target_modules=["qkv"], init_lora_weights=False), attention
    )
    layer: Any = attention.qkv
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 2
    with torch.no_grad():
        base.qkv.weight += delta
    expected = base.cross(x, base.project(context))
    torch.testing.assert_close(attention.cross(x, attention.project(context)), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(attention(x), base(x), atol=1e-6, rtol=1e-5)


# ---- A task that is trained by adapters -----------------------------------------------------------------------------


def adapted_task(family: str, scenes: SampleScenes, folder: Path, lora: LoraParams) -> tuple[TaskModel, Path]:
    """Return entailment on a saved model with trained adapters, and the checkpoint that it started from."""
    trial = build_trial(family, small_config(family), scenes)
    base = folder / "base"
    base.mkdir()
    task = make_task(trial, "entailment")
    write_checkpoint(base, nn.ModuleDict({"model": trial.model}), trial.info(), scenes.tokenizer)
    add_lora(task, lora, "finetune.a.lora")
    trained = {name for name, p in task.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name or name.startswith("head.") for name in trained)
    before = {name: p.clone() for name, p in task.named_parameters() if name not in trained}
    batch = task.collate(scenes.samples("hypotheses", task.reader, seeded=True))
    loss = task.training_loss(scenes.root / "shards", {}, folder)
    train(task, lambda update: loss(batch, update=update, generator=generator(update)))
    assert all(torch.equal(p, before[name]) for name, p in task.named_parameters() if name in before)
    return task.eval(), base


@pytest.mark.parametrize("family", ["tden", "soho"])
def test_an_adapter_folder_refers_to_its_base_and_merges(family: str, scenes: SampleScenes, tmp_path: Path) -> None:
    lora = LoraParams(rank=2, alpha=4, targets=["qkv", "out", "words"])
    task, base = adapted_task(family, scenes, tmp_path, lora)
    batch = task.collate(scenes.samples("hypotheses", task.reader))
    with torch.no_grad():
        adapted = task.model.fuse(batch.image, batch.text).pooled_BP
    folder, merged = tmp_path / "adapter", tmp_path / "merged"
    merged.mkdir()
    publish_adapters(folder, task, lora, base, task.info, scenes.tokenizer, task.labels)
    assert (folder / ADAPTER).stat().st_size < (base / WEIGHTS).stat().st_size
    merge_adapter(folder, merged)
    loaded = load_task_model(merged)
    with torch.no_grad():
        found = loaded.model.fuse(batch.image, batch.text).pooled_BP
    torch.testing.assert_close(found, adapted, atol=1e-5, rtol=1e-5)

    # the published task is the same ordinary model
    assert set(task.state_dict()) == set(loaded.state_dict())
    for name, weight in task.state_dict().items():
        torch.testing.assert_close(weight, loaded.state_dict()[name], atol=1e-6, rtol=1e-5)

    (base / WEIGHTS).rename(tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"adapter\.json: its base .* does not exist; `dvc pull` it"):
        read_adapter(folder)
    moved = read_adapter(folder, tmp_path)
    assert set(moved) == set(read_weights(merged))
    save_file({name: weight + 1 for name, weight in moved.items()}, base / WEIGHTS)
    (base / SUMS).unlink()
    with pytest.raises(CheckpointError, match=r"not the weights that .* was trained on"):
        read_adapter(folder)


def test_weights_that_the_run_left_out_do_not_return(scenes: SampleScenes, tmp_path: Path) -> None:
    """The base has a layer more than the run's config."""
    lora = LoraParams(rank=2, targets=["qkv"])
    task, base = adapted_task("tden", scenes, tmp_path, lora)
    save_file({**read_weights(base), "model.more.weight": torch.ones(2)}, base / WEIGHTS)
    (base / SUMS).unlink()
    folder, merged = tmp_path / "adapter", tmp_path / "merged"
    merged.mkdir()
    publish_adapters(folder, task, lora, base, task.info, scenes.tokenizer, task.labels)
    merge_adapter(folder, merged)
    assert "more.weight" not in load_task_model(merged).model.state_dict()


def test_an_unknown_target_is_named(scenes: SampleScenes) -> None:
    task = make_task(build_trial("vlmo", small_config("vlmo"), scenes), "entailment")
    with pytest.raises(ParamsError, match=r"`finetune\.a\.lora\.targets`: q_proj is not a linear layer .* qkv"):
        add_lora(task, LoraParams(rank=2, targets=["q_proj"]), "finetune.a.lora")
