"""The search for causes, on changes whose effect is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.contrib.bisect.search import Search, Subset


def search(count: int, lowers: Callable[[Subset], bool]) -> tuple[list[str], list[Subset]]:
    """Return the causes that are found among changes c0, c1, ..., and the trials that were made."""
    trials: list[Subset] = []

    def record(trial: Subset) -> bool:
        trials.append(trial)
        return lowers(trial)

    return Search(record).find_causes([f"c{i}" for i in range(count)]), trials


@given(st.integers(1, 200), st.data())
def test_one_cause_takes_log2_trials_and_one(count: int, data: st.DataObject) -> None:
    cause = f"c{data.draw(st.integers(0, count - 1))}"
    causes, trials = search(count, lambda trial: cause in trial)
    assert causes == [cause]
    assert len(trials) <= math.ceil(math.log2(count)) + 1 and len(trials) == len(set(trials))


@given(st.integers(2, 64), st.data())
def test_changes_that_lower_the_score_only_together_are_all_found(count: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, min(4, count)))
    numbers = data.draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size, unique=True))
    together = frozenset(f"c{i}" for i in numbers)
    causes, trials = search(count, lambda trial: together <= trial)
    assert set(causes) == together
    assert len(trials) == len(set(trials))
    assert len(trials) <= math.ceil(math.log2(count)) + 1 + 2 * size * (math.ceil(math.log2(count)) + 1)


@given(st.integers(2, 64), st.data())
def test_any_of_two_sufficient_causes_is_found_alone(count: int, data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    causes, _ = search(count, lambda trial: bool({f"c{a}", f"c{b}"} & trial))
    assert causes in ([f"c{a}"], [f"c{b}"])


@given(st.integers(2, 40), st.data())
def test_a_change_that_only_runs_with_another_is_found_with_it(count: int, data: st.DataObject) -> None:
    cause, needed = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    # Without `needed` a trial with the cause does not run, which counts as not lower.
    causes, _ = search(count, lambda trial: {f"c{cause}", f"c{needed}"} <= trial)
    assert set(causes) == {f"c{cause}", f"c{needed}"}


def test_candidates_are_kept_when_a_trial_is_not_decided() -> None:
    made: list[Subset] = []

    def lowers(trial: Subset) -> bool:
        made.append(trial)
        if len(made) == 2:
            raise RuntimeError
        return "c1" in trial

    finder = Search(lowers)
    with pytest.raises(RuntimeError):
        finder.find_causes([f"c{i}" for i in range(8)])
    assert finder.candidates == ["c0", "c1", "c2", "c3"]
