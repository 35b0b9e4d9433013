"""The gate: may this version become champion? Pure arithmetic on stored scores; nothing here talks to MLflow.

Asked of the challenger: finite scores of the wanted metric, a passed validation, the floors of every slice. If there is
a champion: a gain on the same test items that a paired bootstrap over images (NLVR: sentences) and seeds bears out. A
gain that it does not bear out is either ruled out, or this test can't tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vlp_models.metrics.bootstrap import gain_over_seeds
from vlp_models.metrics.score import Evidence, ItemScores
from vlp_models.params.promotion import GateParams, PromotionParams

ALL = "all"
POWER = 0.8  # with which `detectable` would be shown

Answer = Literal["promote", "keep", "cannot tell"]


class NotComparable(Exception):
    """The two sides were not measured on the same test, or not by the same scorer; says how they differ."""


@dataclass(kw_only=True)
class Verdict:
    """What the gate found. Empty `reasons`: the version may pass.

    told: whether a reason says that the version should not be champion; else the test can't tell.
    """

    reasons: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    told: bool = True

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def answer(self) -> Answer:
        return "promote" if self.passed else "keep" if self.told else "cannot tell"

    def join(self, other: Verdict) -> None:
        """Takes over what the other found as well. One reason to keep the champion is enough."""
        self.told = (bool(self.reasons) and self.told) or (bool(other.reasons) and other.told)
        self.numbers |= other.numbers
        self.reasons += other.reasons


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What versions are compared by. datasets: empty for all that a version was scored on."""

    metric: str
    split: str
    datasets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.metric} on {', '.join(self.datasets)}{' ' if self.datasets else ''}{self.split}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The yardstick's metric over its datasets, in one piece.

    test: hash of the test items. scorer: what the scorer noted (a Python tokenizer, ...).
    """

    metric: str
    test: str
    scorer: str
    evidence: Evidence
    slices: Sequence[Sequence[str]]

    def value(self, rows: Sequence[int] | None = None) -> float:
        parts = self.evidence.parts_NK if rows is None else self.evidence.parts_NK[list(rows)]
        return float(self.evidence.statistic(parts.sum(axis=0, keepdims=True))[0])


def measured(scores: Sequence[ItemScores], by: Yardstick) -> Measured | str:
    """The scores that the yardstick asks for; or, in words, why there are none to go by."""
    there = [s for s in scores if s.split == by.split and (not by.datasets or s.dataset in by.datasets)]
    chosen = [s for s in there if s.metric == by.metric and len(s.items)]
    if not chosen:
        known = ", ".join(sorted({s.metric for s in there})) or "none"
        return f"missing metric: no scores per item of {by}; there are: {known}"
    if any(not np.isfinite(s.parts_NK).all() for s in chosen):
        return f"non-finite: scores of {by} hold NaN or infinite values"
    evidence = Evidence(
        groups=[group for s in chosen for group in s.groups],
        parts_NK=np.concatenate([s.parts_NK for s in chosen]),
        statistic=chosen[0].evidence().statistic,
        items=[item for s in chosen for item in s.items],
    )
    found = Measured(
        metric=by.metric,
        test=",".join(sorted(f"{s.dataset}/{s.split}:{s.test}" for s in chosen)),
        scorer=",".join(sorted({s.note for s in chosen})),
        evidence=evidence,
        slices=[own for s in chosen for own in s.slices],
    )
    if not np.isfinite(found.value()):
        return f"non-finite: {by} is {found.value()}"
    return found


def datasets_of(scores: Sequence[ItemScores], by: Yardstick) -> set[str]:
    """The datasets on which `scores` have the yardstick's metric."""
    return {s.dataset for s in scores if s.split == by.split and s.metric == by.metric and len(s.items)}


def by_itself(challenger: Measured, rule: GateParams, validation: dict[str, Any] | None, unvalidated: bool) -> Verdict:
    """What is asked of every version, also of a first champion: validation and floors.

    Args:
        validation: what validation said of its data ({"passed": bool, "reasons": [...]}); None: not on record.
        unvalidated: whether none on record is good enough.
    """
    verdict = Verdict(
        numbers={
            "metric": rule.metric or challenger.metric,
            "direction": rule.direction,
            "value": round(challenger.value(), 4),
            "n": len(challenger.slices),
            "groups": len(set(challenger.evidence.groups)),
            "test": challenger.test,
            "floors": [],
        }
    )
    if validation is None and not unvalidated:
        verdict.reasons.append("unvalidated: no validation of its data is on record")
    if validation is not None and not validation.get("passed"):
        why = "; ".join(validation.get("reasons", [])) or "no reason on record"
        verdict.reasons.append(f"failed validation: {why}")
    for name, floor in rule.floors.items():
        rows = [i for i, own in enumerate(challenger.slices) if name == ALL or name in own]
        value = challenger.value(rows) if rows else None
        sound = value is not None and np.isfinite(value)
        held = sound and (value >= floor if rule.direction == "higher" else value <= floor)  # type: ignore[operator]
        row = {"slice": name, "n": len(rows), "floor": floor, "value": round(value, 4) if sound else None, "held": held}  # type: ignore[arg-type]
        verdict.numbers["floors"].append(row)
        if not rows:
            verdict.reasons.append(f"floor: no test item is in the slice {name}")
        elif not held:
            relation = "below" if rule.direction == "higher" else "above"
            verdict.reasons.append(f"floor: {challenger.metric} {value:.2f} of {name} is {relation} {floor:g}")
    return verdict


