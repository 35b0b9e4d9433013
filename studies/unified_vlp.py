"""Unified VLP's claims (tables 2, 4 and 6), tested at small scale: contrasts written down before the runs.

    make ablations-unified-vlp    (runs python studies/unified_vlp.py; --help lists its other options)

The contrasts are in unified_vlp.toml, next to this file. Writes benchmarks/results/study-unified-vlp.md and
benchmarks/results/study-unified-vlp.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.study import Study, main

UPDATES = 400  # on pairs: every pair of the web twice
TEXTS = 400  # on texts alone, where a model begins with such weights
BOTH = ("seq2seq", "bidirectional")
TUNING = FineTuning(budgets=(100,))


def drawn(share: float, updates: int = UPDATES, **more: Any) -> Pretraining:
    """lambda: seq2seq's share."""
    return Pretraining(objectives=BOTH, mix="sample", shares=(share, 1 - share), updates=updates, **more)


def arm(name: str, label: str, *pretraining: Pretraining, **more: Any) -> Arm:
    return Arm(name=name, label=label, family="unified_vlp", pretraining=pretraining, **{"fine_tuning": TUNING, **more})


ARMS = (
    arm("none", "no pretraining, at its best", fine_tuning=FineTuning(budgets=(100, 200, 400))),
    arm("texts", "texts alone, as UniLM", drawn(0.5, TEXTS, reads="blanked")),
    arm("joint", "both objectives, lambda 0.75", drawn(0.75)),
    arm("seq2seq", "seq2seq alone, lambda 1", drawn(1.0)),
    arm("bidirectional", "bidirectional alone, lambda 0", drawn(0.0)),
    arm(
        "classes-as-pretext",
        "region classes as pretext, not as input",
        Pretraining(objectives=(*BOTH, "moc"), mix="sample", shares=(0.5, 0.17, 0.33), updates=UPDATES),
        config={"region_classes": "pretext"},
    ),
)

STUDY = Study(
    name="unified-vlp",
    title="Unified VLP's pretraining at small scale",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    notes=(
        "Captions are fine-tuned on every word, predicted at a [MASK] that attends to the words before it; greedy; the "
        "paper hides three at most. So the held-out likelihood is that of generation.",
        f"Texts alone are {TEXTS} updates on the web's own texts without their images, half seq2seq, half "
        "bidirectional: the paper's weights came from UniLM, that is from other texts, and far more of them. Its "
        "models of pairs begin with these weights, ours with none. BERT's weights (table 4) have no row.",
        "As a pretraining target, region classes take a third of the samples; the words' shares stay in proportion.",
        "There is no retrieval: the model embeds neither images nor texts apart.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
