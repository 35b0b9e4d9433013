"""Variants side by side: runs that differ in their seed alone form one row, and pairs of rows are compared.

Runs that share a `variant` but not their settings are different variants, as they are for the gate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlp_models.metrics.bootstrap import count_in_note
from vlp_models.params import Params, split_start

Record = dict[str, Any]
COSTS = ("parameters", "samples_seen", "training_seconds", "training_memory_mb")

DIFFERENCES = 3  # settings named in a variant's label
COUNTED = {"max_epochs": "epochs", "max_steps": "steps"}


def label_variants(params: Params) -> dict[str, str]:
    """Return run -> the name of its variant, with what differs if runs of one name have different settings.

    Two runs named `small` of 4 and of 5 epochs become `small (4 epochs)` and `small (5 epochs)`.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for run, settings in params.finetune.items():
        names.setdefault((settings.task, params.variant_of(run)), []).append(run)
    labels = {}
    for (_, variant), runs in names.items():
        flat = {run: _flat_settings(params, run) for run in runs}
        # Settings that all runs have (a run from scratch has no `pretrain ...`) and that are not equal in all of them.
        shared = [key for key in flat[runs[0]] if all(key in settings for settings in flat.values())]
        differing = [key for key in shared if len({str(flat[run][key]) for run in runs}) > 1]
        for run in runs:
            differences = [_describe_setting(key, flat[run][key]) for key in differing[:DIFFERENCES]]
            if len(differing) > DIFFERENCES:
                differences.append("...")
            labels[run] = f"{variant} ({', '.join(differences)})" if differences else variant
    return _distinct(labels, params)


def _flat_settings(params: Params, run: str) -> dict[str, Any]:
    """Return the settings that make a variant by dotted name, those of a start as `pretrain max_epochs`."""
    kinds = [split_start(checkpoint)[0] for checkpoint in params.chain(f"finetune/{run}")]
    # Without the run itself: `pretrain, initial` for a run that starts from a pretraining.
    flat: dict[str, Any] = {"start": ", ".join(kinds[1:])}
    for depth, (kind, settings) in enumerate(params.settings_of(run)):
        # The run's own settings have no prefix.
        _flatten_into(flat, f"{kind} " if depth else "", settings)
    return flat


def _flatten_into(flat: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            # The prefix of a start ends with a space, which already separates it.
            separator = "" if not name or name.endswith(" ") else "."
            _flatten_into(flat, f"{name}{separator}{key}", inner)
    else:
        flat[name] = value


def _describe_setting(key: str, value: Any) -> str:
    """Return `5 epochs` or `batch_size 32`; a start that differs is `without pretraining` or the chain of trainings."""
    owner, _, name = key.rpartition(" ")
    prefix = f"{owner} " if owner else ""
    if key == "start":
        # `initial` ends every chain, so it is not named.
        starts = value.removesuffix("initial").removesuffix(", ")
        return {"": "without pretraining", "pretrain": "pretrained"}.get(starts, f"after {starts}")
    if name in COUNTED and value is not None:
        return f"{prefix}{value:g} {COUNTED[name]}"
    return f"{prefix}{name} {'unset' if value is None or value == {} else value}"


def _distinct(labels: dict[str, str], params: Params) -> dict[str, str]:
    """Add the run's name where a shortened label is also that of a variant with other settings."""
    settings_by_label: dict[tuple[str, str], list[Any]] = {}
    result = {}
    for run, label in labels.items():
        settings = params.settings_of(run)
        # The first run of a label defines its settings.
        first_settings = settings_by_label.setdefault((params.finetune[run].task, label), settings)
        result[run] = label if first_settings == settings else f"{label}, as {run}"
    return result


@dataclass(frozen=True, kw_only=True)
class VariantRow:
    """One metric of one variant: the mean over its seeds.

    low, high  with one seed: the interval over items. With several: the lowest and the highest seed's value
    deviation  standard deviation over seeds; None with one seed
    baselines, costs  means over the seeds
    control    a text-only control, trained with blank images
    few        number of test items, if they are too few for an interval
    unseen     the score on the unseen items with its baselines there; None with several seeds
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
    few: int | None
    unseen: Record | None
    costs: dict[str, float | None]

    @property
    def seeds(self) -> int:
        return len(self.runs)


def variant_rows(records: Sequence[Record]) -> list[VariantRow]:
    """Group the records of one task, dataset and split by metric and variant; records without a value are left out."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["value"] is not None:
            groups.setdefault((record["metric"], record["variant"]), []).append(record)
    # Metrics in the order of the records.
    order = list(dict.fromkeys(record["metric"] for record in records))
    rows = [_row(metric, variant, group) for (metric, variant), group in groups.items()]
    return sorted(rows, key=lambda row: order.index(row.metric))


def _row(metric: str, variant: str, records: Sequence[Record]) -> VariantRow:
    values = [float(record["value"]) for record in records]
    several = len(values) > 1
    # Only baselines that every seed has: the blind baseline, for one, is another value with each seed.
    shared = set.intersection(*(set(record["baselines"]) for record in records))
    return VariantRow(
        metric=metric,
        variant=variant,
        model=", ".join(dict.fromkeys(record["model"] for record in records)),
        runs=tuple(record["run"] for record in records),
        control=records[0]["control"],
        value=statistics.fmean(values),
        low=min(values) if several else records[0]["low"],
        high=max(values) if several else records[0]["high"],
        deviation=statistics.stdev(values) if several else None,
        baselines={name: statistics.fmean(r["baselines"][name] for r in records) for name in sorted(shared)},
        n=records[0]["n"],
        few=count_in_note(records[0]["note"]),
        unseen=None if several else (records[0]["leakage"] or {}).get("without_both"),
        costs={name: _mean([record[name] for record in records]) for name in COSTS},
    )


def _mean(values: Sequence[Any]) -> float | None:
    """Return the mean, or None if any value is missing."""
    numbers = [float(value) for value in values if value is not None]
    return statistics.fmean(numbers) if len(numbers) == len(values) else None
