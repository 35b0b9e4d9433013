"""Several runs of several models: the gate judges the best of them on the same test; one champion per task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_registry import answers, toy_items

from vlp_models.errors import DataError
from vlp_models.params import GateParams, PromotionParams
from vlp_models.pipeline.promotion_commands import explain
from vlp_models.registry.promotion.error_budget import Spending, spend_budget

WEAK, GOOD, BETTER, BEST = answers(0.3), answers(0.5), answers(0.7), answers(0.9)
RUNS = ("regions", "pixels", "other")


def percent(values: list[float]) -> float:
    return round(100 * float(np.mean(values)), 4)


@pytest.mark.slow
def test_the_best_of_all_runs_becomes_the_one_champion(new: Any) -> None:
    registry = new()
    registry.add(GOOD, made_by=("regions", "tden"))
    registry.add(BETTER, made_by=("pixels", "toy"))
    registry.add(WEAK, made_by=("other", "tden"))  # registered last, so it has the alias `challenger`
    first = registry.promote(runs=RUNS)
    assert (first.action, first.version, first.run, first.run_model) == ("promoted", 2, "pixels", "toy")
    assert [(c["run"], c["value"]) for c in first.candidates] == [
        ("pixels", percent(BETTER)),
        ("regions", percent(GOOD)),
        ("other", percent(WEAK)),
    ]
    assert "other candidate: version 1 (run regions, tden): " in "\n".join(explain(first))

    again = registry.promote(runs=RUNS)
    assert again.action == "unchanged" and "the best of 3 candidates" in again.reasons[0]
    registry.add(BEST, made_by=("regions", "tden"))
    second = registry.promote(runs=RUNS)
    assert (second.action, second.version, second.champion) == ("promoted", 4, 2)
    entry = registry.ledger.entries()[-1]
    assert (entry["action"], entry["run"], entry["run_model"]) == ("promoted", "regions", "tden")
    assert (entry["from_run"], entry["from_run_model"]) == ("pixels", "toy")
    assert [c["version"] for c in entry["decision"]["candidates"]] == [4, 2, 3], "the newest version of each run"
    assert "champion is version 4 (run regions, tden) (was 2 (run pixels, toy))" in explain(second)[0]


def test_best_is_selected_on_val_and_judged_on_test(new: Any) -> None:
    registry = new()

    def add(val: list[float], test: list[float], run: str) -> None:
        registry.add([], items=[toy_items(val, split="val", test="v"), toy_items(test)], made_by=(run, "tden"))

    add(GOOD, BEST, "regions")  # the luckiest on the test
    add(BETTER, BETTER, "pixels")
    first = registry.promote(runs=RUNS)
    assert (first.action, first.run) == ("promoted", "pixels")
    assert (first.numbers["value"], first.numbers["selected_on"]) == (percent(BETTER), "val")
    explanation = "\n".join(explain(first))
    assert "candidates are ranked on val by accuracy; the best is judged on test" in explanation
    value = f"{percent(GOOD):.2f} on val (chosen version: {percent(BETTER):.2f})"
    assert f"other candidate: version 1 (run regions, tden): {value}" in explanation, "val, not the test"

    add(BEST, WEAK, "other")
    second = registry.promote(runs=RUNS)
    assert (second.action, second.run, second.numbers["error"]) == ("refused", "other", 0.02)
    assert "may err with probability 2%; 100% of the task's error budget was left" in "\n".join(explain(second))

    registry.add(BEST, made_by=("regions", "tden"))  # one without val scores: select on the test, and report it
    third = registry.promote(runs=RUNS)
    assert (third.run, third.numbers["selected_on"], third.numbers["budget_step"]) == ("regions", "test", 2)
    assert "so its gain is biased upward" in "\n".join(explain(third))


def test_datasets_without_val_are_part_of_the_gate(new: Any) -> None:
    registry = new()

    def add(first: list[float], second: list[float], run: str) -> None:
        items = [toy_items(first, split="val", test="v"), toy_items(first)]
        registry.add([], items=[*items, toy_items(second, dataset="other", test="o")], made_by=(run, "tden"))

    add(GOOD, BEST, "regions")
    first = registry.promote(runs=RUNS)
    assert first.action == "promoted" and first.numbers["value"] == (percent(GOOD) + percent(BEST)) / 2
    add(BETTER, WEAK, "pixels")  # better on toy's val and test, and far worse on the other's test
    second = registry.promote(runs=RUNS)
    assert (second.action, second.champion) != ("promoted", 1), second


def test_refused_comparisons_spend_the_tasks_budget_whichever_test_they_use(new: Any) -> None:
    registry = new()
    registry.add(GOOD)
    registry.promote()
    registry.add(WEAK)
    errors = [registry.promote().numbers["error"] for _ in range(2)]
    assert errors == [0.02, 0.02], "a first champion and a repeated question spend nothing"
    entries = registry.ledger.entries()
    champion, refused = entries[0], entries[-1]
    test = refused["decision"]["numbers"]["test"]

    def spent(content: str, test: str, **more: Any) -> Spending:
        metric = refused["decision"]["numbers"]["metric"]
        options = {"model": registry.model, "runs": (1, 1, 0), "metric": metric, "rule": GateParams()}
        contents = (content, champion["content"])
        return spend_budget(entries, PromotionParams(), test=test, contents=contents, **{**options, **more})

    again = spent(refused["content"], test)
    assert (again.step, again.remaining) == (1, 0.9), "its own part, and the budget stays spent"
    assert spent("new", test).step == 2 and spent("new", test, model="another task").step == 1
    assert spent(refused["content"], test, runs=(3, 1, 0)).step == 2, "the same versions, now with three seeds"
    assert spent(refused["content"], test, metric="CIDEr").step == 2, "by another metric"
    # The test gains items every week, or is drawn again: the same task, and so the same budget.
    assert spent(refused["content"], "grown").step == spent("new", "drawn again").step == 2
    assert spent("new", test, num_candidates=4).alpha == spent("new", test).alpha / 4, "the best of four on this test"
    # A promotion spends nothing: the next challenger has the same part.
    entries.append({**refused, "action": "promoted", "content": "better"})
    assert spent("new", test).step == 2
    # All parts add up to the budget, also if every week has its own test.
    alphas = []
    for week in range(300):
        alphas.append(spent(f"week {week}", f"test {week}").alpha)
        numbers = {**refused["decision"]["numbers"], "test": f"test {week}"}
        entries.append({**refused, "content": f"week {week}", "decision": {"numbers": numbers}})
    left = spent("new", test).remaining
    assert sum(alphas) + 0.02 == pytest.approx(0.2 * (1 - left)) and 0 < left < 0.03


def test_a_version_of_a_rebuilt_registry_is_another_question(new: Any) -> None:
    registry = new()
    registry.add(GOOD, weights="the champion's")
    registry.promote()
    registry.add(WEAK)
    first = registry.promote()
    registry.client.delete_registered_model(registry.model)
    registry.add(GOOD, weights="the champion's")
    registry.add(BETTER)  # the number of the one before, not its content
    second = registry.promote(2)
    assert first.version == second.version == 2
    assert (first.numbers["budget_step"], second.numbers["budget_step"]) == (1, 2)


@pytest.mark.slow
def test_seeds_of_a_variant_are_judged_together(new: Any) -> None:
    """One lucky seed of three does not make a variant better, and seeds of one variant never replace each other."""
    registry = new(seed_std=5.0)
    for n, values in enumerate((GOOD, answers(0.5, 1), answers(0.5, 2))):
        registry.add(values, made_by=(f"first-{n}", "tden"), variant="first")
    assert registry.promote(1).action == "promoted"
    same = registry.promote(2)
    assert (same.action, same.outcome) == ("refused", "keep") and "in its seed only" in same.reasons[0]
    for n, values in enumerate((BETTER, answers(0.4, 3), answers(0.45, 4))):
        registry.add(values, made_by=(f"second-{n}", "tden"), variant="second")
    lucky = registry.promote(4)
    assert lucky.action == "refused" and lucky.numbers["gain"] > 10 > lucky.numbers["variant_gain"]
    assert (lucky.numbers["runs"], lucky.numbers["champion_runs"]) == (3, 3)
    assert "seeds: 3 vs 3 runs per variant" in "\n".join(explain(lucky))
    assert registry.promote(4).numbers["budget_step"] == lucky.numbers["budget_step"]
    registry.add(answers(0.42, 5), made_by=("second-3", "tden"), variant="second")
    assert registry.promote(4).numbers["budget_step"] == lucky.numbers["budget_step"] + 1, "with more seeds"
    for n in range(3):
        registry.add(answers(0.8, n), made_by=(f"third-{n}", "tden"), variant="third")
    assert registry.promote(8).action == "promoted"


@pytest.mark.slow
def test_past_variants_show_the_deviation_over_seeds_unless_the_compared_ones_vary_more(new: Any) -> None:
    registry = new(seed_std=0.0)

    def add(variant: str, *runs: list[float], **scores: Any) -> int:
        first, *_ = [registry.add(values, variant=variant, **scores) for values in runs]
        return first

    assert registry.promote(add("champion", answers(0.5, 1), answers(0.5, 2))).action == "promoted"
    better = add("better", answers(0.64, 5), answers(0.64, 6))
    alone = registry.promote(better)
    assert alone.outcome == "inconclusive" and alone.numbers["pooled_variants"] == 0
    # Two runs, where runs of one seed and of another test show nothing.
    for n in range(4):
        add(f"past {n}", answers(0.5, 10 + n), answers(0.5, 20 + n))
    add("one seed", answers(0.5, 30))
    add("another test", answers(0.5, 31), answers(0.5, 32), test="t2")
    wild = add("wild", answers(0.9, 7), answers(0.5, 8))
    unlike = registry.promote(wild)
    assert unlike.numbers["pooled_degrees"] == 0 and "5 past ones by" in unlike.numbers["not_pooled"]
    assert "past variants are not used" in "\n".join(explain(unlike))
    registry.client.delete_model_version(registry.model, str(wild))
    # The same versions and runs as before, but more is known of their deviation: another question.
    pooled = registry.promote(better)
    assert (pooled.action, pooled.numbers["pooled_variants"], pooled.numbers["pooled_degrees"]) == ("promoted", 4, 4)
    assert pooled.numbers["budget_step"] == 3
    assert "2 vs 2 runs per variant and 4 past variants" in "\n".join(explain(pooled))


def test_runs_missing_from_params_compete_only_when_requested(new: Any) -> None:
    registry = new()
    registry.add(BEST, made_by=("gone", "tden"))
    registry.add(GOOD, made_by=("regions", "tden"))
    decision = registry.promote(runs=RUNS)
    assert (decision.version, decision.run) == (2, "regions")
    requested = registry.promote(1, runs=RUNS)
    assert (requested.action, requested.run, requested.candidates) == ("promoted", "gone", [])


def test_rolled_back_version_does_not_return_and_the_next_best_may(new: Any) -> None:
    registry = new()
    for values, run in ((GOOD, "regions"), (BEST, "pixels")):
        registry.add(values, made_by=(run, "tden"))
        assert registry.promote(runs=RUNS).action == "promoted"
    back = registry.rollback()
    assert (back.version, back.run, back.champion_run) == (1, "regions", "pixels")
    assert registry.promote(runs=RUNS).action == "unchanged"
    registry.add(BETTER, made_by=("other", "toy"))
    decision = registry.promote(runs=RUNS)
    assert (decision.action, decision.version, decision.champion) == ("promoted", 3, 1)
    reasons = {c["run"]: c.get("reason") for c in decision.candidates}
    assert reasons == {"other": None, "regions": None, "pixels": "it was rolled back"}


def test_candidates_of_another_test_or_without_scores_are_listed_and_do_not_win(new: Any) -> None:
    registry = new()
    with pytest.raises(DataError, match="no challenger"):
        registry.promote(runs=RUNS)
    registry.add(WEAK, made_by=("pixels", "toy"), metric="BLEU-4")
    unmeasured = registry.promote(runs=RUNS)
    assert unmeasured.action == "refused" and "missing metric" in unmeasured.reasons[0], "no candidate is left"
    registry.add(BEST, made_by=("regions", "tden"), test="t0")
    registry.add(GOOD, made_by=("other", "tden"))
    decision = registry.promote(runs=RUNS)
    assert (decision.action, decision.run) == ("promoted", "other")
    reasons = {c["run"]: c.get("reason", "") for c in decision.candidates}
    assert "the test data differ" in reasons["regions"] and "missing metric" in reasons["pixels"]


def test_lower_is_better_if_the_gate_is_configured_so(new: Any) -> None:
    registry = new(direction="lower")
    registry.add(BEST, made_by=("regions", "tden"))
    registry.add(WEAK, made_by=("pixels", "toy"))
    assert registry.promote(runs=RUNS).run == "pixels"
