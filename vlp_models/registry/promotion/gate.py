"""The gate: may this version become champion? Pure arithmetic on stored scores; nothing here talks to MLflow.

Every version must have finite scores of the task's metric on enough test images, a passed validation, and the floor of
every slice. A first champion must be better than the task's simple baselines. A later one must show a gain on the same
test items that both tests of metrics/gain.py confirm, over images (NLVR: sentences) and seeds. A gain that is not
confirmed is either ruled out (`keep`) or `inconclusive`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vlp_models.metrics.gain import gain_over_seeds
from vlp_models.metrics.score import Evidence, ItemScores
from vlp_models.params.operations import GateParams, PromotionParams
from vlp_models.registry.promotion.gate_rule import MetricSpec

ALL = "all"  # the slice of the whole test
POWER = 0.8  # probability with which the minimum detectable gain would be shown
ALIKE = 0.05  # level of the test that the compared variants vary more over seeds than past ones

GateOutcome = Literal["promote", "keep", "inconclusive"]


class NotComparableError(Exception):
    """The two sides were not measured on the same test or by the same scorer; the message names the difference."""


@dataclass(kw_only=True)
class Verdict:
    """The gate's finding. reasons: empty if the version may be promoted.

    conclusive: whether a reason is evidence against the version; otherwise the test cannot decide.
    """

    reasons: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    conclusive: bool = True

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def outcome(self) -> GateOutcome:
        if self.passed:
            return "promote"
        return "keep" if self.conclusive else "inconclusive"

    def merge(self, other: Verdict) -> None:
        """Add the findings of `other`. One conclusive reason is enough to keep the champion."""
        # A verdict without reasons has nothing to be conclusive about.
        self.conclusive = (bool(self.reasons) and self.conclusive) or (bool(other.reasons) and other.conclusive)
        self.numbers |= other.numbers
        self.reasons += other.reasons


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A version's scores of one metric over all datasets of a MetricSpec.

    test: hash of the test items. scorer: what the scorer recorded about itself (a Python tokenizer, ...).
    """

    metric: str
    test: str
    scorer: str
    evidence: Evidence
    slices: Sequence[Sequence[str]]

    def value(self, rows: Sequence[int] | None = None) -> float:
        parts = self.evidence.parts_NK if rows is None else self.evidence.parts_NK[list(rows)]
        # (N, K) -> (1, K) -> (1,): the statistic of the sums over the items, not a mean of items.
        return float(self.evidence.statistic(parts.sum(axis=0, keepdims=True))[0])


def measure(scores: Sequence[ItemScores], spec: MetricSpec) -> Measurement | str:
    """Combine the scores that `spec` selects; or return the reason why they cannot be used."""
    available = [s for s in scores if s.split == spec.split and (not spec.datasets or s.dataset in spec.datasets)]
    chosen = [s for s in available if s.metric == spec.metric and len(s.items)]
    if not chosen:
        names = ", ".join(sorted({s.metric for s in available})) or "none"
        return f"missing metric: no scores per item of {spec}; available: {names}"
    if any(not np.isfinite(s.parts_NK).all() for s in chosen):
        return f"non-finite: scores of {spec} contain NaN or infinite values"
    # All datasets as one test: items are concatenated, [N1 + N2, K], so larger datasets weigh more.
    evidence = Evidence(
        groups=[group for s in chosen for group in s.groups],
        parts_NK=np.concatenate([s.parts_NK for s in chosen]),
        # One metric has one statistic, whichever dataset it is of.
        statistic=chosen[0].evidence().statistic,
        items=[item for s in chosen for item in s.items],
    )
    measurement = Measurement(
        metric=spec.metric,
        test=",".join(sorted(f"{s.dataset}/{s.split}:{s.test}" for s in chosen)),
        scorer=",".join(sorted({s.note for s in chosen})),
        evidence=evidence,
        slices=[item_slices for s in chosen for item_slices in s.slices],
    )
    if not np.isfinite(measurement.value()):
        return f"non-finite: {spec} is {measurement.value()}"
    return measurement


def find_datasets(scores: Sequence[ItemScores], spec: MetricSpec) -> set[str]:
    """Return the datasets on which `scores` have the metric."""
    return {s.dataset for s in scores if s.split == spec.split and s.metric == spec.metric and len(s.items)}


