"""peft's LoRA on every family: no layer is bypassed, and merged weights compute the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.protocols import Generates
from vlp_models.training.conformance.families import outputs
from vlp_models.training.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.training.conformance.trial import (
    MASK_PROBABILITY,
    Trial,
    build_trial,
    generator,
    pretraining_batch,
    small_config,
)

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
    assert all(not torch.allclose(adapted[key], before[key], atol=1e-4) for key in before)
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
