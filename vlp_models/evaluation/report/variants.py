"""Designs side by side: runs that differ in their seeds alone are one row, and pairs of rows are compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.evaluation.report.records import COSTS, Record
from vlp_models.metrics.bootstrap import Difference, differences
from vlp_models.metrics.score import ItemScores
from vlp_models.tasks.scoring import read_item_scores

ITEMS = "items.parquet"
SEED = 1
RESAMPLES_A_PAIR = 100  # at least: the smallest p, 2 / resamples, must stay below 5% after Holm's correction


@dataclass(frozen=True, kw_only=True)
class DesignRow:
    """One metric of one design: the mean over its seeds.

    low, high  with one seed: the interval over items. With several: the lowest and the highest seed's value
    deviation  standard deviation over seeds; None with one seed
    records    of its runs; the costs and baselines are those of their mean
    """

    metric: str
    variant: str
    model: str
    runs: tuple[str, ...]
    control: bool
    value: float
    low: float | None
    high: float | None
    deviation: float | None
    baselines: dict[str, float]
    n: int
    costs: dict[str, float | None]

    @property
    def seeds(self) -> int:
        return len(self.runs)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All pairs of a table's designs by one metric. left_out: designs that are not among them, with the reason."""

    metric: str
    direction: str
    pairs: Sequence[Difference]
    left_out: Sequence[str]

    def verdict(self, pair: Difference) -> str:
        if not pair.told_apart:
            return "cannot tell"
        better = pair.a if (pair.value > 0) == (self.direction == "higher") else pair.b
        return f"{better} is better"

    def over(self, pair: Difference) -> str:
        """What the interval is over, in words."""
        if pair.low is None:
            return "no interval: too few images"
        if pair.over_seeds:
            return f"items and seeds ({pair.seeds[0]} and {pair.seeds[1]})"
        return f"items alone ({pair.seeds[0]} and {pair.seeds[1]} seeds)"


def design_rows(records: Sequence[Record]) -> list[DesignRow]:
    """The records of one task, dataset and split, by metric and design; those without a value are left out."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["value"] is not None:
            groups.setdefault((record["metric"], record["variant"]), []).append(record)
    order = list(dict.fromkeys(record["metric"] for record in records))
    rows = [_row(metric, design, own) for (metric, design), own in groups.items()]
    return sorted(rows, key=lambda row: order.index(row.metric))


def compare(
    workspace: Workspace, records: Sequence[Record], metric: str, direction: str, *, resamples: int
) -> Comparison | None:
    """The designs of one task, dataset and split in pairs, by one metric, from their scores per item.

    None with fewer than two designs. Text-only controls are not among them.
    """
    runs: dict[str, list[str]] = {}
    for record in records:
        if record["metric"] == metric and record["value"] is not None and not record["control"]:
            runs.setdefault(record["variant"], []).append(record["run"])
    if len(runs) < 2:
        return None
    dataset, split = records[0]["dataset"], records[0]["split"]
    reference: ItemScores | None = None
    designs, left_out = {}, []
    for design, names in runs.items():
        evidence = []
        for name in names:
            found = _scores(workspace, name, dataset, split, metric)
            if isinstance(found, str):
                left_out.append(f"{name}: {found}")
                continue
            reference = reference or found
            if differ := _differ(found, reference):
                left_out.append(f"{name}: {differ}")
                continue
            evidence.append(found.evidence())
        if evidence:
            designs[design] = evidence
    count = len(designs) * (len(designs) - 1) // 2
    pairs = differences(designs, resamples=max(resamples, count * RESAMPLES_A_PAIR), seed=SEED)
    return Comparison(metric=metric, direction=direction, pairs=pairs, left_out=left_out)


def _scores(workspace: Workspace, run: str, dataset: str, split: str, metric: str) -> ItemScores | str:
    try:
        items = read_item_scores(workspace.evaluation(run) / ITEMS)
    except DataError as error:
        return str(error)
    found = (s for s in items if (s.dataset, s.split, s.metric) == (dataset, split, metric) and len(s.items))
    return next(found, "no scores per item")


def _differ(scores: ItemScores, reference: ItemScores) -> str:
    """Why two evaluations are not to be compared; empty: they are."""
    if scores.test != reference.test or sorted(scores.items) != sorted(reference.items):
        return "measured on another test"
    if (scores.note, scores.statistic) != (reference.note, reference.statistic):
        return f"scored otherwise ({scores.note or 'plain'}, not {reference.note or 'plain'})"
    return ""


def _row(metric: str, design: str, records: Sequence[Record]) -> DesignRow:
    values = [float(record["value"]) for record in records]
    several = len(values) > 1
    return DesignRow(
        metric=metric,
        variant=design,
        model=", ".join(dict.fromkeys(record["model"] for record in records)),
        runs=tuple(record["run"] for record in records),
        control=records[0]["control"],
        value=statistics.fmean(values),
        low=min(values) if several else records[0]["low"],
        high=max(values) if several else records[0]["high"],
        deviation=statistics.stdev(values) if several else None,
        baselines=_means([record["baselines"] for record in records]),
        n=records[0]["n"],
        costs={name: _mean([record[name] for record in records]) for name in COSTS},
    )


def _means(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the baselines that all seeds have: what blanked images give is another number with each."""
    shared = set.intersection(*(set(one) for one in several))
    return {name: statistics.fmean(one[name] for one in several) for name in sorted(shared)}


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
