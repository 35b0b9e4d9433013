"""SOHO's optimisers by part: SGD for the CNN, AdamW for the rest; a frozen CNN stays as it is, bit by bit."""

from __future__ import annotations

import pytest
import torch
from soho_toys import batch_of, build, losses

from vlp_models.params import OptimizerParams
from vlp_models.params.schema import build as build_params
from vlp_models.training.optim import CombinedOptimizer, Freezing, build_optimizer

SGD = {"kind": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 5e-4}
CNN = ("backbone.net.",)
STEM = ("backbone.net.conv1.", "backbone.net.bn1.", "backbone.net.layer1.")


def run(groups: dict, epochs: int = 3) -> list[dict[str, torch.Tensor]]:
    """The state before training and after each of several epochs of one update, as the training loop goes."""
    params = build_params(OptimizerParams, {"lr": 1e-3, "weight_decay": 0.01, "groups": groups}, where="o")
    model = build()
    freezing = Freezing(model, params.groups)
    optimizer = build_optimizer(model, params)
    states = [{name: t.clone() for name, t in model.state_dict().items()}]
    for epoch in range(epochs):
        freezing.train(epoch)
        sum(loss.mean for loss in losses(model, batch_of(seed=epoch), seed=epoch).values()).backward()
        freezing.drop_gradients(epoch)
        optimizer.step()
        optimizer.zero_grad()
        model.dictionary.update()
        states.append({name: t.clone() for name, t in model.state_dict().items()})
    return states


def moved(before: dict, after: dict) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_cnn_frozen_for_some_epochs_is_bitwise_unchanged_then_learns(epochs: int) -> None:
    states = run({"cnn": {**SGD, "frozen_epochs": epochs}, "cnn_stem": {**SGD, "frozen_epochs": epochs}})
    names = {name for name in states[0] if name.startswith(CNN)}
    statistics = {name for name in names if "running_" in name}
    assert statistics
    for epoch in range(epochs):
        changed = moved(states[epoch], states[epoch + 1])
        assert not changed & names
        assert {"neck.norm.running_mean", "neck.conv.weight", "dictionary.codes"} <= changed
    changed = moved(states[epochs], states[epochs + 1])
    assert {"backbone.net.conv1.weight", "backbone.net.bn1.running_mean", "backbone.net.layer2.0.bn2.weight"} <= changed


def test_a_frozen_stem_stays_for_ever_and_the_rest_of_the_cnn_learns() -> None:
    states = run({"cnn": SGD, "cnn_stem": {"frozen": True}})
    changed = moved(states[0], states[-1])
    assert not {name for name in changed if name.startswith(STEM)}
    assert "backbone.net.layer2.0.conv1.weight" in changed and "backbone.net.layer2.0.bn1.running_var" in changed


def test_the_papers_optimisers_are_had_by_group() -> None:
    groups = {"cnn": SGD, "cnn_stem": SGD}
    params = build_params(OptimizerParams, {"lr": 1e-4, "weight_decay": 0.01, "groups": groups}, where="o")
    model = build()
    optimizer = build_optimizer(model, params)
    assert isinstance(optimizer, CombinedOptimizer)
    kind = {
        id(p): (type(part).__name__, group["lr"])
        for part in optimizer.parts
        for group in part.param_groups
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert kind[id(parameter)] == (("SGD", 1e-2) if name.startswith(CNN) else ("AdamW", 1e-4)), name
