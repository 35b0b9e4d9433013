"""Standalone bundles: rounded weights, and what of a prediction is compared."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from vlp_models.contrib.bundles.standalone import LEVELS, drop_probabilities, restore_weights, round_weights


@pytest.mark.parametrize("levels", [LEVELS[0], LEVELS[10], LEVELS[-1]])
def test_weights_are_rounded_to_half_a_level_of_their_row(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    weights = {
        "matrix": torch.randn(7, 33, generator=generator) * torch.logspace(-6, 3, 7)[:, None],
        "filters": torch.randn(3, 2, 5, 5, generator=generator),
        "zeros": torch.zeros(4, 4),
        "bias": torch.randn(9, generator=generator),
        "steps": torch.tensor([[3, 4]]),
    }
    restored = restore_weights(load(save(round_weights(weights, levels))))
    assert restored.keys() == weights.keys()
    for name, tensor in weights.items():
        assert restored[name].shape == tensor.shape and restored[name].dtype == tensor.dtype
    for name in ("bias", "steps", "zeros"):
        assert torch.equal(restored[name], weights[name])
    for name in ("matrix", "filters"):
        step = weights[name].flatten(1).abs().amax(dim=1, keepdim=True) / levels
        error = (restored[name] - weights[name]).flatten(1).abs()
        assert bool((error <= 0.5001 * step).all())


def test_decisions_are_compared_and_probabilities_are_not() -> None:
    prediction = {"answer": "blue", "n": 3, "label": True, "p_true": 0.2, "top": [["blue", 0.9], ["red", 0.1]]}
    near = {**prediction, "p_true": 0.3, "top": [["red", 0.5], ["blue", 0.4]]}
    assert drop_probabilities(prediction) == drop_probabilities(near)
    for changed in ({"answer": "red"}, {"n": 2}, {"label": False}):
        assert drop_probabilities({**prediction, **changed}) != drop_probabilities(prediction)
    ranked = {"captions": [{"caption": "a cat", "rank": 2, "top": [["a", 0.5]]}]}
    assert drop_probabilities(ranked) == {"captions": [{"caption": "a cat", "rank": 2, "top": []}]}