def check_floors(
    challenger: Measurement, rule: GateParams, validation: dict[str, Any] | None, allow_unvalidated: bool
) -> Verdict:
    """Check what is required of every version, a first champion included: validation and floors.

    Args:
        validation: result of validating its data ({"passed": bool, "reasons": [...]}); None: not on record.
        allow_unvalidated: accept None.
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
    if validation is None and not allow_unvalidated:
        verdict.reasons.append("unvalidated: no validation of its data is on record")
    if validation is not None and not validation.get("passed"):
        reasons = "; ".join(validation.get("reasons", [])) or "no reason on record"
        verdict.reasons.append(f"failed validation: {reasons}")
    for name, floor in rule.floors.items():
        # A slice is a tag of an item; `all` is every item.
        rows = [i for i, item_slices in enumerate(challenger.slices) if name == ALL or name in item_slices]
        value = challenger.value(rows) if rows else float("nan")
        is_finite = bool(np.isfinite(value))
        # NaN meets no floor.
        met = is_finite and (value <= floor if rule.direction == "lower" else value >= floor)
        rounded = round(value, 4) if is_finite else None
        verdict.numbers["floors"].append({"slice": name, "n": len(rows), "floor": floor, "value": rounded, "met": met})
        if not rows:
            verdict.reasons.append(f"floor: no test item is in the slice {name}")
        elif not met:
            relation = "above" if rule.direction == "lower" else "below"
            verdict.reasons.append(f"floor: {challenger.metric} {value:.2f} of {name} is {relation} {floor:g}")
    return verdict


def check_size(challenger: Measurement, min_images: int) -> Verdict:
    """Check that the test has enough images (NLVR: sentences) to conclude anything from it."""
    count = len(set(challenger.evidence.groups))
    if count >= min_images:
        return Verdict()
    reason = (
        f"too few images: the test has {count} and needs {min_images} (`promotion.min_images`); fewer cannot show "
        "whether a model is good"
    )
    return Verdict(reasons=[reason], conclusive=False)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline's value of the gate's metric on one dataset, and the version's own value on the same n items."""

    name: str
    dataset: str
    value: float
    own: float  # a column of the ledger's decisions; plain-ok
    n: int


def find_baselines(records: Sequence[Mapping[str, Any]], spec: MetricSpec, names: Sequence[str]) -> list[Baseline]:
    """Return the baselines of these names on the metric, split and datasets of `spec`.

    Both sides are scored without the images that have a near-duplicate in the training data, which a nearest neighbor
    finds and a model remembers. Images with a seen sentence stay: short sentences recur, and the rest of the test would
    be its unusual part. If fewer than 20 items remain, and in versions that were registered earlier, it is the whole
    test.

    Args:
        records: of the version's scores.json.
    """
    baselines = []
    for record in records:
        if record["metric"] != spec.metric or record["split"] != spec.split or record["value"] is None:
            continue
        if spec.datasets and record["dataset"] not in spec.datasets:
            continue
        unseen = (record.get("leakage") or {}).get("without_images") or {}
        for name in [name for name in record["baselines"] if name in names]:
            scored = unseen if name in unseen.get("baselines", ()) else record
            value = scored["baselines"][name]
            baselines.append(
                Baseline(
                    name=name,
                    dataset=record["dataset"],
                    value=value["value"] if isinstance(value, dict) else value,
                    own=scored["value"],
                    n=scored["n"],
                )
            )
    return baselines


def check_baselines(baselines: Sequence[Baseline], rule: GateParams, spec: MetricSpec) -> Verdict:
    """Check that a first champion is better than every simple baseline, on every dataset."""
    sign = -1.0 if rule.direction == "lower" else 1.0
    # A tie is a loss: a first champion has to be better.
    lost = [baseline for baseline in baselines if sign * (baseline.own - baseline.value) <= 0]
    reasons = [
        f"baseline: {spec.metric} {baseline.own:.2f} on {baseline.dataset} {spec.split} is not better than "
        f"{baseline.value:.2f}, which the {baseline.name} baseline has on the same {baseline.n:,} items"
        for baseline in lost
    ]
    numbers = [{**vars(baseline), "met": baseline not in lost} for baseline in baselines]
    return Verdict(reasons=reasons, numbers={"baselines": numbers})


