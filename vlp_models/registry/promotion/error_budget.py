"""The error budget of a task: what each comparison with its champion may spend.

The chance that any comparison of a task ever promotes a model that is no better stays below `promotion.error_budget`,
whichever tests it uses. Each refused comparison spends a part of what is left, so the budget never runs out; a
promotion spends nothing. Until the first false promotion, all comparisons of models that are no better were refused,
so the j-th of them has at most the j-th part: a union bound, so dependence between them does not matter. Repeating a
question, i.e. the same version against the same champion by the same metric and `min_gain`, on the same test with the
same runs, is the same comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlp_models.params.operations import GateParams, PromotionParams


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What one comparison with a champion may spend of its task's error budget.

    step: which part of the budget; 1 is the first and largest. alpha: allowed error probability. remaining: share of
    the budget that the refused comparisons left.
    """

    step: int
    alpha: float
    remaining: float

    def numbers(self, budget: float) -> dict[str, Any]:
        return {
            "budget_step": self.step,
            "error": float(f"{self.alpha:.4g}"),
            "error_budget": budget,
            "budget_left": round(self.remaining, 4),
        }


def spend_budget(
    entries: Sequence[Mapping[str, Any]],
    params: PromotionParams,
    *,
    model: str,
    test: str,
    contents: tuple[str, str],
    runs: tuple[int, ...],
    metric: str,
    rule: GateParams,
    num_candidates: int = 1,
) -> Spending:
    """Return what a comparison may spend.

    Args:
        entries: the ledger's.
        contents: of the version, and of the champion it is compared with. They identify a question: a rebuilt registry
            may give a number to another version.
        runs: `count_runs` of the comparison.
        rule: of the gate; no comparison is laxer than its confidence.
        num_candidates: how many versions this one was selected from on this very test; its alpha is divided by it.
    """
    question = (test, metric, rule.min_gain, *contents, runs)
    refused: set[tuple[Any, ...]] = set()  # each question counts once
    step = 0
    for entry in entries:
        numbers = entry.get("decision", {}).get("numbers", {})
        # Without a gain, such as that of a first champion, nothing was tested.
        if entry["model"] != model or count_runs(numbers) is None:
            continue
        asked = (numbers["test"], numbers["metric"], numbers["min_gain"])
        earlier = (*asked, entry["content"], entry["from_content"], count_runs(numbers))
        # A question that was asked before keeps its part, and with it its alpha.
        if earlier == question and not step:
            step = len(refused) + 1
        if entry["action"] == "refused":
            refused.add(earlier)
    step = step or len(refused) + 1
    # What the refused ones before it leave, less what it leaves itself: over all steps this adds up to the budget.
    part = share_left(params, step - 1) - share_left(params, step)
    # Divided by the candidates (Bonferroni): the best of several on this test had several chances.
    alpha = min(1 - rule.confidence, params.error_budget * part) / num_candidates
    return Spending(step=step, alpha=alpha, remaining=share_left(params, len(refused)))


def share_left(params: PromotionParams, refusals: int) -> float:
    """Return the share of the error budget that is left after so many refused comparisons.

    It falls like 1 / refusals, so the parts fall like 1 / refusals^2: slowly enough to find large gains for years.
    """
    return (1 - params.spend) / (1 - params.spend + refusals * params.spend)


def count_runs(numbers: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the runs of either variant and the degrees of freedom of past ones; None if no gain was measured."""
    if "runs" not in numbers:
        return None
    return (numbers["runs"], numbers["champion_runs"], numbers.get("pooled_degrees", 0))
