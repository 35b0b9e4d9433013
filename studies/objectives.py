"""Objectives across models at equal compute: three backbones, each with its own recipe and with two that all can train.

    python studies/objectives.py    (--help lists its other options)

The contrasts are in objectives.toml, next to this file. Writes benchmarks/results/study-objectives.md and
benchmarks/results/study-objectives.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining_study.arms import Arm, FineTuning, Pretraining, of_equal_compute
from pretraining_study.study import Study, main

UPDATES = 400  # of `ic`: every pair of the web twice
CAPTIONS, COMMON = ("ic",), ("ic", "itm", "moc")
OWN: dict[str, dict[str, Any]] = {
    "tden": {"objectives": ("mlm", "moc", "ism", "msg")},
    "unified_vlp": {"objectives": ("seq2seq", "bidirectional"), "mix": "sample", "shares": (0.75, 0.25)},
    "xgpt": {"objectives": ("ic", "imlm", "ida", "tifg"), "mix": "alternate"},
}
LABELS = {"tden": "TDEN", "unified_vlp": "Unified VLP", "xgpt": "XGPT"}
# CPU time of an update over one of the same backbone's `ic`, by `--cost 24`: (own, common)
COSTS = {"tden": (1.86, 4.48), "unified_vlp": (0.61, 2.62), "xgpt": (1.08, 2.66)}


def arm(family: str, name: str, label: str, cost: float, **recipe: Any) -> Arm:
    return Arm(
        name=f"{family.replace('_', '-')}-{name}",
        label=f"{LABELS[family]}, {label}",
        family=family,
        pretraining=(Pretraining(updates=of_equal_compute(UPDATES, cost), **recipe),),
        fine_tuning=FineTuning(budgets=(100,)),
        tasks=("captioning",),
    )


ARMS = tuple(
    made
    for family, (own, common) in COSTS.items()
    for made in (
        arm(family, "own", "its own objectives", own, **OWN[family]),
        arm(family, "ic", "captioning alone", 1.0, objectives=CAPTIONS),
        arm(family, "common", "captioning, matching, region classes", common, objectives=COMMON),
    )
)

STUDY = Study(
    name="objectives",
    title="Objectives across models at equal compute",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    notes=(
        f"All arms of a backbone have the CPU time of {UPDATES} updates of `ic`. A shared objective makes a pass of "
        "its own, so three are three passes.",
        "The backbones are not compared with each other: their settings are not equally tuned.",
        "XGPT's own objectives take turns on each batch, so an update is one objective's.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
