"""Warm-up, decay, and which parameters decay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vlp_models.errors import ParamsError
from vlp_models.models import FAMILIES, DataFacts, build_model
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import FeedForward, TransformerBlock
from vlp_models.models.xgpt.layers import AttentionOnAttention
from vlp_models.params import OptimizerParams
from vlp_models.params.schema import build
from vlp_models.training.optim import (
    block_matrices,
    build_optimizer,
    learning_rate_factor,
    parameter_groups,
)


def test_linear_schedule_by_hand() -> None:
    params = OptimizerParams(lr=1.0, warmup_fraction=0.2)
    factors = [learning_rate_factor(k, total=10, params=params) for k in range(11)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])


def test_stepwise_schedule_by_hand() -> None:
    """20 epochs of 10 updates, warmed up for 4, times 0.2 after 10 and 12: the public code's VQA."""
    params = OptimizerParams(lr=1.0, warmup_fraction=0.2, schedule="steps", decay_at=[0.5, 0.6], decay_by=0.2)
    factors = [learning_rate_factor(k, total=200, params=params) for k in (0, 39, 40, 99, 100, 119, 120, 199)]
    assert factors == pytest.approx([1 / 40, 1.0, 1.0, 1.0, 0.2, 0.2, 0.04, 0.04])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "steps"}, "needs `decay_at`"),
        ({"decay_at": [0.5]}, "only applies to `schedule: steps`, not linear"),
        ({"schedule": "steps", "decay_at": [0.6, 0.5]}, "must increase strictly"),
        ({"schedule": "steps", "decay_at": [0.5, 0.5]}, "must increase strictly"),
        ({"schedule": "steps", "decay_at": [10, 12]}, "shares of all updates, not epochs"),
        ({"schedule": "steps", "decay_at": [0.1]}, "between `warmup_fraction`"),
        ({"schedule": "steps", "decay_at": [0.5], "decay_by": 1.5}, "decay_by"),
    ],
)
def test_invalid_decay_steps_name_their_key(settings: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=rf"params.yaml: `finetune.vqa.optimizer.*{message}"):
        build(OptimizerParams, {"lr": 1.0, **settings}, where="finetune.vqa.optimizer")


FRACTION = st.floats(0, 1, allow_subnormal=False)  # training flushes denormals to zero, for the whole process


@given(st.sampled_from(["linear", "cosine", "constant", "steps"]), FRACTION, st.integers(1, 500), FRACTION)
def test_learning_rate_is_positive_and_bounded(schedule: str, warmup: float, total: int, place: float) -> None:
    decay_at = [0.2 + 0.7 * warmup, 0.95] if schedule == "steps" and warmup < 0.5 else []
    schedule = "constant" if schedule == "steps" and not decay_at else schedule
    params = OptimizerParams(lr=1.0, warmup_fraction=warmup, schedule=schedule, decay_at=decay_at)  # type: ignore[arg-type]
    step = min(int(place * total), total - 1)
    assert 0 < learning_rate_factor(step, total=total, params=params) <= 1


def test_only_matrices_have_weight_decay() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 2))
    decayed, plain = parameter_groups(module.parameters(), 0.01)
    assert decayed["weight_decay"] == 0.01
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2), (4, 2)]
    assert plain["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))


def blocks_and_head() -> nn.ModuleDict:
    torch.manual_seed(3)
    block = TransformerBlock(8, 2, 16, dropout=0.0, attention_dropout=0.0, eps=1e-5)
    return nn.ModuleDict({"words": nn.Embedding(5, 8), "block": block, "head": nn.Linear(8, 5)})


MUON = OptimizerParams(lr=1e-3, muon_lr=3e-3, warmup_fraction=0.5)


def test_muon_updates_block_matrices_and_adamw_the_rest() -> None:
    module = blocks_and_head()
    names = {id(p): name for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, MUON)
    rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert set(rates) == set(names.values())
    by_muon = {name for name, lr in rates.items() if lr == 3e-3}
    assert by_muon == {n for n, p in module.named_parameters() if n.startswith("block.") and p.ndim == 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_finds_the_blocks_of_every_family(family: str) -> None:
    with torch.device("meta"):
        model = build_model(family, {}, DataFacts(vocab_size=20, mask_id=4, feature_dim=8, num_classes=3))
    taken = {id(p) for p in block_matrices(model)}
    parts = [m for m in model.modules() if isinstance(m, MultiHeadAttention | FeedForward | AttentionOnAttention)]
    of_parts = {id(m.weight) for part in parts for m in part.modules() if isinstance(m, nn.Linear)}
    assert of_parts and taken == of_parts
