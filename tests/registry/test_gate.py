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
from vlp_models.params import GateParams, PromotionParams, build
from vlp_models.registry.promotion.error_budget import share_left
from vlp_models.registry.promotion.gate import (
    Measurement,
    NotComparableError,
    Verdict,
    check_non_inferior,
    compare_to_champion,
    measure,
)
from vlp_models.registry.promotion.gate_rule import MetricSpec

PARAMS = PromotionParams()


def measurement(values: Sequence[float], **more: Any) -> Measurement:
    found = measure([toy_items(values, **more)], MetricSpec(metric="accuracy", split="test"))
    assert isinstance(found, Measurement)
    return found


def compare(ours: Sequence[float], theirs: Sequence[float], **rule: Any) -> Verdict:
    """Compare over items only, unless the rule sets `seed_std`."""
    return compare_to_champion(measurement(ours), measurement(theirs), GateParams(**{"seed_std": 0.0, **rule}), PARAMS)


def test_images_are_resampled_not_their_questions() -> None:
    """Six of forty images win all five of their questions, two lose theirs: 40 questions, but only 8 images."""
    theirs, ours = np.zeros(200), np.zeros(200)
    ours[:30], theirs[30:40] = 1.0, 1.0
    verdict = compare(ours.tolist(), theirs.tolist())
    assert not verdict.passed and verdict.numbers["gain"] == 10.0
    alone = [f"q{i}" for i in range(200)]  # every question as an image of its own
    difference = mean_score("gain", (ours - theirs).tolist(), alone).evidence
    ends = interval(difference, resamples=2000, seed=1)
    assert ends is not None and ends[0] > 3 > verdict.numbers["gain_low"]


def test_pairing_matters_and_item_order_does_not() -> None:
    rng = np.random.default_rng(1)
    theirs = (rng.random(300) < 0.5).astype(float)
    ours = theirs.copy()
    ours[np.flatnonzero(theirs == 0)[::5]] = 1.0  # 10 points more, on the same items: certain only when paired
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
    found = measure([shuffled], MetricSpec(metric="accuracy", split="test"))
    assert isinstance(found, Measurement)
    again = compare_to_champion(found, measurement(theirs.tolist()), GateParams(seed_std=0.0), PARAMS)
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
            build(GateParams, wrong, where="promotion.tasks.vqa")


def drawn(share: float, seed: int, images: int) -> list[float]:
    """Return answers to five questions per image, right or wrong."""
    return [float(u < share) for u in np.random.default_rng(seed).random(images * QUESTIONS)]


def test_keep_and_inconclusive_depend_on_test_size() -> None:
    """For the same two models, a gain of 3 is ruled out on a large test and not on a small one."""
    many, few = (compare(drawn(0.5, 1, n), drawn(0.5, 2, n)) for n in (2000, 100))
    assert many.outcome == "keep" and "3 or more is ruled out" in many.reasons[0]
    assert few.outcome == "inconclusive" and few.numbers["limited_by"] == "items"
    assert many.numbers["detectable"] < 3 < few.numbers["detectable"]
    seeds = compare(drawn(0.52, 1, 2000), drawn(0.5, 2, 2000), seed_std=2.0)
    assert seeds.outcome == "inconclusive" and seeds.numbers["limited_by"] == "seeds", "more items would not help"
    assert compare(drawn(0.6, 1, 2000), drawn(0.5, 2, 2000), seed_std=2.0).outcome == "promote"


def test_a_small_allowed_error_takes_more_resamples() -> None:
    """After years of refusals a large gain is still shown."""
    low, high = drawn(0.5, 1, 1000), drawn(0.6, 2, 1000)
    alpha = PARAMS.error_budget * (share_left(PARAMS, 200) - share_left(PARAMS, 201))
    assert alpha < 1 / PARAMS.resamples
    rule = GateParams(seed_std=0.5)
    assert compare_to_champion(measurement(high), measurement(low), rule, PARAMS, alpha=alpha).passed


def test_detectable_gain_is_stable_for_two_runs_vs_one() -> None:
    """The seeds' part is Student's t with one degree of freedom, which has no mean."""
    low, high = measurement(drawn(0.5, 1, 1000)), [measurement(drawn(0.5, seed, 1000)) for seed in (2, 3)]
    found = [
        compare_to_champion(
            high[0], low, GateParams(seed_std=0.0), PromotionParams(seed=seed), other_seeds=(high[1:], [])
        )
        for seed in range(8)
    ]
    detectable = [verdict.numbers["detectable"] for verdict in found]
    assert max(detectable) < 1.3 * min(detectable)


@pytest.mark.slow
def test_other_seeds_make_the_gate_more_or_less_certain() -> None:
    """Five points between two runs. If three more seeds per side agree, it is the variant; if they disagree, it was the
    seed."""
    low, high = drawn(0.5, 1, 1500), drawn(0.55, 2, 1500)
    one = compare(high, low, seed_std=1.5)
    like = tuple(
        [measurement(drawn(share, seed + n, 1500)) for n in range(3)] for share, seed in ((0.55, 10), (0.5, 20))
    )
    mixed = tuple(
        [measurement(drawn(s, 30 + n, 1500)) for n, s in enumerate(own)] for own in ((0.5, 0.49), (0.55, 0.56))
    )

    def among(others: Any) -> Verdict:
        return compare_to_champion(
            measurement(high), measurement(low), GateParams(seed_std=1.5), PARAMS, alpha=0.01, other_seeds=others
        )

    assert one.outcome == "promote" and among(((), ())).outcome == "inconclusive"
    assert among(like).outcome == "promote" and among(like).numbers["runs"] == 4
    assert among(mixed).outcome != "promote" and among(mixed).numbers["variant_gain"] < 0
    better, worse = (
        [measurement(drawn(0.6, n, 1500)) for n in range(3)],
        [measurement(drawn(0.4, n, 1500)) for n in range(3)],
    )
    alone = compare_to_champion(
        measurement(low), measurement(high), GateParams(seed_std=1.5), PARAMS, other_seeds=(better, worse)
    )
    assert alone.outcome == "keep" and "this version of it is not" in alone.reasons[0]


def test_champions_own_weights_need_no_gain_and_may_not_lose() -> None:
    half, most = [0.0] * 100 + [1.0] * 100, [0.0] * 50 + [1.0] * 150
    assert not compare(half, half).passed, "other weights need a gain"
    assert check_non_inferior(measurement(half), measurement(half), GateParams()).passed
    assert check_non_inferior(measurement(half), measurement(most), GateParams(direction="lower")).passed
    lost = check_non_inferior(measurement(half), measurement(most), GateParams())
    assert not lost.passed and "loss: accuracy 50.00 with the champion's own weights" in lost.reasons[0]
    with pytest.raises(NotComparableError, match="test data differ"):
        check_non_inferior(measurement(half), measurement(half, test="t2"), GateParams())


def test_different_items_are_not_compared() -> None:
    with pytest.raises(NotComparableError, match="test data differ"):
        compare_to_champion(measurement([1.0] * 10), measurement([1.0] * 10, test="t2"), GateParams(), PARAMS)
    with pytest.raises(NotComparableError, match="same items"):
        compare_to_champion(measurement([1.0] * 10), measurement([1.0] * 15), GateParams(), PARAMS)
    assert not compare_to_champion(
        measurement([1.0] * 5), measurement([0.0] * 5), GateParams(), PARAMS
    ).passed  # one image cannot be resampled
