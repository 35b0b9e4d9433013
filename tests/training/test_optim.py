"""Warm-up, decay, which parameters decay, and parts of a model with optimizers, rates and times of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_families import PAPER_FAMILIES
from soho_toys import batch_of, losses
from soho_toys import build as build_soho
from token_toys import WEIGHTS, Tokens
from torch import nn
from toy_dataset import CLASSES, FEATURE_DIM, Keeping, Toy, check_resume

from vlp_models.errors import ParamsError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import FeedForward, TransformerBlock
from vlp_models.models.xgpt.layers import AttentionOnAttention
from vlp_models.params import GroupParams, OptimizerParams
from vlp_models.params.schema import build
from vlp_models.training.optim import (
    CombinedOptimizer,
    Freezing,
    Muon,
    block_matrices,
    build_optimizer,
    build_scheduler,
    check_groups,
    learning_rate_factor,
    named_groups,
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


MUON = OptimizerParams(lr=1e-3, muon_lr=3e-3, warmup_fraction=0.5)


def test_muon_updates_block_matrices_and_adamw_the_rest() -> None:
    module = model()
    names = {id(p): name for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, MUON)
    rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert set(rates) == set(names.values())
    by_muon = {name for name, lr in rates.items() if lr == 3e-3}
    assert by_muon == {n for n, p in module.named_parameters() if n.startswith("block.") and p.ndim == 2}


@pytest.mark.parametrize("family", PAPER_FAMILIES)
def test_muon_finds_the_blocks_of_every_family(family: str) -> None:
    with torch.device("meta"):
        model = build_model(family, {}, DataFacts(vocab_size=20, mask_id=4, feature_dim=8, num_classes=3))
    taken = {id(p) for p in block_matrices(model)}
    parts = [m for m in model.modules() if isinstance(m, MultiHeadAttention | FeedForward | AttentionOnAttention)]
    of_parts = {id(m.weight) for part in parts for m in part.modules() if isinstance(m, nn.Linear)}
    assert of_parts and taken == of_parts


def test_combined_optimizer_resumes_on_schedule() -> None:
    def made() -> tuple[nn.ModuleDict, Any, Any]:
        module = model()
        optimizer = build_optimizer(module, MUON)
        return module, optimizer, build_scheduler(optimizer, 8, MUON)

    def steps(module: nn.ModuleDict, optimizer: Any, schedule: Any) -> None:
        for k in range(3):
            optimizer.zero_grad()
            x = module["words"](torch.tensor([[k, 1, 2]]))
            module["word_head"](module["block"](x)).square().sum().backward()
            optimizer.step()
            schedule.step()

    whole, resumed = made(), made()
    steps(*whole)
    for saved, fresh in zip(whole, resumed, strict=True):
        fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    # warm-up has ended, for each part at its own rate
    assert [group["lr"] for group in resumed[1].param_groups] == pytest.approx([1e-3, 1e-3, 3e-3])
    for run in (whole, resumed):
        steps(*run)
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, resumed[0].state_dict()[name]), name


# ---- Parts of a model ----


def model() -> nn.ModuleDict:
    torch.manual_seed(3)
    block = TransformerBlock(8, 2, 16, dropout=0.0, attention_dropout=0.0, eps=1e-5)
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    return nn.ModuleDict({"cnn": cnn, "words": nn.Embedding(5, 8), "block": block, "word_head": nn.Linear(8, 5)})


def rates(module: nn.Module, params: OptimizerParams) -> dict[str, tuple[str, float, float]]:
    """Parameter -> (optimizer, rate, decay)."""
    names = {id(p): name for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, params)
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    return {
        names[id(p)]: (type(part).__name__, group["lr"], group["weight_decay"])
        for part in parts
        for group in part.param_groups
        for p in group["params"]
    }


def test_each_group_has_its_own_optimizer_settings() -> None:
    groups = {
        "cnn": {"kind": "sgd", "lr": 0.01, "momentum": 0.8, "weight_decay": 5e-4},
        "word_head": {"lr": 0.5},
        "words": {"frozen": True},
        "block": {"kind": "muon", "lr": 0.02},
    }
    params = build(OptimizerParams, {"lr": 1e-3, "kind": "adam", "weight_decay": 0.0, "groups": groups}, where="o")
    module = model()
    Freezing(module, params.groups)
    found = rates(module, params)
    assert found["cnn.0.weight"] == ("SGD", 0.01, 5e-4) and found["cnn.1.weight"] == ("SGD", 0.01, 0.0)
    assert found["word_head.weight"] == found["word_head.bias"] == ("Adam", 0.5, 0.0)
    assert "words.weight" not in found
    for name, value in found.items():
        if name.startswith("block."):
            matrix = module.get_parameter(name).ndim == 2
            assert value == (("Muon", 0.02, 0.0) if matrix else ("Adam", 1e-3, 0.0)), name
    sgd = next(p for p in build_optimizer(module, params).parts if isinstance(p, torch.optim.SGD))  # type: ignore[attr-defined]
    assert {g["momentum"] for g in sgd.param_groups} == {0.8}
    assert len(found) == len(list(module.parameters())) - 1


def test_group_learning_rate_scales_muon_rate() -> None:
    found = rates(model(), OptimizerParams(lr=1e-3, muon_lr=4e-3, groups={"block": GroupParams(lr=5e-4)}))
    kinds = {value[:2] for name, value in found.items() if name.startswith("block.")}
    assert kinds == {("Muon", 2e-3), ("AdamW", 5e-4)}


def test_rate_of_zero_does_not_change_the_kind_of_a_group() -> None:
    group = {"kind": "muon", "lr": 0}
    params = build(OptimizerParams, {"lr": 1e-3, "groups": {"block": group}}, where="o")
    kinds = {value[:2] for name, value in rates(model(), params).items() if name.startswith("block.")}
    assert kinds == {("Muon", 0.0), ("AdamW", 1e-3)}, "the matrices stay, the others have the run's rate"


@pytest.mark.parametrize(
    ("group", "more", "kind"),
    [({}, {}, "adamw"), ({}, {"kind": "adam"}, "adam"), ({"kind": "adamw"}, {"muon_lr": 0.1}, "adamw")],
)
def test_momentum_is_refused_where_it_has_no_effect(group: dict, more: dict, kind: str) -> None:
    settings = {"lr": 1e-3, **more, "groups": {"block": {**group, "momentum": 0.5}}}
    message = rf"`o`: `groups\.block\.momentum: 0\.5` only applies to sgd and muon, not {kind}; remove it"
    with pytest.raises(ParamsError, match=message):
        build(OptimizerParams, settings, where="o")


def test_momentum_of_a_group_applies_to_the_runs_muon() -> None:
    params = build(OptimizerParams, {"lr": 1e-3, "muon_lr": 0.1, "groups": {"block": {"momentum": 0.5}}}, where="o")
    muon = next(p for p in build_optimizer(model(), params).parts if isinstance(p, Muon))  # type: ignore[attr-defined]
    assert {g["momentum"] for g in muon.param_groups} == {0.5}


def test_invalid_groups_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"groups\.cnm`: the model has no such part; did you mean `cnn`\?"):
        build_optimizer(model(), OptimizerParams(lr=1.0, groups={"cnm": GroupParams()}))
    for group in (GroupParams(frozen=True), GroupParams(frozen_epochs=1)):
        with pytest.raises(ParamsError, match=r"`o\.groups` freezes every part"):
            check_groups(model(), dict.fromkeys(model(), group), "o")


def test_what_thaws_later_takes_no_gradient_until_then() -> None:
    thawing, frozen = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)  # as LoRA leaves it: it never thaws
    parts = nn.ModuleDict({"thawing": thawing, "adapted": frozen, "rest": nn.Linear(2, 2)})
    freezing = Freezing(parts, {name: GroupParams(frozen_epochs=1) for name in ("thawing", "adapted")})
    for epoch in range(2):
        freezing.train(epoch)
        required = {name for name, p in parts.named_parameters() if p.requires_grad}
        later = {"thawing.weight", "thawing.bias", "adapted.weight"} if epoch else set()
        assert required == {"rest.weight", "rest.bias"} | later


def test_group_names_come_from_the_model_or_its_children() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = model(), nn.Linear(2, 2)

    assert list(named_groups(Task())) == ["cnn", "words", "block", "word_head", "head"]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
            return {"all": list(self.parameters())}

    assert list(named_groups(Named())) == ["all"]
    tied = model()
    tied["word_head"].weight = nn.Parameter(tied["words"].weight.detach())
    tied["words"].weight = tied["word_head"].weight
    assert [len(parameters) for parameters in named_groups(tied).values()] == [4, 1, 12, 1], "the first part's"


def test_inverse_sqrt_schedule_with_floor() -> None:
    params = OptimizerParams(lr=4e-4, warmup_fraction=0.04, schedule="inverse_sqrt", min_lr=1e-4)
    factors = [learning_rate_factor(k, total=100, params=params) for k in (0, 3, 4, 15, 24, 35, 63, 64, 99)]
    assert factors == pytest.approx([1 / 4, 1.0, (4 / 5) ** 0.5, 0.5, 0.4, 1 / 3, 0.25, 0.25, 0.25])
    with pytest.raises(ParamsError, match="is above `lr"):
        build(OptimizerParams, {"lr": 1e-4, "min_lr": 1e-3}, where="o")


class Normed(Tokens):
    """With batch normalization among its regions, and dropout."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.regions = nn.Sequential(
            nn.Linear(args[1], 6), nn.Flatten(0, 1), nn.BatchNorm1d(6), nn.Dropout(0.2)
        ).double()  # type: ignore[assignment]
        self.regions.append(nn.Unflatten(0, (-1, 2)))


