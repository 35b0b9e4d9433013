"""Paired comparison of models: a baseline and its challengers, over items, clusters and seeds.

Each challenger is compared with the baseline on the same items. The test is the promotion gate's, over clusters, and
over seeds where runs of several are given (metrics/gain.py); with few clusters an exact one (exact.py). p is two-sided.

p, intervals and verdicts are corrected for all comparisons made together, by Bonferroni's method: Holm's shows a little
more, but has no intervals that agree with it and hold together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlp_models.common.progress import progress_bar
from vlp_models.contrib.compare.exact import are_right_or_wrong, exact_p
from vlp_models.contrib.compare.read import read_runs
from vlp_models.contrib.compare.scored import Columns, Run, Scored, mean_value
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS, group_rows, sum_rows
from vlp_models.metrics.gain import gain_over_seeds
from vlp_models.metrics.score import Evidence

Verdict = Literal["promote", "keep", "inconclusive"]
POWER = 0.8
SHOWN = 10  # items named in a message
EQUAL = "the same scores on all items: nothing to estimate a difference from"

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

    low, high    interval of the gain, corrected for all comparisons; None with fewer than 20 clusters
    p            two-sided; None if several runs or a deviation over seeds are to be tested on fewer than 20 clusters
    p_corrected  for all comparisons
    detectable   the smallest gain that this test finds with 80% power, corrected for all comparisons
    """

    metric: str
    challenger: str
    baseline_value: float
    value: float
    gain: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_corrected: float | None = None
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
    named = list(_named(files))
    with progress_bar("reading", len(named), "files") as progress:
        for name, path in named:
            for run in read_runs(path, name, columns):
                # Two files that name the same model are its seeds only if both state a seed; a stated name settles it.
                for other in runs if not name else ():
                    same_model = other.model == run.model and other.source != run.source
                    if same_model and not (run.seed and other.seed):
                        raise DataError(
                            f"{other.source} and {run.source} are both called {run.model}; name them: NAME=PATH"
                        )
                runs.append(run)
            progress.advance()
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
    unfinished = next((run for run in runs if run.unfinished), None)
    if unfinished and not settings.common:
        raise DataError(f"{unfinished.source}: {unfinished.unfinished}; --common compares those that it has")
    metrics = _metrics(runs, settings.metrics)
    comparisons = len(metrics) * len(challengers)
    # The smallest p of a resampling is about 2 / resamples, and it is multiplied by the comparisons.
    if settings.resamples < (needed := int(2 * comparisons / (1 - settings.confidence)) + 1):
        raise DataError(
            f"{settings.resamples:,} resamples cannot show anything at this confidence: {needed:,} are needed"
        )
    rows: list[Row] = []
    left_out: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    with progress_bar("comparing", comparisons, "comparisons") as progress:
        # All models are compared on the same items in the same order, metric by metric.
        for metric in metrics:
            scored, missing, differences = _pair(runs, metric, settings)
            notes += [*differences, *_check_seeds(runs, scored, metric)]
            for run, items in zip(runs, missing, strict=True):
                if items:
                    left_out[_describe(run) + (f", {metric}" if len(metrics) > 1 else "")] = items
            evidence = _by_cluster(scored)
            by_model = {model: [evidence[i] for i, run in enumerate(runs) if run.model == model] for model in models}
            before = mean_value(by_model[baseline])
            for challenger in challengers:
                value = mean_value(by_model[challenger])
                row = Row(
                    metric=metric,
                    challenger=challenger,
                    baseline_value=before,
                    value=value,
                    gain=before - value if settings.lower_is_better else value - before,
                    items=len(scored[0].items),
                    clusters=len(evidence[0].groups),
                    # (runs of the baseline, runs of the challenger)
                    runs=(len(by_model[baseline]), len(by_model[challenger])),
                )
                rows.append(_test(row, by_model[challenger], by_model[baseline], comparisons, settings))
                progress.advance()
            notes += _equal_challengers(runs, scored, challengers, metric)
    return Comparison(
        baseline=baseline,
        rows=tuple(rows),
        runs={model: tuple(map(_describe, its_runs)) for model, its_runs in models.items()},
        notes=(*_notes(models, rows, settings), *notes),
        left_out=left_out,
        settings=settings,
    )


