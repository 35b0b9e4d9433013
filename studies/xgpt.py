"""XGPT's claims (tables 2 to 5), tested at small scale: contrasts written down before the runs.

    make ablations-xgpt    (runs python studies/xgpt.py; --help lists its other options)

The contrasts are in xgpt.toml, next to this file. Writes benchmarks/results/study-xgpt.md and
benchmarks/results/study-xgpt.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.study import Study, main

CYCLES = 150  # batches; every objective trains on each in turn
IN_DOMAIN = 40  # likewise, of the target's own pairs: five times its 500 captions
IN_DOMAIN_WEIGHT = 0.3  # of all objectives but IC: the paper
ALL = ("ic", "imlm", "ida", "tifg")
DIRECT = FineTuning(budgets=(200,))  # of models that are trained on captioning alone


def turns(*objectives: str, cycles: int = CYCLES, **more: Any) -> Pretraining:
    return Pretraining(objectives=objectives, updates=cycles * len(objectives), mix="alternate", **more)


def arm(name: str, label: str, *pretraining: Pretraining, **more: Any) -> Arm:
    return Arm(name=name, label=label, family="xgpt", pretraining=pretraining, tasks=("captioning",), **more)


BOTH_DOMAINS = (
    turns(*ALL),
    turns(*ALL, cycles=IN_DOMAIN, where="target", weights=(1.0, *(IN_DOMAIN_WEIGHT,) * 3)),
)
# Table 5's retrieval model is ViLBERT, pretrained and public; here it is TDEN's, pretrained as its own study has it.
RETRIEVER = (Pretraining(objectives=("mlm", "moc", "ism", "msg"), updates=200),)


def retriever(name: str, label: str, captioner: Arm | None) -> Arm:
    return Arm(
        name=name,
        label=label,
        pretraining=RETRIEVER,
        fine_tuning=FineTuning(captioner=captioner),
        tasks=("retrieval",),
    )


CAPTIONER = arm("both-domains", "all four, then all four in domain", *BOTH_DOMAINS)
ARMS = (
    arm("ic", "IC alone", turns("ic")),
    arm("ic-long", "IC alone, as many updates as all four", turns("ic", cycles=CYCLES * len(ALL))),
    arm("ida", "IC + IDA, single [MASK]", turns("ic", "ida")),
    arm("ida-multi", "IC + IDA, multi [MASK]", turns("ic", "ida"), config={"ida_masks": "multi"}),
    arm("all", "all four", turns(*ALL)),
    CAPTIONER,
    arm("enc", "Enc, no pretraining", fine_tuning=DIRECT, config={"structure": "enc"}),
    arm("enc-dec", "EncDec, no pretraining", fine_tuning=DIRECT, config={"structure": "enc_dec"}),
    arm("enc-dec-share", "EncDecShare, no pretraining", fine_tuning=DIRECT),
    retriever("retrieval", "TDEN, its own captions", None),
    retriever("retrieval-written", "TDEN, and captions that XGPT wrote", CAPTIONER),
)

STUDY = Study(
    name="xgpt",
    title="XGPT's claims at small scale",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    notes=(
        f"From each of {CYCLES} batches every objective learns in its turn, with an update of its own, as in the "
        "paper. So more objectives are more updates. IC alone is there with as many updates as all four, too.",
        f"In domain are the target's own pairs, {IN_DOMAIN} batches, with the paper's weights. There is no "
        "pretraining on texts, no average of checkpoints, and captions are greedy.",
        "Models without pretraining are fine-tuned twice as long as the others: they are compared with each other "
        "alone, as in table 3.",
        "Retrieval (table 5) is TDEN's two encoders, pretrained for 200 updates: ViLBERT is not here. The captions are "
        "written of the training images alone, by the XGPT of the arm `both-domains`, fine-tuned on the same images; "
        "with and without them there are as many updates.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
