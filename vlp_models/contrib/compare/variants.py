"""The report's comparison of variants: all pairs of each table of results, by the metric of the gate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vlp_models.common.pages import page_environment
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.compare.scored import mean_value
from vlp_models.errors import DataError
from vlp_models.evaluation.report import ReportContext, Section
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.gain import LEVEL, gain_over_seeds
from vlp_models.metrics.score import Evidence, ItemScores
from vlp_models.registry.promotion.gate_rule import gate_rule
from vlp_models.tasks.scoring import read_item_scores

Record = Mapping[str, Any]
ITEMS = "items.parquet"
SEED = 1
RESAMPLES_PER_PAIR = 100  # at least: the smallest p, 2 / resamples, must stay below 5% after Holm's correction
COMPARED_SHOWN = 6  # pairs before the table is folded


def variants(context: ReportContext) -> Section:
    """Return the pairs of variants of each table of results."""
    template = page_environment(__package__).get_template("variants.html.j2")
    tables: dict[tuple[str, str, str], list[Record]] = {}
    for record in context.records:
        tables.setdefault((record["task"], record["dataset"], record["split"]), []).append(record)
    in_tables = {}
    for key, records in tables.items():
        rule = gate_rule(context.params, key[0])
        comparison = compare(
            context.workspace, records, rule.metric, rule.direction, resamples=context.params.evaluate.bootstrap
        )
        if comparison:
            html = template.render(c=comparison, COMPARED_SHOWN=COMPARED_SHOWN)
            in_tables[key] = Markup(html)
    return Section(in_tables=in_tables)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """a - b in the metric's unit. low, high and p are None with fewer than `MIN_GROUPS` groups.

    low, high  the 95% interval
    p          two-sided
    p_holm     p with Holm's correction for all pairs compared together
    seeds      of a and of b; if both have 1, the interval is over items only
    """

    a: str
    b: str
    value: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    seeds: tuple[int, int]

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p is below 5%; otherwise the pair is inconclusive."""
        return self.p_holm is not None and self.p_holm < 1 - LEVEL


def compare_variants(variants: Mapping[str, Sequence[Evidence]], *, resamples: int, seed: int) -> list[Difference]:
    """Compare all pairs of variants, in the mapping's order; none is significant with fewer than `MIN_GROUPS` groups.

    Args:
        variants: name -> the evidence of each seed, all measured on the same groups.

    Raises:
        ValueError: the runs were not measured on the same groups, or a variant has no run.
    """
    pairs = list(itertools.combinations(variants, 2))
    measured = [
        gain_over_seeds(variants[a], variants[b], seed_std=0.0, resamples=resamples, seed=seed) for a, b in pairs
    ]
    # None: a pair without an interval, which Holm's correction does not count.
    usable = [gain if gain is not None and gain.groups >= MIN_GROUPS and gain.is_finite else None for gain in measured]
    ps = [None if gain is None else gain.two_sided_p() for gain in usable]
    corrected = iter(holm([p for p in ps if p is not None]))
    differences = []
    for (a, b), gain, p in zip(pairs, usable, ps, strict=True):
        low, high = (None, None) if gain is None else gain.interval((1 - LEVEL) / 2)
        differences.append(
            Difference(
                a=a,
                b=b,
                value=mean_value(variants[a]) - mean_value(variants[b]),
                low=low,
                high=high,
                p=p,
                p_holm=None if p is None else next(corrected),
                seeds=(len(variants[a]), len(variants[b])),
            )
        )
    return differences


def holm(ps: Sequence[float]) -> list[float]:
    """Apply Holm's step-down correction (1979), keeping the order.

    Calling every corrected p below alpha a difference keeps the probability of any false one below alpha.
    """
    corrected = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        # The smallest p times the number of tests, the next times one less, and never less than the one before.
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All pairs of a table's variants by one metric. left_out: runs that cannot be compared, with the reason."""

    metric: str
    direction: str
    pairs: Sequence[Difference]
    left_out: Sequence[str]

    def verdict(self, pair: Difference) -> str:
        """Return which variant is better, or `inconclusive`."""
        if not pair.is_significant:
            return "inconclusive"
        # Above 0: a has the higher value.
        better = pair.a if (pair.value > 0) == (self.direction == "higher") else pair.b
        return f"{better} is better"

    def describe_interval(self, pair: Difference) -> str:
        """Return what the interval covers: items, or items and seeds."""
        if pair.low is None:
            return "no interval: too few images"
        if sum(pair.seeds) > 2:
            return f"items and seeds ({pair.seeds[0]} and {pair.seeds[1]})"
        return f"items only ({pair.seeds[0]} and {pair.seeds[1]} seeds)"


def compare(
    workspace: Workspace, records: Sequence[Record], metric: str, direction: str, *, resamples: int
) -> Comparison | None:
    """Compare all pairs of variants of one task, dataset and split by one metric, from their scores per item.

    None with fewer than two variants. Text-only controls are not compared.
    """
    runs: dict[str, list[str]] = {}
    # variant -> its runs, which differ in their seeds
    for record in records:
        if record["metric"] == metric and record["value"] is not None and not record["control"]:
            runs.setdefault(record["variant"], []).append(record["run"])
    if len(runs) < 2:
        return None
    dataset, split = records[0]["dataset"], records[0]["split"]
    reference: ItemScores | None = None  # the first readable scores; all others must be of the same test items
    variants, left_out = {}, []
    for variant, names in runs.items():
        evidence = []
        for name in names:
            scores = _read_scores(workspace, name, (dataset, split, metric), reference)
            if isinstance(scores, str):
                left_out.append(f"{name}: {scores}")
            else:
                reference = reference or scores
                evidence.append(scores.evidence())
        if evidence:
            variants[variant] = evidence
    # The smallest p that resampling can give must be small enough for the correction for all pairs.
    pair_count = len(variants) * (len(variants) - 1) // 2
    pairs = compare_variants(variants, resamples=max(resamples, pair_count * RESAMPLES_PER_PAIR), seed=SEED)
    return Comparison(metric=metric, direction=direction, pairs=pairs, left_out=left_out)


def _read_scores(
    workspace: Workspace, run: str, test: tuple[str, str, str], reference: ItemScores | None
) -> ItemScores | str:
    """Return the run's scores per item, or why there are none, or why they are not comparable with the reference.

    Args:
        test: dataset, split and metric.
    """
    try:
        items = read_item_scores(workspace.evaluation(run) / ITEMS)
    except DataError as error:
        return str(error)
    for scores in items:
        if (scores.dataset, scores.split, scores.metric) != test or not len(scores.items):
            continue
        if reference is None:
            return scores
        # Item ids in any order: the comparison pairs sums per group of items.
        if scores.test != reference.test or sorted(scores.items) != sorted(reference.items):
            return "measured on another test"
        if (scores.note, scores.statistic) != (reference.note, reference.statistic):
            return f"scored differently ({scores.note or 'default'} instead of {reference.note or 'default'})"
        return scores
    return "no scores per item"
