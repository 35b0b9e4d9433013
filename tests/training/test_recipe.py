"""How objectives mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from two_pass_toys import generator, recipe_of

from vlp_models.errors import ParamsError
from vlp_models.objectives.loss import Loss
from vlp_models.params import RecipeParams
from vlp_models.params.schema import build
from vlp_models.training.recipe import Recipe, make_recipe

KNOWN = ("msg", "mlm", "ism")
CPU = torch.device("cpu")


def recipe(weights: dict[str, float], **settings: Any) -> Recipe:
    return make_recipe(recipe_of(weights, **settings), supported=KNOWN)


def loss(total: float, count: int, name: str) -> Loss:
    value = torch.tensor(total, requires_grad=True)
    return Loss.of(value, count, **{name: value})


def test_sum_weights_the_mean_of_each_loss() -> None:
    made = recipe({"mlm": 1.0, "msg": 0.5, "ism": 0.0})
    assert set(made.objectives(17)) == {"mlm", "msg"}
    assert made.assign(17, 3, generator(), CPU) == {"mlm": None, "msg": None}
    mixed = made.weigh({"mlm": loss(4.0, 2, "mlm"), "msg": loss(12.0, 3, "msg")}, 17)
    assert mixed.mean.item() == 4.0
    assert {name: float(part.mean) for name, part in mixed.parts.items()} == {"mlm": 2.0, "msg": 4.0}  # unweighted


@pytest.mark.parametrize("mix", ["sum", "sample", "alternate"])
def test_order_in_params_changes_nothing(mix: str) -> None:
    one, other = (
        recipe(dict.fromkeys(names, 1.0), mix=mix) for names in (("mlm", "ism", "msg"), ("msg", "mlm", "ism"))
    )
    for update in (0, 1, 2, None):
        assert one.objectives(update) == other.objectives(update)
        first, second = one.assign(update, 50, generator(3), CPU), other.assign(update, 50, generator(3), CPU)
        assert all(mask is second[name] or torch.equal(mask, second[name]) for name, mask in first.items())


def test_alternate_follows_the_models_order_and_shares_independent_of_weights() -> None:
    made = recipe({"msg": 0.3, "mlm": 1.0}, mix="alternate", shares={"msg": 2, "mlm": 1})
    assert [made.objectives(k)[0] for k in range(6)] == ["msg", "msg", "mlm", "msg", "msg", "mlm"]
    assert made.weigh({"msg": loss(3.0, 1, "msg")}, 0).mean.item() == pytest.approx(0.9)
    assert made.updates_per_batch == 1
    assert made.weigh({"msg": loss(4.0, 2, "msg")}, 0).mean.item() == pytest.approx(0.3 * 2.0)
    assert recipe({"msg": 1.0, "mlm": 1.0}, mix="alternate", reuse_batch=True).updates_per_batch == 2


@pytest.mark.parametrize("mix", ["sample", "alternate"])
def test_validation_loss_equals_the_average_training_loss(mix: str) -> None:
    """Not the sum of the losses: an update uses one of them."""
    made = recipe({"msg": 1.0, "mlm": 0.5}, mix=mix, shares={"msg": 3.0, "mlm": 1.0})
    assert made.objectives(None) == ("msg", "mlm")
    assert made.assign(None, 3, generator(), CPU) == {"msg": None, "mlm": None}
    losses = {"msg": loss(4.0, 1, "msg"), "mlm": loss(8.0, 1, "mlm")}
    both = made.weigh(losses, None)
    assert both.mean.item() == pytest.approx((3 * 1.0 * 4.0 + 1 * 0.5 * 8.0) / 4)
    if mix == "sample":  # each update has both objectives, each for its share of the samples
        assert made.weigh(losses, 5).mean.item() == both.mean.item()


def test_each_sample_gets_one_objective_by_share() -> None:
    made = recipe({"mlm": 1.0, "msg": 1.0, "ism": 1.0}, mix="sample", shares={"mlm": 1.0, "msg": 2.0, "ism": 0.0})
    masks = made.assign(5, 6000, generator(3), CPU)
    assert list(masks) == ["msg", "mlm"]
    msg_B, mlm_B = masks.values()
    assert mlm_B is not None and msg_B is not None
    assert torch.equal(mlm_B, ~msg_B), "one each"
    assert abs(msg_B.float().mean().item() - 2 / 3) < 0.02
    again = made.assign(9, 6000, generator(3), CPU)["mlm"]
    assert again is not None and torch.equal(mlm_B, again), "a function of the generator alone"
    assert {name: list(m.shape) for name, m in made.assign(0, 0, generator(), CPU).items() if m is not None} == {
        "msg": [0],
        "mlm": [0],
    }


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 10**6))
def test_alternate_trains_exactly_one_objective_per_update(shares: list[int], update: int) -> None:
    named = dict(zip(sorted(KNOWN), map(float, shares), strict=True))
    if not any(shares):
        with pytest.raises(ParamsError):
            recipe(dict.fromkeys(KNOWN, 1.0), mix="alternate", shares=named)
        return
    (name,) = recipe(dict.fromkeys(sorted(KNOWN), 1.0), mix="alternate", shares=named).objectives(update)
    assert named[name] > 0


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        ({"moc": 1.0}, {}, "it supports: ism, mlm, msg"),
        ({"mlm": 1.0}, {"mix": "alternate", "shares": {"mlm": 0.5}}, "whole number"),
        ({"mlm": 1.0}, {"shares": {"mlm": 0.5}}, "did you mean `weight`"),
        ({"mlm": 1.0}, {"mix": "sample", "reuse_batch": True}, "requires `mix: alternate`, not sample"),
        ({}, {}, "no objective with a weight"),
    ],
)
def test_invalid_recipes_are_refused(weights: dict[str, float], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=rf"pretrain\.recipe.*{message}"):
        recipe(weights, **settings)


def test_number_is_shorthand_for_weight() -> None:
    read = build(RecipeParams, {"objectives": {"mlm": 0.3, "msg": {"share": 2}}, "mix": "alternate"}, where="r")
    made = make_recipe(read, supported=KNOWN)
    assert (made.weights, made.shares) == ({"mlm": 0.3, "msg": 1.0}, {"mlm": 1.0, "msg": 2.0})
