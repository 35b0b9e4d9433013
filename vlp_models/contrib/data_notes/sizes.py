"""What a dataset's files and the number of its images rule out, reported before anything is trained.

Images are counted in the pairs file, or for other formats in the tables of `prepare`, if they exist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.data_notes.listing import check_pairs
from vlp_models.data.formats import source_params
from vlp_models.data.formats.pairs import PairsParams
from vlp_models.data.tables import SPLITS, count_values
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.retrieval import MAX_CHANCE, TOP_KS, chance
from vlp_models.params import Params
from vlp_models.registry.promotion.gate_rule import competing_runs, gate_rule
from vlp_models.registry.promotion.ranking import describe_splits

MAX_BYTES = 20_000_000  # of a file of pairs that is read to its end here; a longer one has enough images
FIRST_ROWS = 10_000  # that are checked of a longer one


def explain_sizes(params: Params, workspace: Workspace, *, strict: bool = False) -> list[str]:
    """Return a sentence for each fault of a listing, and each thing that a dataset has too few images for.

    Raises:
        DataError: with `strict`, if a listing cannot be read at all. Otherwise that is a sentence as well.
    """
    sentences = []
    counts: dict[str, Counter[str]] = {}  # dataset -> split -> images
    for name in params.data:
        try:
            count, problems = check_dataset(params, workspace, name)
        except DataError as error:
            if strict:
                raise
            count, problems = Counter(), [f"its images are not counted: {error}"]
        sentences += [f"data.{name}: {problem}" for problem in problems]
        if count:
            counts[name] = count
    for name, count in counts.items():
        # Fewer than intervals need, or than the gate asks for.
        few = count[params.promotion.split]
        if few < max(MIN_GROUPS, params.promotion.min_images) and not _is_only_trained_on(params, name, counts):
            sentences += _explain_few(params, name, count, few)
    for task in dict.fromkeys(run.task for run in params.finetune.values()):
        sentences += _explain_ranking(params, task, counts)
    return sentences


def check_dataset(params: Params, workspace: Workspace, name: str) -> tuple[Counter[str], list[str]]:
    """Return the number of images in each split of a dataset, and what is wrong with its listing.

    The counts are empty if they are unknown, or large. Nothing is wrong with a dataset that is not there yet, because a
    stage or `vlp ingest` creates it.

    Raises:
        DataError: a listing of pairs is missing, lacks a column, or cannot be read.
    """
    source = params.data[name]
    if name in params.generate or not (workspace.root / source.root).is_dir():
        return Counter(), []
    # A pattern names several listings, whose images are counted in the tables instead.
    if source.format == "pairs" and "*" not in str(source.options.get("pairs", "")):
        typed = cast(PairsParams, source_params(name, source))
        path = workspace.root / source.root / typed.pairs
        # A large file has enough images: only its first rows are checked.
        size = path.stat().st_size if path.is_file() else 0
        if size < MAX_BYTES:
            checked = check_pairs(name, typed, workspace.root)
            return checked.images, checked.problems
        first = replace(typed, limit=min(typed.limit or FIRST_ROWS, FIRST_ROWS))
        return Counter(), check_pairs(name, first, workspace.root).problems
    # other formats are not read here
    try:
        return count_values("images", workspace.interim(name), "split"), []
    except (OSError, DataError):
        return Counter(), []  # before the first run


def _evaluated_on(params: Params, run: str) -> set[str]:
    """Return the datasets that a run is evaluated on: those it names, else those it trains on, else all."""
    settings = params.finetune[run]
    return set(settings.evaluate_on or settings.sources or params.data)


def _is_only_trained_on(params: Params, name: str, counts: dict[str, Counter[str]]) -> bool:
    """Return whether a dataset has no test images, as ingested batches, and each of its runs is tested on another."""
    test = params.promotion.split
    others = [datasets - {name} for run in params.finetune if name in (datasets := _evaluated_on(params, run))]
    # A dataset that was not counted may have test images.
    return (
        not counts[name][test]
        and bool(others)
        and all(any(other not in counts or counts[other][test] for other in datasets) for datasets in others)
    )


def _explain_few(params: Params, name: str, count: Counter[str], few: int) -> list[str]:
    sizes = ", ".join(f"{count[split]} {split}" for split in SPLITS)
    test, minimum = params.promotion.split, params.promotion.min_images
    lines = [f"data.{name} has {count.total()} images: {sizes}"]
    if few < MIN_GROUPS:
        lines.append(f"too few {test} images ({few}) for 95% intervals, which need {MIN_GROUPS}: none are reported")
    if few < minimum:
        lines.append(
            f"too few {test} images ({few}) for the gate, which needs {minimum} (`promotion.min_images`): its "
            'verdict will be `inconclusive`, and a first champion needs `vlp promote TASK --force "why"`'
        )
    # Formats of others have splits of their own.
    if params.data[name].format == "pairs":
        lines.append(f"more {test} images can be named in the column `split` of the listing")
    # recall that a random ranking reaches
    by_chance = chance([1], few) if few else {}
    hidden = [f"R@{k}" for k in TOP_KS if by_chance.get(f"R@{k}", 0) > MAX_CHANCE]
    if hidden and any(run.task == "retrieval" for run in params.finetune.values()):
        lines.append(
            f"too few {test} images ({few}) for {', '.join(hidden)}, which are not reported: chance finds the right "
            "image more often than not"
        )
    return lines


def _explain_ranking(params: Params, task: str, counts: dict[str, Counter[str]]) -> list[str]:
    """Say that the runs of a task cannot be ranked on val, and what they are ranked on instead."""
    runs, split = competing_runs(params, task), params.promotion.select_on
    used = {dataset for run in runs for dataset in _evaluated_on(params, run)}
    # A dataset without test images is not scored, so it needs no other split.
    tested = [name for name in counts if name in used and counts[name][params.promotion.split]]
    without = [name for name in tested if not counts[name][split]]
    if split not in params.evaluate.splits:
        why = f"`evaluate.splits` lacks {split}"
    elif without:
        why = f"no {split} image in {', '.join(without)}"
    else:
        return []
    if len(runs) > 1:
        metric, split = gate_rule(params, task).metric, params.promotion.split
        return [describe_splits(f"{task}: runs", split, metric, params.promotion, why)]
    return [f"{task}: one run, so nothing is ranked ({why}); it is judged on {params.promotion.split}"]
