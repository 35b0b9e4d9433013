"""Several runs of several models before one gate: the best of them, on the same test, one champion a task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_registry import answers, toy_items

from vlp_models.errors import DataError
from vlp_models.params import PromotionParams
from vlp_models.pipeline.promote import explain
from vlp_models.registry.promotion.gate import WORN, Spending, spending

WEAK, GOOD, BETTER, BEST = answers(0.3), answers(0.5), answers(0.7), answers(0.9)
RUNS = ("regions", "pixels", "other")


def percent(values: list[float]) -> float:
    return round(100 * float(np.mean(values)), 4)


def test_the_best_of_all_runs_becomes_the_one_champion(new: Any) -> None:
    registry = new()
    registry.add(GOOD, made_by=("regions", "tden"))
    registry.add(BETTER, made_by=("pixels", "toy"))
    registry.add(WEAK, made_by=("other", "tden"))  # registered last, so it has the alias `challenger`
    first = registry.promote(runs=RUNS)
    assert (first.outcome, first.version, first.run, first.run_model) == ("promoted", 2, "pixels", "toy")
    assert [(c["run"], c["value"]) for c in first.candidates] == [
        ("pixels", percent(BETTER)),
        ("regions", percent(GOOD)),
        ("other", percent(WEAK)),
    ]
    assert "beside it: version 1 (run regions, tden): " in "\n".join(explain(first))

    again = registry.promote(runs=RUNS)
    assert again.outcome == "unchanged" and "the best of 3 candidates" in again.reasons[0]
    registry.add(BEST, made_by=("regions", "tden"))
    second = registry.promote(runs=RUNS)
    assert (second.outcome, second.version, second.champion) == ("promoted", 4, 2)
    done = registry.ledger.entries()[-1]
    assert (done["kind"], done["run"], done["run_model"]) == ("done", "regions", "tden")
    assert (done["from_run"], done["from_run_model"]) == ("pixels", "toy")
    assert [c["version"] for c in done["decision"]["candidates"]] == [4, 2, 3], "the newest version of each run"
    assert "champion is version 4 (run regions, tden) (was 2 (run pixels, toy))" in explain(second)[0]


def test_the_best_is_chosen_on_val_judged_on_test_and_the_uses_of_the_test_are_counted(new: Any) -> None:
    registry = new()

    def add(val: list[float], test: list[float], run: str) -> None:
        registry.add([], items=[toy_items(val, split="val", test="v"), toy_items(test)], made_by=(run, "tden"))

    add(GOOD, BEST, "regions")  # the luckiest on the test
    add(BETTER, BETTER, "pixels")
    first = registry.promote(runs=RUNS)
    assert (first.outcome, first.run) == ("promoted", "pixels")
    assert (first.numbers["value"], first.numbers["test_uses"]) == (percent(BETTER), 1)
    assert first.numbers["chosen_on"] == "val"
    said = "\n".join(explain(first))
    assert "chosen among several on val" in said
    beside = f"beside it: version 1 (run regions, tden): {percent(GOOD):.2f} on val, where it has {percent(BETTER):.2f}"
    assert beside in said, "a figure of val is not taken for one of the test"

    add(BEST, WEAK, "other")
    second = registry.promote(runs=RUNS)
    assert (second.outcome, second.run, second.numbers["test_uses"]) == ("refused", "other", 2)
    assert "decisions on this test so far, this one included: 2" in "\n".join(explain(second))

    registry.add(BEST, made_by=("regions", "tden"))  # one without val scores: on the test, and it is said
    third = registry.promote(runs=RUNS)
    assert (third.run, third.numbers["chosen_on"], third.numbers["test_uses"]) == ("regions", "test", 3)
    assert "the gain is too large by that choice" in "\n".join(explain(third))


def test_a_test_of_data_without_val_is_part_of_the_gate(new: Any) -> None:
    registry = new()

    def add(first: list[float], second: list[float], run: str) -> None:
        items = [toy_items(first, split="val", test="v"), toy_items(first)]
        registry.add([], items=[*items, toy_items(second, dataset="other", test="o")], made_by=(run, "tden"))

    add(GOOD, BEST, "regions")
    first = registry.promote(runs=RUNS)
    assert first.outcome == "promoted" and first.numbers["value"] == (percent(GOOD) + percent(BEST)) / 2
    add(BETTER, WEAK, "pixels")  # better on toy's val and test, and far worse on the other's test
    second = registry.promote(runs=RUNS)
    assert (second.outcome, second.champion) != ("promoted", 1), second


def test_each_decision_on_a_test_leaves_less_of_its_budget_and_the_same_question_is_one_decision(new: Any) -> None:
    registry = new()
    registry.add(GOOD)
    registry.promote()
    registry.add(WEAK)
    errors = [registry.promote().numbers["error"] for _ in range(2)]
    assert errors == pytest.approx([0.2 * 0.1 * 0.9] * 2, rel=1e-3)
    entries = registry.ledger.entries()
    test = entries[-1]["decision"]["numbers"]["test"]

    def spent(version: int, test: str, **more: Any) -> Spending:
        about = {"model": registry.model, "test": test, "asked": (version, 1), "runs": (1, 1), "confidence": 0.95}
        return spending(entries, PromotionParams(), **{**about, **more})

    assert (spent(2, test).uses, spent(3, test).uses, spent(3, "fresh").uses) == (2, 3, 1)
    assert spent(2, test, runs=(3, 1)).uses == 3, "the same versions, but now of three seeds"
    assert spent(3, "fresh", choices=4).error == pytest.approx(0.02 / 4), "the best of four on this very test"
    total = 0.0
    for version in range(3, 60):
        total += spent(version, test).error
        assert (spent(version, test).left < WORN) == (version > 13)
        entries.append({**entries[-1], "version": version})
    assert total < 0.2


def test_seeds_of_a_design_stand_together_before_the_gate(new: Any) -> None:
    """One lucky seed of three does not make a design better; and seeds of one design never beat each other."""
    registry = new(seed_std=5.0)
    for n, values in enumerate((GOOD, answers(0.5, 1), answers(0.5, 2))):
        registry.add(values, made_by=(f"first-{n}", "tden"), cohort="first")
    assert registry.promote(1).outcome == "promoted"
    same = registry.promote(2)
    assert (same.outcome, same.answer) == ("refused", "keep") and "in its seed alone" in same.reasons[0]
    for n, values in enumerate((BETTER, answers(0.4, 3), answers(0.45, 4))):
        registry.add(values, made_by=(f"second-{n}", "tden"), cohort="second")
    lucky = registry.promote(4)
    assert lucky.outcome == "refused" and lucky.numbers["gain"] > 10 > lucky.numbers["design_gain"]
    assert (lucky.numbers["runs"], lucky.numbers["champion_runs"]) == (3, 3)
    assert "seeds: 3 against 3 runs of a design" in "\n".join(explain(lucky))
    assert registry.promote(4).numbers["test_uses"] == lucky.numbers["test_uses"]
    registry.add(answers(0.42, 5), made_by=("second-3", "tden"), cohort="second")
    assert registry.promote(4).numbers["test_uses"] == lucky.numbers["test_uses"] + 1, "another look, at more seeds"
    for n in range(3):
        registry.add(answers(0.8, n), made_by=(f"third-{n}", "tden"), cohort="third")
    assert registry.promote(8).outcome == "promoted"


def test_runs_that_params_does_not_have_do_not_compete_unless_asked_for(new: Any) -> None:
    registry = new()
    registry.add(BEST, made_by=("gone", "tden"))
    registry.add(GOOD, made_by=("regions", "tden"))
    decision = registry.promote(runs=RUNS)
    assert (decision.version, decision.run) == (2, "regions")
    asked = registry.promote(1, runs=RUNS)
    assert (asked.outcome, asked.run, asked.candidates) == ("promoted", "gone", [])


def test_who_was_rolled_back_does_not_return_and_the_next_best_may(new: Any) -> None:
    registry = new()
    for values, run in ((GOOD, "regions"), (BEST, "pixels")):
        registry.add(values, made_by=(run, "tden"))
        assert registry.promote(runs=RUNS).outcome == "promoted"
    back = registry.rollback()
    assert (back.version, back.run, back.champion_run) == (1, "regions", "pixels")
    assert registry.promote(runs=RUNS).outcome == "unchanged"
    registry.add(BETTER, made_by=("other", "toy"))
    decision = registry.promote(runs=RUNS)
    assert (decision.outcome, decision.version, decision.champion) == ("promoted", 3, 1)
    notes = {c["run"]: c.get("note") for c in decision.candidates}
    assert notes == {"other": None, "regions": None, "pixels": "it was rolled back"}


def test_another_test_or_no_scores_are_listed_and_do_not_win(new: Any) -> None:
    registry = new()
    registry.add(BEST, made_by=("regions", "tden"), test="t0")
    registry.add(WEAK, made_by=("pixels", "toy"), metric="BLEU-4")
    registry.add(GOOD, made_by=("other", "tden"))
    decision = registry.promote(runs=RUNS)
    assert (decision.outcome, decision.run) == ("promoted", "other")
    notes = {c["run"]: c.get("note", "") for c in decision.candidates}
    assert "the test data differ" in notes["regions"] and "missing metric" in notes["pixels"]


def test_where_none_can_be_measured_the_refusal_says_why(new: Any) -> None:
    registry = new()
    with pytest.raises(DataError, match="no challenger"):
        registry.promote(runs=RUNS)
    for run in ("regions", "pixels"):
        registry.add(GOOD, made_by=(run, "tden"), metric="BLEU-4")
    decision = registry.promote(runs=RUNS)
    assert decision.outcome == "refused" and "missing metric" in decision.reasons[0]


def test_lower_is_better_where_the_gate_says_so(new: Any) -> None:
    registry = new(direction="lower")
    registry.add(BEST, made_by=("regions", "tden"))
    registry.add(WEAK, made_by=("pixels", "toy"))
    assert registry.promote(runs=RUNS).run == "pixels"