def against(
    challenger: Measured,
    champion: Measured,
    rule: GateParams,
    params: PromotionParams,
    *,
    error: float | None = None,
    beside: tuple[Sequence[Measured], Sequence[Measured]] = ((), ()),
) -> Verdict:
    """The gain over the champion, on the same items: of design over design where runs of either stand beside them.

    Args:
        error: the chance of promoting what is no better that this decision may take; default: the gate's own.
        beside: other runs of the challenger's design, and of the champion's, from other seeds.

    Raises:
        NotComparable: other test data or another scorer.
    """
    error = 1 - rule.confidence if error is None else error
    ours, theirs = [challenger, *beside[0]], [champion, *beside[1]]
    for other in (*theirs, *beside[0]):
        check_comparable(challenger, other)
    sign = 1.0 if rule.direction == "higher" else -1.0
    metric, relevant = challenger.metric, rule.relevant(challenger.metric)
    own = sign * (challenger.value() - champion.value())
    numbers: dict[str, Any] = {
        "champion_value": round(champion.value(), 4),
        "gain": round(own, 4),
        "min_gain": rule.min_gain,
        "relevant_gain": relevant,
        "confidence": rule.confidence,
        "power": POWER,
        "runs": len(ours),
        "champion_runs": len(theirs),
    }
    found = gain_over_seeds(
        [side.evidence for side in ours],
        [side.evidence for side in theirs],
        seed_std=rule.deviation(metric),
        resamples=params.resamples,
        seed=params.seed,
        sign=sign,
    )
    if found is None:
        return _untold("no confidence: fewer than two images to resample", numbers)
    if not np.isfinite(found.draws_S).all():
        return _untold(f"non-finite: {metric} of a resample is no number", numbers)
    low, high = found.interval(error)
    p, detectable = found.p_above(rule.min_gain), found.detectable(rule.min_gain, error, POWER)
    numbers |= {
        "design_gain": round(found.value, 4),
        "share_above_min_gain": round(1 - p, 4),
        "gain_low": round(low, 4),
        "gain_high": round(high, 4),
        "detectable": round(detectable, 4),
        "deviation_items": round(found.items, 4),
        "deviation_seeds": round(found.seeds, 4),
        "seed_std": None if found.seed_std is None else round(found.seed_std, 4),
    }
    # The value itself, too: a resample's share alone could pass on a skewed metric, and of a better design this one
    # version need not be better.
    if p <= error and min(found.value, own) > rule.min_gain:
        return Verdict(numbers=numbers)
    of_designs = f", of its design over {len(ours)} against {len(theirs)} seeds {found.value:+.2f}"
    said = (
        f"gain: {metric} {challenger.value():.2f} against the champion's {champion.value():.2f}: {own:+.2f}"
        f"{of_designs if len(ours) + len(theirs) > 2 else ''} ({low:+.2f} to {high:+.2f})"
    )
    if p <= error:
        return Verdict(reasons=[f"{said}: the design is better, this version of it is not"], numbers=numbers)
    if high < relevant:
        ruled_out = f"{said}: a gain of {relevant:g} or more is ruled out"
        return Verdict(reasons=[ruled_out], numbers=numbers)
    cause = "seeds" if found.seeds > found.items else "items"
    numbers["too_few"] = cause
    verdict = _untold(
        f"{said}: a gain above {rule.min_gain:g} is not shown, nor is one of {relevant:g} ruled out. The smallest that "
        f"would be shown in {POWER:.0%} of cases is {detectable:.2f}; too few {cause} keep it from being smaller",
        numbers,
    )
    if error < found.p_above(-np.inf):
        verdict.reasons.append(
            f"worn: an error of {error:.1g} is left to this decision, and {params.resamples:,} resamples can show none "
            "so small; take a fresh test, or raise `promotion.resamples`"
        )
    return verdict


def _untold(reason: str, numbers: dict[str, Any] | None = None) -> Verdict:
    return Verdict(reasons=[reason], numbers=numbers or {}, told=False)


def as_good(challenger: Measured, champion: Measured, rule: GateParams) -> Verdict:
    """Of a version with the champion's own weights (a mended way to serve them) no gain is asked, but no loss either.

    Raises:
        NotComparable: other test data or another scorer.
    """
    check_comparable(challenger, champion)
    value = (1.0 if rule.direction == "higher" else -1.0) * (challenger.value() - champion.value())
    numbers = {"champion_value": round(champion.value(), 4), "gain": round(value, 4), "same_weights": True}
    if value >= 0:
        return Verdict(numbers=numbers)
    reason = (
        f"loss: {challenger.metric} {challenger.value():.2f} with the champion's own weights, which had "
        f"{champion.value():.2f}"
    )
    return Verdict(reasons=[reason], numbers=numbers)


def check_comparable(challenger: Measured, champion: Measured) -> None:
    """
    Raises:
        NotComparable: says what differs.
    """
    if challenger.test != champion.test:
        raise NotComparable(f"the test data differ: {challenger.test} here, the champion's {champion.test}")
    if challenger.scorer != champion.scorer:
        raise NotComparable(
            f"the scorers differ: `{challenger.scorer or 'plain'}` here, the champion's `{champion.scorer or 'plain'}`"
        )
    ours, theirs = (sorted(zip(s.evidence.items, s.evidence.groups, strict=True)) for s in (challenger, champion))
    if ours != theirs:
        raise NotComparable("the two were not scored on the same items")
    width = champion.evidence.parts_NK.shape[1]
    if challenger.evidence.parts_NK.shape[1] != width:
        raise NotComparable("the two were scored by different statistics")


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
