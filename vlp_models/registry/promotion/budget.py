"""A test's error budget: each decision on it spends a share of what is left, so that it never runs out.

The chance that any of a test's decisions promotes a model that is no better stays below `promotion.error_budget`,
however often the test is asked (alpha spending: by the union bound, whatever the decisions have in common). Asking the
same again, the same version against the same champion, is the same decision; with more seeds beside either, another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlp_models.params.promotion import PromotionParams

WORN = 0.25  # of the budget left: from there on a fresh test is asked for


@dataclass(frozen=True, kw_only=True)
class Spending:
    """uses: decisions on this test, this one included. error: the chance of error allowed to this one. left: the share
    of the budget that is left behind it."""

    uses: int
    error: float
    left: float

    def numbers(self, budget: float) -> dict[str, Any]:
        return {
            "test_uses": self.uses,
            "error": float(f"{self.error:.4g}"),
            "error_budget": budget,
            "budget_left": round(self.left, 4),
        }


def spending(
    entries: Sequence[dict[str, Any]],
    params: PromotionParams,
    *,
    model: str,
    test: str,
    asked: tuple[int, int | None],
    runs: tuple[int, int] | None = None,
    confidence: float,
    choices: int = 1,
) -> Spending:
    """What a decision on `test` may spend.

    Args:
        entries: of the ledger.
        asked: the version, and the champion it is compared with.
        runs: of their designs, which are compared; None: there is no gain to measure.
        confidence: of the gate; no decision is laxer.
        choices: how many versions the one was chosen from on this very test; its error is shared among them.
    """
    before: list[tuple[Any, ...]] = []
    for entry in entries:
        decided = entry["kind"] in ("intent", "done", "refused") and entry["action"] == "promote"
        if decided and entry["model"] == model and _test_of(entry) == test:
            question = (entry["version"], entry["from"], runs_of(entry["decision"]["numbers"]))
            if question not in before:
                before.append(question)
    now = (*asked, runs)
    uses = before.index(now) + 1 if now in before else len(before) + 1
    kept = 1 - params.spend
    allowed = min(1 - confidence, params.error_budget * params.spend * kept ** (uses - 1))
    return Spending(uses=uses, error=allowed / choices, left=kept**uses)


def runs_of(numbers: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many runs of either design a gain was measured over; None where none was, or of an older ledger."""
    return (numbers["runs"], numbers["champion_runs"]) if "runs" in numbers else None


def _test_of(entry: dict[str, Any]) -> str | None:
    found = entry.get("decision", {}).get("numbers", {}).get("test")
    return str(found) if found is not None else None