def normed(toy: Toy) -> Normed:
    return Normed(toy.tokenizer.vocab_size, FEATURE_DIM, len(CLASSES))


@pytest.mark.slow
def test_frozen_parts_are_bitwise_unchanged_until_they_thaw_even_after_resume(toy: Toy, tmp_path: Path) -> None:
    groups = {"regions": {"frozen_epochs": 2}, "words": {"frozen": True}, "trunk": {"kind": "sgd", "lr": 0.1}}
    optimizer = build(OptimizerParams, {"lr": 0.01, "weight_decay": 0.5, "groups": groups}, where="o")
    settings: dict[str, Any] = {
        "objectives": WEIGHTS,
        "optimizer": vars(optimizer),
        "max_epochs": 3,
        "checkpoint_every_steps": 1,
    }
    start, trackers = normed(toy).state_dict(), list[Keeping]()

    def fit(work: Path, **more: Any) -> Any:
        model = normed(toy)
        trackers.append(Keeping(model))
        return toy.fit(work, model, **{"tracker": trackers[-1], **settings, **more})

    _, result = check_resume(fit, tmp_path, 5, 12, 14)
    assert result.steps == 18
    # DDP computes all gradients in the frozen epochs: the same updates.
    trained, _ = fit(tmp_path / "ddp", strategy="ddp", devices=1)
    assert all(torch.equal(tensor, trackers[0].seen[18][name]) for name, tensor in trained.state_dict().items())
    for step, state in trackers[0].seen.items():
        for name in start:
            same = torch.equal(state[name], start[name])
            if name.startswith("words."):
                assert same
            elif name.startswith("regions."):  # its parameters and its running statistics
                assert same is (step <= 12), (step, name)
            elif step:
                assert not same, (step, name)