def _by_cluster(scored: Sequence[Scored]) -> list[Evidence]:
    """Return the evidence of each run, summed within each cluster."""
    names, rows_N = group_rows(scored[0].clusters)  # the same for all runs, which are on the same items
    return [
        Evidence(groups=names, parts_NK=sum_rows(scores.parts_NK, rows_N, len(names)), statistic=scores.statistic)
        for scores in scored
    ]


def _test(
    row: Row, runs_a: Sequence[Evidence], runs_b: Sequence[Evidence], comparisons: int, settings: Settings
) -> Row:
    """Return the row with p, interval and verdict. Both directions and all comparisons share the allowed error.

    Args:
        runs_a, runs_b: the evidence of the challenger's and of the baseline's runs, by cluster.
    """
    if row.clusters < MIN_GROUPS:
        return _test_few(row, runs_a, runs_b, comparisons, settings)
    gain = gain_over_seeds(
        runs_a,
        runs_b,
        seed_std=settings.seed_std,
        resamples=settings.resamples,
        seed=settings.seed,
        sign=-1.0 if settings.lower_is_better else 1.0,
    )
    if gain is None or not gain.is_finite:
        return dataclasses.replace(row, reason="not finite")
    p = gain.two_sided_p()
    row = dataclasses.replace(row, p=p, p_corrected=min(1.0, comparisons * p))
    # All differences are 0: no interval can be drawn from them.
    if gain.value == gain.items == 0:
        return dataclasses.replace(row, reason=EQUAL)
    alpha = (1 - settings.confidence) / 2 / comparisons
    low, high = gain.interval(alpha)
    certain = comparisons * p <= 1 - settings.confidence
    verdict: Verdict = "inconclusive"
    if certain and row.gain > 0:
        verdict, reason = "promote", "better"
    elif certain and row.gain < 0:
        verdict, reason = "keep", "worse"
    elif settings.relevant > 0 and high < settings.relevant:
        verdict, reason = "keep", f"a gain of {settings.relevant:g} or more is ruled out"
    else:
        limit = "seeds" if gain.seeds > gain.items else "items"
        reason = f"neither better nor worse is shown; more {limit} would help most"
    detectable = gain.detectable(0.0, alpha, POWER)
    return dataclasses.replace(row, low=low, high=high, detectable=detectable, verdict=verdict, reason=reason)


def _test_few(
    row: Row, runs_a: Sequence[Evidence], runs_b: Sequence[Evidence], comparisons: int, settings: Settings
) -> Row:
    """Return the row with the exact p and, for right and wrong answers, its verdict: for few clusters."""
    few = f"fewer than {MIN_GROUPS} clusters: no interval would hold"
    # Swaps within clusters do not contain the variation over seeds.
    if row.runs != (1, 1) or settings.seed_std > 0:
        return dataclasses.replace(row, reason=f"{few}, and the exact test is for one run of each model")
    if not np.isfinite(row.gain):
        return dataclasses.replace(row, reason="not finite")
    sums_a_GK, sums_b_GK = runs_a[0].parts_NK, runs_b[0].parts_NK
    p = exact_p(sums_a_GK, sums_b_GK, runs_a[0].statistic)
    corrected, allowed = min(1.0, comparisons * p), 1 - settings.confidence
    row = dataclasses.replace(row, p=p, p_corrected=corrected)
    if np.array_equal(sums_a_GK, sums_b_GK):
        return dataclasses.replace(row, reason=EQUAL)
    smallest = comparisons * 2 ** (1 - row.clusters)
    if smallest > allowed:
        return dataclasses.replace(
            row, reason=f"{few}, and {row.clusters} can have no p below {smallest:.2g}, so nothing can be shown"
        )
    if corrected > allowed:
        return dataclasses.replace(row, reason=f"{few}; the exact p shows no difference")
    if not (are_right_or_wrong(sums_a_GK) and are_right_or_wrong(sums_b_GK)):
        reason = f"{few}; the exact p assumes that wins and losses of one size are equally likely between equals"
        return dataclasses.replace(row, reason=f"{reason}, which so few cannot show")
    if row.gain > 0:
        return dataclasses.replace(row, verdict="promote", reason=f"better, by the exact p; {few}")
    return dataclasses.replace(row, verdict="keep", reason=f"worse, by the exact p; {few}")


