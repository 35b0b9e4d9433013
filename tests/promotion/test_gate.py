"""The gate's arithmetic on made-up scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from toy_registry import toy_items

from vlp_models.errors import ParamsError
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.score import mean_score
from vlp_models.params import GateParams, PromotionParams
from vlp_models.promotion.gate import Measured, NotComparable, Verdict, Yardstick, against, as_good, measured

PARAMS = PromotionParams()


def side(values: Sequence[float], **more: Any) -> Measured:
    found = measured([toy_items(values, **more)], Yardstick(metric="accuracy", split="test"))
    assert isinstance(found, Measured)
    return found


def compare(ours: Sequence[float], theirs: Sequence[float], **rule: Any) -> Verdict:
    return against(side(ours), side(theirs), GateParams(**rule), PARAMS)


def test_images_are_resampled_not_their_questions() -> None:
    """Six of forty images gain all five of their questions, two lose theirs: 40 questions, but only 8 images."""
    theirs, ours = np.zeros(200), np.zeros(200)
    ours[:30], theirs[30:40] = 1.0, 1.0
    verdict = compare(ours.tolist(), theirs.tolist())
    assert not verdict.passed and verdict.numbers["gain"] == 10.0
    alone = [f"q{i}" for i in range(200)]  # as if every question were an image of its own
    difference = mean_score("gain", (ours - theirs).tolist(), alone).evidence
    ends = interval(difference, resamples=2000, seed=1)
    assert ends is not None and ends[0] > 3 > verdict.numbers["gain_low"]


def test_order_of_the_items_does_not_matter_and_pairing_does() -> None:
    rng = np.random.default_rng(1)
    theirs = (rng.random(300) < 0.5).astype(float)
    ours = theirs.copy()
    ours[np.flatnonzero(theirs == 0)[::12]] = 1.0  # 4 points more, on the same items: certain only when paired
    straight = compare(ours.tolist(), theirs.tolist())
    assert straight.passed and straight.numbers["gain_low"] > 0
    items = toy_items(ours.tolist())
    order = rng.permutation(300)
    shuffled = type(items)(
        **{
            **vars(items),
            "items": [items.items[i] for i in order],
            "groups": [items.groups[i] for i in order],
            "parts_NK": items.parts_NK[order],
            "slices": [items.slices[i] for i in order],
        }
    )
    found = measured([shuffled], Yardstick(metric="accuracy", split="test"))
    assert isinstance(found, Measured)
    assert against(found, side(theirs.tolist()), GateParams(), PARAMS).numbers == straight.numbers


def test_direction_minimum_gain_and_confidence() -> None:
    low, high = [0.0] * 100 + [1.0] * 100, [1.0] * 200
    assert compare(high, low).passed and not compare(low, high).passed
    assert compare(low, high, direction="lower").passed and not compare(high, low, direction="lower").passed
    assert not compare(high, low, min_gain=50.0).passed
    assert compare(high, low, min_gain=20.0).passed
    assert compare(high, low, min_gain=20.0, direction="higher").numbers["min_gain"] == 20.0
    for wrong in ({"confidence": 1.0}, {"min_gain": -1.0}, {"floors": {"all": float("nan")}}):
        with pytest.raises(ParamsError):
            GateParams(**wrong)  # type: ignore[arg-type]


def test_of_the_champions_own_weights_no_gain_is_asked_and_no_loss_allowed() -> None:
    half, most = [0.0] * 100 + [1.0] * 100, [0.0] * 50 + [1.0] * 150
    assert not compare(half, half).passed, "for other weights a draw is not enough"
    assert as_good(side(half), side(half), GateParams()).passed
    assert as_good(side(half), side(most), GateParams(direction="lower")).passed
    lost = as_good(side(half), side(most), GateParams())
    assert not lost.passed and "loss: accuracy 50.00 with the champion's own weights" in lost.reasons[0]
    with pytest.raises(NotComparable, match="test data differ"):
        as_good(side(half), side(half, test="t2"), GateParams())


def test_other_items_are_not_compared() -> None:
    with pytest.raises(NotComparable, match="test data differ"):
        against(side([1.0] * 10), side([1.0] * 10, test="t2"), GateParams(), PARAMS)
    with pytest.raises(NotComparable, match="same items"):
        against(side([1.0] * 10), side([1.0] * 15), GateParams(), PARAMS)
    assert not against(side([1.0] * 5), side([0.0] * 5), GateParams(), PARAMS).passed  # one image says nothing