SGD = {"kind": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 5e-4}
CNN = ("backbone.net.",)
STEM = ("backbone.net.conv1.", "backbone.net.bn1.", "backbone.net.layer1.")


def run(groups: dict, epochs: int = 3) -> list[dict[str, torch.Tensor]]:
    """The state before training and after each of several epochs of one update, as the training loop goes."""
    params = build(OptimizerParams, {"lr": 1e-3, "weight_decay": 0.01, "groups": groups}, where="o")
    model = build_soho()
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


def test_frozen_stem_stays_and_the_rest_of_the_cnn_is_trained() -> None:
    states = run({"cnn": SGD, "cnn_stem": {"frozen": True}})
    changed = moved(states[0], states[-1])
    assert not {name for name in changed if name.startswith(STEM)}
    assert "backbone.net.layer2.0.conv1.weight" in changed and "backbone.net.layer2.0.bn1.running_var" in changed


def test_paper_optimizers_by_group() -> None:
    groups = {"cnn": SGD, "cnn_stem": SGD}
    params = build(OptimizerParams, {"lr": 1e-4, "weight_decay": 0.01, "groups": groups}, where="o")
    for name, (kind, lr, _) in rates(build_soho(), params).items():
        assert (kind, lr) == (("SGD", 1e-2) if name.startswith(CNN) else ("AdamW", 1e-4)), name