def compare_to_champion(
    challenger: Measurement,
    champion: Measurement,
    rule: GateParams,
    params: PromotionParams,
    *,
    alpha: float | None = None,
    other_seeds: tuple[Sequence[Measurement], Sequence[Measurement]] = ((), ()),
    pooled: tuple[float, int] = (0.0, 0),
) -> Verdict:
    """Compare with the champion on the same items; if runs of other seeds exist, compare variant with variant.

    Args:
        alpha: allowed probability of promoting what is no better; default: 1 - `rule.confidence`.
        other_seeds: other runs of the challenger's variant, and of the champion's.
        pooled: squared deviations of the runs of other variants, and their degrees of freedom (`pool_deviations`).

    Raises:
        NotComparableError: other test data or another scorer.
    """
    alpha = 1 - rule.confidence if alpha is None else alpha
    challenger_runs, champion_runs = [challenger, *other_seeds[0]], [champion, *other_seeds[1]]
    # All runs of both sides, because their items are paired.
    for other in (*champion_runs, *other_seeds[0]):
        check_comparable(challenger, other)
    sign = -1.0 if rule.direction == "lower" else 1.0
    metric, relevant = challenger.metric, rule.relevant_gain_of(challenger.metric)
    version_gain = sign * (challenger.value() - champion.value())
    numbers: dict[str, Any] = {
        "champion_value": round(champion.value(), 4),
        "gain": round(version_gain, 4),
        "min_gain": rule.min_gain,
        "relevant_gain": relevant,
        "confidence": rule.confidence,
        "power": POWER,
        "runs": len(challenger_runs),
        "champion_runs": len(champion_runs),
    }
    gain = gain_over_seeds(
        [run.evidence for run in challenger_runs],
        [run.evidence for run in champion_runs],
        seed_std=rule.seed_std_of(metric),
        # So many that ten of them are beyond an allowed error, however small.
        resamples=max(params.resamples, math.ceil(10 / alpha)),
        seed=params.seed,
        sign=sign,
        pooled=pooled,
    )
    if gain is None:
        reason = "no confidence: fewer than two images to resample"
        return Verdict(reasons=[reason], numbers=numbers, conclusive=False)
    # One-sided at each end: the gain is below `low` with probability alpha at most, and above `high` likewise.
    low, high = gain.interval(alpha, rule.min_gain)
    p, detectable = gain.p_value(rule.min_gain), gain.detectable(rule.min_gain, alpha, POWER)
    numbers |= {
        "variant_gain": round(gain.value, 4),
        "p": float(f"{p:.4g}"),
        "gain_low": round(low, 4),
        "gain_high": round(high, 4),
        "detectable": round(detectable, 4),
        "std_items": round(gain.items, 4),
        "std_seeds": round(gain.seeds, 4),
        "seed_std": None if gain.seed_std is None else round(gain.seed_std, 4),
    }
    # Both point estimates must exceed min_gain as well: a better variant does not make this one version better.
    if p <= alpha and min(gain.value, version_gain) > rule.min_gain:
        return Verdict(numbers=numbers)
    variants = ""
    if len(challenger_runs) + len(champion_runs) > 2:
        variants = f", its variant over {len(challenger_runs)} vs {len(champion_runs)} seeds {gain.value:+.2f}"
    comparison = (
        f"gain: {metric} {challenger.value():.2f} vs the champion's {champion.value():.2f}: {version_gain:+.2f}"
        f"{variants} ({low:+.2f} to {high:+.2f})"
    )
    # Shown over the variant's seeds, but not by this version's own value: evidence against the version.
    if p <= alpha:
        return Verdict(reasons=[f"{comparison}: the variant is better, this version of it is not"], numbers=numbers)
    # The whole interval is below a gain that would matter, which is conclusive.
    if high < relevant:
        return Verdict(reasons=[f"{comparison}: a gain of {relevant:g} or more is ruled out"], numbers=numbers)
    numbers["limited_by"] = "seeds" if gain.seeds > gain.items else "items"
    return Verdict(
        reasons=[
            f"{comparison}: a gain above {rule.min_gain:g} is not shown, and one of {relevant:g} is not ruled out. "
            f"Minimum detectable gain ({POWER:.0%} power): {detectable:.2f}, limited by the number of "
            f"{numbers['limited_by']}"
        ],
        numbers=numbers,
        conclusive=False,
    )


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """What the runs of past variants show of the deviation over seeds, on the same test.

    squares, degrees: squared deviations from each variant's mean, and their degrees of freedom; 0 if they are not used.
    variants: how many were used. reason: why past variants are not used; empty if they are, or there are none.
    """

    squares: float = 0.0
    degrees: int = 0
    variants: int = 0
    reason: str = ""

    def numbers(self) -> dict[str, Any]:
        numbers = {"pooled_variants": self.variants, "pooled_degrees": self.degrees}
        return numbers | ({"not_pooled": self.reason} if self.reason else {})


