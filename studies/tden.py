"""TDEN's claims, tested at small scale: contrasts written down before the runs.

    make ablations-tden    (runs python studies/tden.py; --help lists its other options)

The contrasts are in tden.toml, next to this file. Writes benchmarks/results/study-tden.md and
benchmarks/results/study-tden.json.
"""

from __future__ import annotations

from pathlib import Path

from pretraining_study.arms import Arm, FineTuning, Pretraining, of_equal_compute
from pretraining_study.study import Study, main

UPDATES = 400  # of a single pass: every pair of the web twice
# An update over one of a single pass, in CPU time, by `--cost 60`. (At the demo size: 1.71 and 1.08.)
COST_A, COST_C = 1.72, 1.05
ALL = ("mlm", "moc", "ism", "msg")

ARMS = (
    Arm(
        name="none",
        label="no pretraining, at its best",
        fine_tuning=FineTuning(budgets=(100, 150, 200, 400)),
    ),
    Arm(name="single", label="all four, one pass", pretraining=(Pretraining(objectives=ALL, updates=UPDATES),)),
    Arm(
        name="two-pass-a",
        label="Two-Pass-A, equal compute",
        pretraining=(Pretraining(objectives=ALL, updates=of_equal_compute(UPDATES, COST_A), scheduled_sampling="a"),),
    ),
    Arm(
        name="two-pass-a-long",
        label="Two-Pass-A, equal updates",
        pretraining=(Pretraining(objectives=ALL, updates=UPDATES, scheduled_sampling="a"),),
    ),
    Arm(
        name="two-pass-c",
        label="Two-Pass-C, equal compute",
        pretraining=(Pretraining(objectives=ALL, updates=of_equal_compute(UPDATES, COST_C), scheduled_sampling="c"),),
    ),
    Arm(
        name="encoder-alone",
        label="encoder alone",
        pretraining=(Pretraining(objectives=("mlm", "moc", "ism"), updates=UPDATES),),
    ),
    Arm(
        name="decoder-alone",
        label="decoder alone",
        pretraining=(Pretraining(objectives=("msg", "ism"), updates=UPDATES),),
    ),
    Arm(
        name="ism-cross-modal",
        label="ISM on the cross-modal encoder",
        pretraining=(Pretraining(objectives=ALL, updates=UPDATES),),
        config={"ism_source": "cross_modal"},
    ),
)

STUDY = Study(
    name="tden",
    title="TDEN's pretraining at small scale",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    notes=(
        f"For equal compute two passes have fewer updates than one: an update of A costs {COST_A} of a single pass's, "
        f"one of C {COST_C}. The paper compares at equal epochs, as Two-Pass-A with equal updates does here.",
        "The other arms have as many updates as the single pass, as in the paper, whatever these cost (see Cost).",
        "Fine-tuned captions are by cross-entropy and greedy; retrieval is by the two encoders, also where ISM was "
        "trained on the cross-modal encoder, whose poolers are then untrained.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