def _equal_challengers(
    runs: Sequence[Run], scored: Sequence[Scored], challengers: Sequence[str], metric: str
) -> list[str]:
    """Return a note for each set of challengers with the same scores."""
    content: dict[str, bytes] = {}
    for run, scores in zip(runs, scored, strict=True):
        content[run.model] = content.get(run.model, b"") + scores.parts_NK.tobytes()
    alike: dict[bytes, list[str]] = {}
    for model in challengers:
        alike.setdefault(content[model], []).append(model)
    return [
        f"{', '.join(models)}: the same {metric} on every item; they are one result, not {len(models)}"
        for models in alike.values()
        if len(models) > 1
    ]


def _check_seeds(runs: Sequence[Run], scored: Sequence[Scored], metric: str) -> list[str]:
    """Return a note for every two runs of a model with different seeds, but equal scores."""
    notes = []
    for (a, scores_a), (b, scores_b) in itertools.combinations(zip(runs, scored, strict=True), 2):
        if a.model != b.model:
            continue
        both = f"{_describe(a)} and {_describe(b)}"
        if a.seed and a.seed == b.seed:
            raise DataError(f"{both}: two runs of {a.model} with the seed {a.seed}, not two seeds")
        # Equal scores on all items: without stated seeds this is most likely one file, passed twice.
        if np.array_equal(scores_a.parts_NK, scores_b.parts_NK):
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


def _pair(
    runs: Sequence[Run], metric: str, settings: Settings
) -> tuple[list[Scored], list[tuple[str, ...]], list[str]]:
    """Return the scores of each run on the same items in the same order, the items left out of each, and notes."""
    scored = [run.metrics[metric] for run in runs]
    first = scored[0].items
    if all(scores.items == first for scores in scored[1:]):  # as most files of one program
        order: Sequence[str] = first
        missing: list[tuple[str, ...]] = [()] * len(runs)
    else:
        order, missing = _common_items(runs, scored, settings)
    derived = any(scores.derived for scores in scored)
    aligned = [_sort_into(scores, order, rename=derived) for scores in scored]
    # Every run is compared with the first one, so all of them agree with each other.
    notes = [_check_same(runs[0], run, aligned[0], scores) for run, scores in zip(runs, aligned, strict=True)]
    return aligned, missing, list(filter(None, notes))


