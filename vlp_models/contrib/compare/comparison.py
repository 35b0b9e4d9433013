"""Paired comparison of models: a baseline and its challengers, over items, clusters and seeds.

Each challenger is compared with the baseline on the same items. The test is the promotion gate's, over clusters, and
over seeds where runs of several are given (metrics/gain.py). p is two-sided and corrected by Holm's method over all
comparisons made together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlp_models.contrib.compare.read import read_runs
from vlp_models.contrib.compare.scored import Columns, Run
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.gain import Gain, gain_over_seeds
from vlp_models.metrics.score import Evidence

Verdict = Literal["promote", "keep", "inconclusive"]
POWER = 0.8
SHOWN = 10  # items named in a message

Files = Sequence[str | Path] | Mapping[str, str | Path | Sequence[str | Path]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    metrics          names; empty: the only one that all files have
    lower_is_better  a loss, an error rate, ...
    relevant         the smallest gain that matters, in the metric's unit
    seed_std         known standard deviation of a run over seeds; 0: estimated, where there are several runs
    confidence       of the intervals, and 1 - the error allowed to all verdicts together
    common           compare on the items that all files have, and list the others
    """

    metrics: tuple[str, ...] = ()
    lower_is_better: bool = False
    relevant: float = 0.0
    seed_std: float = 0.0
    confidence: float = 0.95
    resamples: int = 10_000
    seed: int = 0
    common: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One challenger against the baseline, by one metric. Gains are positive if the challenger is better.

    low, high    interval of the gain; None with fewer than 20 clusters
    p, p_holm    two-sided, alone and corrected for all comparisons
    detectable   the smallest gain that this test finds with 80% power, corrected for all comparisons (Bonferroni)
    """

    metric: str
    challenger: str
    baseline_value: float
    value: float
    gain: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None
    verdict: Verdict = "inconclusive"
    reason: str = ""
    items: int
    clusters: int
    runs: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """left_out: file, seed and metric -> items that other files lack, and that were therefore not compared."""

    baseline: str
    rows: tuple[Row, ...]
    runs: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]
    settings: Settings

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return dataclasses.asdict(self)


def compare(files: Files, *, columns: Columns = Columns(), **settings: Any) -> Comparison:
    """Compare the models of result files; the first is the baseline.

    Args:
        files: paths (`NAME=PATH` names a model), or model -> path or paths. Files of one model are its seeds.
        columns: of tables and samples, where they have names of their own.
        settings: see `Settings`.

    Raises:
        DataError: a file is not readable, or the files cannot be compared; the message names what differs.
    """
    runs: list[Run] = []
    for name, path in _named(files):
        for run in read_runs(path, name, columns):
            # Two files that name the same model are its seeds only if both state a seed; a stated name settles it.
            for other in runs if not name else ():
                same_model = other.model == run.model and other.source != run.source
                if same_model and not (run.seed and other.seed):
                    raise DataError(
                        f"{other.source} and {run.source} are both called {run.model}; name them: NAME=PATH"
                    )
            runs.append(run)
    if isinstance(settings.get("metrics"), str):
        settings["metrics"] = (settings["metrics"],)
    return compare_runs(runs, Settings(**settings))


def _named(files: Files) -> Iterable[tuple[str, Path]]:
    if isinstance(files, Mapping):
        for name, paths in files.items():
            for path in [paths] if isinstance(paths, str | Path) else paths:
                yield name, Path(path)
        return
    for file in files:
        name, equals, path = str(file).partition("=")
        # A path may contain `=` itself: a file that exists under the whole text is not NAME=PATH.
        yield (name, Path(path)) if equals and not Path(str(file)).exists() else ("", Path(file))


def compare_runs(runs: Sequence[Run], settings: Settings = Settings()) -> Comparison:
    """Compare models by their runs; the model of the first run is the baseline.

    Raises:
        DataError: fewer than two models, no metric or no item in common, or the same item differs.
    """
    models: dict[str, list[Run]] = {}
    for run in runs:
        models.setdefault(run.model, []).append(run)
    if len(models) < 2:
        raise DataError(f"two models are needed; there is {', '.join(models) or 'none'}. Name them: NAME=PATH")
    # Dictionaries keep their order: the model of the first run is the baseline.
    baseline, *challengers = models
    if not (settings.seed_std >= 0 and settings.relevant >= 0):
        raise DataError("--seed-std and --relevant must be numbers of zero or more")
    if not 0.5 <= settings.confidence < 1:
        raise DataError(f"confidence {settings.confidence:g}: must be at least 0.5 and less than 1")
    metrics = _metrics(runs, settings.metrics)
    comparisons = len(metrics) * len(challengers)
    # The smallest p of a resampling is about 2 / resamples, and Holm multiplies it by the comparisons.
    if settings.resamples < (needed := int(2 * comparisons / (1 - settings.confidence)) + 1):
        raise DataError(
            f"{settings.resamples:,} resamples cannot show anything at this confidence: {needed:,} are needed"
        )
    pairs: list[tuple[Row, Gain | None]] = []  # not judged yet; gain: None with fewer than two clusters
    left_out: dict[str, tuple[str, ...]] = {}
    equal_seeds: list[str] = []
    # All models are compared on the same items in the same order, metric by metric.
    for metric in metrics:
        evidence, missing = _pair(runs, metric, settings)
        equal_seeds += _check_seeds(runs, evidence, metric)
        for run, items in zip(runs, missing, strict=True):
            if items:
                left_out[_describe(run) + (f", {metric}" if len(metrics) > 1 else "")] = items
        by_model = {model: [evidence[i] for i, run in enumerate(runs) if run.model == model] for model in models}
        before = _value(by_model[baseline])
        for challenger in challengers:
            value = _value(by_model[challenger])
            gain = gain_over_seeds(
                by_model[challenger],
                by_model[baseline],
                seed_std=settings.seed_std,
                resamples=settings.resamples,
                seed=settings.seed,
                sign=-1.0 if settings.lower_is_better else 1.0,
            )
            row = Row(
                metric=metric,
                challenger=challenger,
                baseline_value=before,
                value=value,
                gain=before - value if settings.lower_is_better else value - before,
                items=len(evidence[0].items),
                clusters=len(set(evidence[0].groups)),
                # (runs of the baseline, runs of the challenger)
                runs=(len(by_model[baseline]), len(by_model[challenger])),
            )
            pairs.append((row, gain))
    # Holm corrects all comparisons together, so the verdicts come after all gains.
    ps = [gain.two_sided_p() if gain and gain.is_finite and row.clusters >= MIN_GROUPS else None for row, gain in pairs]
    corrected = iter(holm([p for p in ps if p is not None]))
    rows = []
    for (row, gain), p in zip(pairs, ps, strict=True):
        # `corrected` lacks the rows without a p, so it is advanced only for the others.
        p_holm = None if p is None else next(corrected)
        rows.append(_judge(dataclasses.replace(row, p=p, p_holm=p_holm), gain, comparisons, settings))
    return Comparison(
        baseline=baseline,
        rows=tuple(rows),
        runs={model: tuple(map(_describe, its_runs)) for model, its_runs in models.items()},
        notes=(*_notes(models, rows, settings), *equal_seeds),
        left_out=left_out,
        settings=settings,
    )


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


def _judge(row: Row, gain: Gain | None, comparisons: int, settings: Settings) -> Row:
    """Return the row with its interval and verdict. Both directions and all comparisons share the allowed error."""
    alpha = (1 - settings.confidence) / 2
    if gain is None or gain.groups < MIN_GROUPS:
        return dataclasses.replace(row, reason=f"fewer than {MIN_GROUPS} clusters: no interval would hold")
    if row.p_holm is None:
        return dataclasses.replace(row, reason="not finite in some resamples")
    # All resampled differences are 0: no interval can be drawn from them.
    if not np.any(gain.bootstrap_S):
        reason = "the same scores on all items: nothing to estimate a difference from"
        return dataclasses.replace(row, reason=reason)
    # A verdict needs both: a corrected p, and an interval on one side of zero.
    low, high = gain.interval(alpha)
    certain = row.p_holm <= 1 - settings.confidence
    verdict: Verdict = "inconclusive"
    if certain and row.gain > 0 and low > 0:
        verdict, reason = "promote", "better"
    elif certain and row.gain < 0 and high < 0:
        verdict, reason = "keep", "worse"
    elif settings.relevant > 0 and gain.interval(alpha / comparisons)[1] < settings.relevant:
        verdict, reason = "keep", f"a gain of {settings.relevant:g} or more is ruled out"
    else:
        limit = "seeds" if gain.seeds > gain.items else "items"
        reason = f"neither better nor worse is shown; more {limit} would help most"
    detectable = gain.detectable(0.0, alpha / comparisons, POWER)
    return dataclasses.replace(row, low=low, high=high, detectable=detectable, verdict=verdict, reason=reason)


def _check_seeds(runs: Sequence[Run], evidence: Sequence[Evidence], metric: str) -> list[str]:
    """Return a note for every two runs of a model with different seeds, but equal scores."""
    notes = []
    for (a, evidence_a), (b, evidence_b) in itertools.combinations(zip(runs, evidence, strict=True), 2):
        if a.model != b.model:
            continue
        both = f"{_describe(a)} and {_describe(b)}"
        if a.seed and a.seed == b.seed:
            raise DataError(f"{both}: two runs of {a.model} with the seed {a.seed}, not two seeds")
        # Equal scores on all items: without stated seeds this is most likely one file, passed twice.
        if np.array_equal(evidence_a.parts_NK, evidence_b.parts_NK):
            if not (a.seed and b.seed):
                raise DataError(f"{both}: two runs of {a.model} with the same scores on every item, not two seeds")
            notes.append(f"{both}: the same {metric} on every item, although the seeds differ")
    return notes


def _metrics(runs: Sequence[Run], chosen: Sequence[str]) -> Sequence[str]:
    """Return the metrics to compare by: the chosen ones, or the only one that all runs have."""
    common = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    if chosen:
        for name in chosen:
            for run in runs:
                if name not in run.metrics:
                    raise DataError(f"{run.source}: no metric {name}; it has: {'; '.join(run.metrics)}")
        # `dict.fromkeys` drops repeated names and keeps their order.
        return list(dict.fromkeys(chosen))
    if not common:
        has = ". ".join(f"{run.source}: {'; '.join(run.metrics)}" for run in runs)
        raise DataError(f"the files have no metric in common. {has}")
    if len(common) > 1:
        raise DataError(f"the files have several metrics; choose with --metric: {'; '.join(common)}")
    return common


def _pair(runs: Sequence[Run], metric: str, settings: Settings) -> tuple[list[Evidence], list[tuple[str, ...]]]:
    """Return the evidence of each run on the same items in the same order, and the items left out of each."""
    scored = [run.metrics[metric] for run in runs]
    shared = set(scored[0].items).intersection(*(scores.items for scores in scored[1:]))
    missing = [tuple(item for item in scores.items if item not in shared) for scores in scored]
    if not shared:
        names = "; ".join(f"{_describe(run)}: {_some(list(run.metrics[metric].items))}" for run in runs)
        raise DataError(f"the files have no item in common ({names}); --item names the column that identifies one")
    if any(missing) and not settings.common:
        unpaired = [(run, items) for run, items in zip(runs, missing, strict=True) if items]
        lists = "; ".join(f"{len(items):,} scored only in {_describe(run)}: {_some(items)}" for run, items in unpaired)
        why = "".join(f" {run.source}: {note}." for run in runs for note in run.notes if "left out" in note)
        raise DataError(f"the files have different items ({lists}).{why} --common compares the {len(shared):,} common")
    # The order of the first run; all others are sorted into it.
    order = [item for item in scored[0].items if item in shared]
    derived = any(scores.derived for scores in scored)
    evidence: list[Evidence] = []
    for run, scores in zip(runs, scored, strict=True):
        row_of = {item: i for i, item in enumerate(scores.items)}
        # Row of each item in this file: files list the same items in different orders.
        rows = [row_of[item] for item in order]
        groups = [scores.clusters[i] for i in rows]
        if derived:  # each file names a cluster after one of its items: rename it after the first of the common order
            first_of: dict[str, str] = {}
            groups = [first_of.setdefault(cluster, item) for cluster, item in zip(groups, order, strict=True)]
        paired = Evidence(groups=groups, parts_NK=scores.parts_NK[rows], statistic=scores.statistic, items=order)
        evidence.append(paired)
        # Every run is compared with the first one, so all of them agree with each other.
        _check_same(runs[0], run, metric, evidence[0], paired)
    return evidence, missing


def _check_same(a: Run, b: Run, metric: str, evidence_a: Evidence, evidence_b: Evidence) -> None:
    """Refuse two files whose common items differ in content, clusters or statistic."""
    documents = b.metrics[metric].documents
    for name, document in a.metrics[metric].documents.items():
        # An item that only one file has is not a difference; the name "" stands for the test set as a whole.
        if documents.get(name, document) != document:
            difference = f"item {name} has other contents" if name else "another test set or another scorer"
            raise DataError(f"{b.source}: {difference} than in {a.source}")
    clusters = zip(evidence_a.items, evidence_a.groups, evidence_b.groups, strict=True)
    if differ := [item for item, cluster_a, cluster_b in clusters if cluster_a != cluster_b]:
        for run, evidence, other in ((a, evidence_a, b), (b, evidence_b, a)):
            # Each item is its own group: this file has no clusters.
            if list(evidence.groups) == list(evidence.items):
                raise DataError(
                    f"{run.source}: no clusters, although {other.source} has some. --cluster names a "
                    "column of both; with the name of the items' column, each item counts by itself"
                )
        raise DataError(f"{b.source}: {len(differ):,} items are in other clusters than in {a.source}: {_some(differ)}")
    if evidence_a.parts_NK.shape[1] != evidence_b.parts_NK.shape[1]:
        raise DataError(f"{b.source}: scored by another statistic than {a.source}")


def _notes(models: Mapping[str, Sequence[Run]], rows: Sequence[Row], settings: Settings) -> Iterable[str]:
    """Yield what a reader must know to believe the table."""
    # note -> the files it holds for; a note on all of them is printed without their names.
    noted: dict[str, list[str]] = {}
    for run in itertools.chain.from_iterable(models.values()):
        for note in run.notes:
            noted.setdefault(note, []).append(str(run.source))
    every = sum(len(runs) for runs in models.values())
    for note, sources in noted.items():
        yield note if len(sources) == every else f"{note} ({', '.join(sources)})"
    single = list(dict.fromkeys(row.challenger for row in rows if row.runs == (1, 1)))
    if settings.seed_std == 0 and single:
        yield (
            f"one run of {', '.join(single)} and of the baseline, and no --seed-std: the verdict is about these runs; "
            "another seed of either model may score otherwise"
        )
    if len(rows) > 1:
        yield f"p, verdicts and detectable gains are corrected for {len(rows)} comparisons (Holm, Bonferroni)"


def _describe(run: Run) -> str:
    return f"{run.source}, seed {run.seed}" if run.seed else str(run.source)


def _value(runs: Sequence[Evidence]) -> float:
    # (N, K) -> (1, K): the statistic of the sums over all items; then the mean over runs.
    return float(np.mean([float(run.statistic(run.parts_NK.sum(axis=0, keepdims=True))[0]) for run in runs]))


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:SHOWN]) + (", ..." if len(items) > SHOWN else "")
