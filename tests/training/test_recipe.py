"""How objectives mix."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.errors import ParamsError
from vlp_models.objectives.loss import Loss
from vlp_models.training.recipe import Recipe, make_recipe

KNOWN = frozenset({"mlm", "msg", "ism"})


def loss(value: float, name: str) -> Loss:
    total = torch.tensor(value, requires_grad=True)
    return Loss.of(total, 1, **{name: total})


def test_sum_weighs_all() -> None:
    recipe = make_recipe("sum", {"mlm": 1.0, "msg": 0.5, "ism": 0.0}, known=KNOWN, seed=0)
    assert recipe.objectives(17) == ("mlm", "msg")
    mixed = recipe.combine({"mlm": loss(2.0, "mlm"), "msg": loss(4.0, "msg")})
    assert mixed.mean.item() == 4.0
    assert {name: float(part.mean) for name, part in mixed.parts.items()} == {
        "mlm": 2.0,
        "msg": 4.0,
    }  # parts stay unweighted


def test_turns_follow_the_order_and_the_shares() -> None:
    recipe = make_recipe("turns", {"msg": 2, "mlm": 1}, known=KNOWN, seed=0)
    assert [recipe.objectives(k)[0] for k in range(6)] == ["msg", "msg", "mlm", "msg", "msg", "mlm"]
    assert recipe.combine({"msg": loss(3.0, "msg")}).mean.item() == 3.0


def test_draw_has_the_given_probabilities_and_needs_no_state() -> None:
    recipe = make_recipe("draw", {"mlm": 0.25, "msg": 0.75}, known=KNOWN, seed=3)
    drawn = [recipe.objectives(k)[0] for k in range(4000)]
    assert abs(Counter(drawn)["msg"] / 4000 - 0.75) < 0.03
    assert drawn[1234:] == [recipe.objectives(k)[0] for k in range(1234, 4000)]
    assert drawn != [Recipe(mix="draw", weights=recipe.weights, seed=4).objectives(k)[0] for k in range(4000)]


@given(st.sampled_from(["draw", "turns"]), st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 10**6))
def test_an_update_learns_exactly_one_wanted_objective(mix: str, weights: list[int], update: int) -> None:
    named = dict(zip(sorted(KNOWN), map(float, weights), strict=True))
    if not any(weights):
        with pytest.raises(ParamsError):
            make_recipe(mix, named, known=KNOWN, seed=0)
        return
    (name,) = make_recipe(mix, named, known=KNOWN, seed=0).objectives(update)
    assert named[name] > 0


@pytest.mark.parametrize(
    ("mix", "weights", "said"),
    [
        ("sum", {"moc": 1.0}, "it can learn: ism, mlm, msg"),
        ("sum", {"mlm": -1.0}, "zero or more"),
        ("turns", {"mlm": 0.5}, "whole number"),
        ("sum", {}, "nothing to learn"),
    ],
)
def test_what_can_not_be_is_refused(mix: str, weights: dict[str, float], said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        make_recipe(mix, weights, known=KNOWN, seed=0)
