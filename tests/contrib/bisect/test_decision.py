"""The decision about a trial, on synthetic scores of known truth."""

from __future__ import annotations

import numpy as np
import pytest

from vlp_models.contrib.bisect.decision import CompareRule, confirm_drop, decide, more_seeds, take_common
from vlp_models.errors import DataError
from vlp_models.metrics.gain import gain_over_seeds
from vlp_models.metrics.score import Evidence, mean_percent

RULE = CompareRule(seed_std=0.0, resamples=400)
ITEMS = 200
DROP = 10.0


def make_runs(
    rng: np.random.Generator, mean: float, count: int, *, seed_std: float = 1.5, items: int = ITEMS
) -> list[Evidence]:
    """Make right and wrong answers; each run's rate varies over seeds."""
    runs = []
    for _ in range(count):
        rate = np.clip((mean + rng.normal(0, seed_std)) / 100, 0, 1)
        right = (rng.random(items) < rate).astype(float)
        names = [str(i) for i in range(items)]
        parts = np.column_stack([right, np.ones(items)])
        runs.append(Evidence(groups=names, parts_NK=parts, statistic=mean_percent, items=names))
    return runs


@pytest.mark.parametrize("mean", [60.0, 60.0 - DROP])
def test_a_trial_is_decided_wrongly_in_at_most_one_of_twenty(mean: float) -> None:
    """As a search does it: the drop is that of the sides' runs, which stop as soon as it is confirmed."""
    rng = np.random.default_rng(5)
    wrong = decided = 0
    for _ in range(200):
        good, bad = make_runs(rng, 60.0, 5, items=600), make_runs(rng, 60.0 - DROP, 5, items=600)
        for sides in range(2, 6):
            drop = confirm_drop(bad[:sides], good[:sides], RULE, seen=DROP)
            if drop.lower is not None:
                break
        if not drop.lower:
            continue
        trial = make_runs(rng, mean, 5, items=600)
        for count in range(1, 6):  # as seeds are added until it is decided
            other, last = bad[:sides], count == 5
            decision = decide(
                trial[:count], good[: max(sides, count)], RULE, drop=-drop.value, other_trials=[other], last=last
            )
            if decision.lower is not None:
                wrong, decided = wrong + (decision.lower != (mean < 60)), decided + 1
                break
    assert decided > 150 and wrong / decided <= 0.05


@pytest.mark.parametrize(("seen", "items", "ruled_out"), [(8.0, 4000, 0.9), (3.0, 1000, 0.2)])
def test_equal_points_are_confirmed_in_at_most_one_of_twenty(seen: float, items: int, ruled_out: float) -> None:
    rng = np.random.default_rng(7)
    outcomes = []
    for _ in range(150):
        good, bad = make_runs(rng, 60.0, 5, items=items), make_runs(rng, 60.0, 5, items=items)
        for count in range(2, 6):  # four looks
            lower = confirm_drop(bad[:count], good[:count], RULE, seen=seen).lower
            if lower is not None:
                break
        outcomes.append(lower)
    assert outcomes.count(True) / len(outcomes) <= 0.05
    assert outcomes.count(False) / len(outcomes) >= ruled_out


def test_a_partial_loss_counts_after_the_last_seed_only() -> None:
    rng = np.random.default_rng(11)
    good, trial = (make_runs(rng, mean, 5, seed_std=0.5, items=4000) for mean in (60.0, 60.0 - DROP / 2))
    assert decide(trial, good, RULE, drop=DROP).lower is None
    assert decide(trial, good, RULE, drop=DROP, last=True).lower is True


def test_inconclusive_names_how_many_seeds_would_decide() -> None:
    rng = np.random.default_rng(1)
    noisy = [make_runs(rng, 60.0, 2, seed_std=6.0, items=4000) for _ in range(2)]
    decision = confirm_drop(noisy[1], noisy[0], CompareRule(seed_std=6.0, resamples=400), seen=6.0)
    assert decision.lower is None and decision.more_seeds is not None and decision.more_seeds > 3
    few = [make_runs(rng, 60.0, 2, seed_std=0.1, items=30) for _ in range(2)]
    gain = gain_over_seeds(few[1], few[0], seed_std=0.1, resamples=400, seed=1)
    assert gain is not None and more_seeds(gain, margin=0.01) is None, "the test set is too small"


def test_sides_are_compared_on_the_items_of_both_and_too_few_are_refused() -> None:
    rng = np.random.default_rng(2)
    (good,), (trial,) = make_runs(rng, 60.0, 1, items=100), make_runs(rng, 60.0, 1, items=80)
    (left,), (right,) = take_common([trial], [good])
    assert left.items == right.items and len(left.items) == 80
    (small,) = make_runs(rng, 60.0, 1, items=10)
    with pytest.raises(DataError, match="fewer than 20 test images"):
        decide([small], [good], RULE, drop=DROP)
