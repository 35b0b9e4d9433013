"""The gate's arithmetic on made-up scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from toy_registry import QUESTIONS, toy_items

from vlp_models.errors import ParamsError
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.score import mean_score
from vlp_models.params import GateParams, PromotionParams
from vlp_models.registry.promotion.gate import Measured, NotComparable, Verdict, Yardstick, against, as_good, measured

PARAMS = PromotionParams()


def side(values: Sequence[float], **more: Any) -> Measured:
    found = measured([toy_items(values, **more)], Yardstick(metric="accuracy", split="test"))
    assert isinstance(found, Measured)
    return found


def compare(ours: Sequence[float], theirs: Sequence[float], **rule: Any) -> Verdict:
    """Over items alone, unless the rule says how seeds deviate."""
    return against(side(ours), side(theirs), GateParams(**{"seed_std": 0.0, **rule}), PARAMS)


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
    again = against(found, side(theirs.tolist()), GateParams(seed_std=0.0), PARAMS)
    assert again.numbers == straight.numbers


def test_direction_minimum_gain_and_confidence() -> None:
    low, high = [0.0] * 100 + [1.0] * 100, [1.0] * 200
    assert compare(high, low).passed and not compare(low, high).passed
    assert compare(low, high, direction="lower").passed and not compare(high, low, direction="lower").passed
    assert not compare(high, low, min_gain=50.0).passed
    assert compare(high, low, min_gain=20.0).passed
    assert compare(high, low, min_gain=20.0, direction="higher").numbers["min_gain"] == 20.0
    wrongs = ({"confidence": 1.0}, {"min_gain": -1.0}, {"floors": {"all": float("nan")}}, {"seed_std": -1.0})
    for wrong in (*wrongs, {"min_gain": 2.0, "relevant_gain": 1.0}):
        with pytest.raises(ParamsError):
            GateParams(**wrong)  # type: ignore[arg-type]


def drawn(share: float, seed: int, images: int) -> list[float]:
    """Answers to five questions an image, right or wrong."""
    return [float(u < share) for u in np.random.default_rng(seed).random(images * QUESTIONS)]


def test_no_gain_and_too_few_items_are_told_apart() -> None:
    """The same two models: on a large test a gain of 3 is ruled out, on a small one it is not."""
    many, few = (compare(drawn(0.5, 1, n), drawn(0.5, 2, n)) for n in (2000, 100))
    assert many.answer == "keep" and "3 or more is ruled out" in many.reasons[0]
    assert few.answer == "cannot tell" and few.numbers["too_few"] == "items"
    assert many.numbers["detectable"] < 3 < few.numbers["detectable"]
    seeds = compare(drawn(0.52, 1, 2000), drawn(0.5, 2, 2000), seed_std=2.0)
    assert seeds.answer == "cannot tell" and seeds.numbers["too_few"] == "seeds", "more items would not help"
    assert compare(drawn(0.6, 1, 2000), drawn(0.5, 2, 2000), seed_std=2.0).answer == "promote"


def test_an_error_too_small_for_the_resamples_is_said_and_more_resamples_show_it() -> None:
    low, high = drawn(0.5, 1, 1000), drawn(0.6, 2, 1000)

    def after(uses: int, resamples: int = PARAMS.resamples) -> Verdict:
        """With seeds as they are shipped, ten draws of their luck a resample."""
        left = PARAMS.error_budget * PARAMS.spend * (1 - PARAMS.spend) ** (uses - 1)
        rule, params = GateParams(seed_std=0.5), PromotionParams(resamples=resamples)
        return against(side(high), side(low), rule, params, error=left)

    assert after(57).passed
    assert after(58).answer == "cannot tell" and "raise `promotion.resamples`" in after(58).reasons[1]
    assert after(58, resamples=4000).passed


def test_the_smallest_gain_that_would_be_shown_is_known_of_two_runs_against_one() -> None:
    """Their luck is Student's t with one degree of freedom, which has no mean."""
    low, high = side(drawn(0.5, 1, 1000)), [side(drawn(0.5, seed, 1000)) for seed in (2, 3)]
    found = [
        against(high[0], low, GateParams(seed_std=0.0), PromotionParams(seed=seed), beside=(high[1:], []))
        for seed in range(8)
    ]
    detectable = [verdict.numbers["detectable"] for verdict in found]
    assert max(detectable) < 1.3 * min(detectable)


def test_seeds_beside_a_run_make_the_gate_surer_or_less_sure() -> None:
    """Five points between two runs. With three more seeds a side, all like these, it is the design; with some that are
    the other way round, it was the seed."""
    low, high = drawn(0.5, 1, 1500), drawn(0.55, 2, 1500)
    one = compare(high, low, seed_std=1.5)
    like = tuple([side(drawn(share, seed + n, 1500)) for n in range(3)] for share, seed in ((0.55, 10), (0.5, 20)))
    mixed = tuple([side(drawn(s, 30 + n, 1500)) for n, s in enumerate(own)] for own in ((0.5, 0.49), (0.55, 0.56)))

    def among(beside: Any) -> Verdict:
        return against(side(high), side(low), GateParams(seed_std=1.5), PARAMS, error=0.01, beside=beside)

    assert one.answer == "promote" and among(((), ())).answer == "cannot tell"
    assert among(like).answer == "promote" and among(like).numbers["runs"] == 4
    assert among(mixed).answer != "promote" and among(mixed).numbers["design_gain"] < 0
    better, worse = [side(drawn(0.6, n, 1500)) for n in range(3)], [side(drawn(0.4, n, 1500)) for n in range(3)]
    alone = against(side(low), side(high), GateParams(seed_std=1.5), PARAMS, beside=(better, worse))
    assert alone.answer == "keep" and "this version of it is not" in alone.reasons[0]


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
