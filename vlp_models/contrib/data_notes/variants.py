"""Runs that are named as seeds of one variant and differ in more: the report and the gate take them apart."""

from __future__ import annotations

from collections import defaultdict

from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.variants import label_variants
from vlp_models.params import Params


def explain_variants(params: Params, workspace: Workspace, *, strict: bool = False) -> list[str]:
    """Return a sentence for each `variant` whose runs have different settings.

    Args:
        strict: as for `explain_sizes`; nothing here is an error.
    """
    labels: dict[str, set[str]] = defaultdict(set)  # variant -> the names under which its runs are reported
    for run, label in label_variants(params).items():
        labels[params.variant_of(run)].add(label)
    named = {run.variant for run in params.finetune.values()}
    return [
        f"`variant: {variant}` has runs that differ in more than their seeds, so they count as variants of their own, "
        f"each with fewer seeds: {', '.join(sorted(names))}; `defaults.finetune` sets what all runs share"
        for variant, names in labels.items()
        if variant in named and len(names) > 1
    ]