def _common_items(
    runs: Sequence[Run], scored: Sequence[Scored], settings: Settings
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the items that all runs have, in the order of the first run, and those that only some have."""
    shared = set(scored[0].items).intersection(*(scores.items for scores in scored[1:]))
    missing = [tuple(item for item in scores.items if item not in shared) for scores in scored]
    if not shared:
        names = "; ".join(f"{_describe(run)}: {_some(scores.items)}" for run, scores in zip(runs, scored, strict=True))
        raise DataError(
            f"the files have no item in common ({names}); --item names the column that identifies one{_alike(missing)}"
        )
    if any(missing) and not settings.common:
        unpaired = [(run, items) for run, items in zip(runs, missing, strict=True) if items]
        lists = "; ".join(f"{len(items):,} scored only in {_describe(run)}: {_some(items)}" for run, items in unpaired)
        why = "".join(f" {run.source}: {note}." for run in runs for note in run.notes if "left out" in note)
        raise DataError(
            f"the files have different items ({lists}){_alike(missing)}.{why} --common compares the {len(shared):,} "
            "common"
        )
    return [item for item in scored[0].items if item in shared], missing


def _alike(missing: Sequence[Sequence[str]]) -> str:
    """Return which of the items that only one file has may be the same: 007 becomes 7 in a spreadsheet."""
    names = {item for items in missing for item in items}
    padded = next((item for item in sorted(names) if item.isdecimal() and item != str(int(item)) in names), None)
    return f"; {padded} and {int(padded)} may be one item: spreadsheets drop zeros" if padded else ""


def _sort_into(scores: Scored, order: Sequence[str], rename: bool) -> Scored:
    """Return the scores of the items in `order`, in its order.

    Args:
        rename: name each cluster after its first item, as a file may name it after another one.
    """
    clusters, parts_NK, contents = scores.clusters, scores.parts_NK, scores.contents
    if scores.items != order:
        row_of = {item: i for i, item in enumerate(scores.items)}
        # Row of each item in this file: files list the same items in different orders.
        rows = [row_of[item] for item in order]
        clusters, parts_NK = [clusters[i] for i in rows], parts_NK[rows]
        contents = {kind: [column[i] for i in rows] for kind, column in contents.items()}
    if rename:
        first_of: dict[str, str] = {}
        clusters = [first_of.setdefault(cluster, item) for cluster, item in zip(clusters, order, strict=True)]
    return dataclasses.replace(scores, items=order, clusters=clusters, parts_NK=parts_NK, contents=contents)


def _check_same(a: Run, b: Run, scores_a: Scored, scores_b: Scored) -> str:
    """Refuse two files whose common items differ in content, clusters or statistic; return a note on their prompts."""
    note = ""
    if scores_a.test != scores_b.test and scores_a.test and scores_b.test:
        raise DataError(f"{b.source}: another test set or another scorer than in {a.source}")
    kinds = [kind for kind in scores_a.contents if kind in scores_b.contents]
    # A hash of the document settles it; without one, everything that both files have of it counts.
    for kind in ["doc_hash"] if "doc_hash" in kinds else kinds:
        contents_a, contents_b = scores_a.contents[kind], scores_b.contents[kind]
        if contents_a == contents_b:
            continue
        # lmms-eval's prompts have the same text around all questions, which some models have of their own.
        if kind == "input" and _without_template(contents_a) == _without_template(contents_b):
            note = f"{b.source}: the prompts have another text around the questions than in {a.source}"
            continue
        # Something that only one file has is not a difference.
        contents = zip(scores_a.items, contents_a, contents_b, strict=True)
        differ = [item for item, text_a, text_b in contents if text_a and text_b and text_a != text_b]
        if differ:
            more = f", as {len(differ) - 1:,} more have" if len(differ) > 1 else ""
            raise DataError(f"{b.source}: item {differ[0]} has other contents than in {a.source} ({kind}){more}")
    if scores_a.clusters != scores_b.clusters:
        clusters = zip(scores_a.items, scores_a.clusters, scores_b.clusters, strict=True)
        differ = [item for item, cluster_a, cluster_b in clusters if cluster_a != cluster_b]
        for run, scores, other in ((a, scores_a, b), (b, scores_b, a)):
            # Each item is its own group: this file has no clusters.
            if scores.clusters == scores.items:
                raise DataError(
                    f"{run.source}: no clusters, although {other.source} has some. --cluster names a "
                    "column of both; with the name of the items' column, each item counts by itself"
                )
        raise DataError(f"{b.source}: {len(differ):,} items are in other clusters than in {a.source}: {_some(differ)}")
    if scores_a.parts_NK.shape[1] != scores_b.parts_NK.shape[1]:
        raise DataError(f"{b.source}: scored by another statistic than {a.source}")
    return note


def _without_template(inputs: Sequence[str]) -> list[str]:
    """Return the inputs without the text that all have at their start and at their end."""
    start = _common_start(inputs)
    backwards = [text[start:][::-1] for text in inputs]
    end = _common_start(backwards)
    return [text[end:] for text in backwards]


def _common_start(texts: Sequence[str]) -> int:
    """Return how many characters all texts start with: as many as the first and the last one in sorted order."""
    first, last = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _notes(models: Mapping[str, Sequence[Run]], rows: Sequence[Row], settings: Settings) -> Iterable[str]:
    """Yield what a reader must know to believe the table."""
    # note -> the files it holds for; a note on all of them is printed without their names.
    noted: dict[str, list[str]] = {}
    for run in itertools.chain.from_iterable(models.values()):
        for note in [*run.notes, *filter(None, [run.unfinished])]:
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
    if any(row.clusters < MIN_GROUPS and row.p is not None for row in rows):
        yield (
            f"with fewer than {MIN_GROUPS} clusters p is exact: the share of all ways to swap the models' results on "
            "clusters that give so large a difference"
        )
    if len(rows) > 1:
        yield (
            f"p, intervals, verdicts and detectable gains are corrected for {len(rows)} comparisons (Bonferroni): they "
            f"hold together at {100 * settings.confidence:g}%"
        )


def _describe(run: Run) -> str:
    return f"{run.source}, seed {run.seed}" if run.seed else str(run.source)


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:SHOWN]) + (", ..." if len(items) > SHOWN else "")