def pool_deviations(compared: Sequence[Sequence[Measurement]], past: Sequence[Sequence[Measurement]]) -> Pooled:
    """Pool the deviations over seeds of past variants, if the compared ones do not vary more.

    That variants vary alike is an assumption. If the compared ones vary less, it costs power; if they vary more, false
    promotions. So the latter is tested; few runs show only large differences.

    Args:
        compared, past: the runs of each variant.
    """
    from scipy.stats import f  # half a second

    def deviations(variants: Sequence[Sequence[Measurement]]) -> tuple[float, int]:
        values = [np.array([run.value() for run in runs]) for runs in variants]
        squares = sum(float(((values_R - values_R.mean()) ** 2).sum()) for values_R in values)
        return squares, sum(len(values_R) - 1 for values_R in values)

    squares, degrees = deviations(past)
    compared_squares, compared_degrees = deviations(compared)
    # With one run a side the assumption cannot be tested.
    if not degrees or not compared_degrees:
        return Pooled()
    ratio = float(f.isf(ALIKE, compared_degrees, degrees))
    if compared_squares / compared_degrees > ratio * squares / degrees:
        stds = [math.sqrt(compared_squares / compared_degrees), math.sqrt(squares / degrees)]
        reason = f"the compared variants deviate by {stds[0]:.2f} over seeds, {len(past)} past ones by {stds[1]:.2f}"
        return Pooled(reason=reason)
    return Pooled(squares=squares, degrees=degrees, variants=len(past))


def check_non_inferior(challenger: Measurement, champion: Measurement, rule: GateParams) -> Verdict:
    """Check a version with the champion's own weights (its serving was fixed): no gain is required, but no loss either.

    Raises:
        NotComparableError: other test data or another scorer.
    """
    check_comparable(challenger, champion)
    value = (-1.0 if rule.direction == "lower" else 1.0) * (challenger.value() - champion.value())
    numbers = {"champion_value": round(champion.value(), 4), "gain": round(value, 4), "same_weights": True}
    if value >= 0:
        return Verdict(numbers=numbers)
    reason = (
        f"loss: {challenger.metric} {challenger.value():.2f} with the champion's own weights, which had "
        f"{champion.value():.2f}"
    )
    return Verdict(reasons=[reason], numbers=numbers)


def check_comparable(challenger: Measurement, champion: Measurement) -> None:
    """Check that both were measured on the same items by the same scorer.

    Raises:
        NotComparableError: names what differs.
    """
    if challenger.test != champion.test:
        raise NotComparableError(f"the test data differ: {challenger.test} here, the champion's {champion.test}")
    if challenger.scorer != champion.scorer:
        raise NotComparableError(
            f"the scorers differ: `{challenger.scorer or 'plain'}` here, the champion's `{champion.scorer or 'plain'}`"
        )
    # Sorted: the order of the items does not matter, but each must be in the same group (image).
    items = [sorted(zip(s.evidence.items, s.evidence.groups, strict=True)) for s in (challenger, champion)]
    if items[0] != items[1]:
        raise NotComparableError("the two were not scored on the same items")
    # K, the number of additive statistics per item.
    width = champion.evidence.parts_NK.shape[1]
    if challenger.evidence.parts_NK.shape[1] != width:
        raise NotComparableError("the two were scored by different statistics")
