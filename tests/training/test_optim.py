"""Warm-up, decay, and which parameters decay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vlp_models.params import OptimizerParams
from vlp_models.training.optim import learning_rate_factor, parameter_groups


def test_linear_schedule_by_hand() -> None:
    params = OptimizerParams(lr=1.0, warmup_fraction=0.2)
    factors = [learning_rate_factor(k, total=10, params=params) for k in range(11)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])


FRACTION = st.floats(0, 1, allow_subnormal=False)  # training flushes denormals to zero, for the whole process


@given(st.sampled_from(["linear", "cosine", "constant"]), FRACTION, st.integers(1, 500), FRACTION)
def test_every_update_moves_and_none_too_far(schedule: str, warmup: float, total: int, place: float) -> None:
    params = OptimizerParams(lr=1.0, warmup_fraction=warmup, schedule=schedule)  # type: ignore[arg-type]
    step = min(int(place * total), total - 1)
    assert 0 < learning_rate_factor(step, total=total, params=params) <= 1


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 2))
    decayed, plain = parameter_groups(module, 0.01)
    assert decayed["weight_decay"] == 0.01
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2), (4, 2)]
    assert plain["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))
