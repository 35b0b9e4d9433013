"""What the number of images rules out, reported before anything is trained.

Images are counted in the pairs file, or for other formats in the tables of `prepare`, if they exist.
"""

from __future__ import annotations

from collections import Counter

from vlp_models.common.workspace import Workspace
from vlp_models.data.formats import pairs
from vlp_models.data.tables import SPLITS, read_table
from vlp_models.errors import DataError
from vlp_models.evaluation.ranking import competing_runs, ranked_on_the_test
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.retrieval import MAX_CHANCE, TOP_KS, chance
from vlp_models.params import Params

MAX_BYTES = 20_000_000  # of a file of pairs that is read here; a longer one has enough images


def explain_sizes(params: Params, workspace: Workspace) -> list[str]:
    """Return a sentence for each thing that a dataset has too few images for, with the numbers."""
    found = []
    counts = {name: count for name in params.data if (count := count_images(params, workspace, name))}
    for name, count in counts.items():
        if (few := count[params.promotion.split]) < max(MIN_GROUPS, params.promotion.min_images):
            found += _explain_few(params, name, count, few)
    for task in dict.fromkeys(run.task for run in params.finetune.values()):
        found += _explain_ranking(params, task, counts)
    return found


def count_images(params: Params, workspace: Workspace, name: str) -> Counter[str]:
    """Return the number of images in each split of a dataset; empty if it is unknown, or large."""
    source = params.data[name]
    if name in params.generate:
        return Counter()
    try:
        if source.format == "pairs" and "*" not in source.pairs:
            path = workspace.root / source.root / source.pairs
            return pairs.count_images(name, source, workspace.root) if path.stat().st_size < MAX_BYTES else Counter()
        return Counter(read_table("images", workspace.interim(name), columns=["split"])["split"].to_pylist())
    except (OSError, DataError):
        return Counter()  # `prepare` names what is missing


def _explain_few(params: Params, name: str, count: Counter[str], few: int) -> list[str]:
    sizes = ", ".join(f"{count[split]} {split}" for split in SPLITS)
    test, minimum = params.promotion.split, params.promotion.min_images
    lines = [f"data.{name} has {count.total()} images: {sizes}"]
    if few < MIN_GROUPS:
        lines.append(f"too few {test} images ({few}) for 95% intervals, which need {MIN_GROUPS}: none are reported")
    if few < minimum:
        lines.append(
            f"too few {test} images ({few}) for the gate, which needs {minimum} (`promotion.min_images`): it will "
            'answer `inconclusive`, and a first champion needs `vlp promote TASK --force "why"`'
        )
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
    runs, wanted = competing_runs(params, task), params.promotion.select_on
    used: set[str] = set()
    for run in (params.finetune[name] for name in runs):
        used |= set(run.evaluate_on or run.sources or params.data)
    without = [name for name in counts if name in used and not counts[name][wanted]]
    if wanted not in params.evaluate.splits:
        why = f"`evaluate.splits` lacks {wanted}"
    elif without:
        why = f"no {wanted} image in {', '.join(without)}"
    else:
        return []
    if len(runs) > 1:
        return [ranked_on_the_test(params, task, why)]
    return [f"{task}: one run, so nothing is ranked ({why}); it is judged on {params.promotion.split}"]
