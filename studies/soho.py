"""SOHO's claims about its visual dictionary (table 7), put to a set-up that can tell: contrasts written down before.

    make ablations-soho    (= python studies/soho.py; --help names what else it does)

The contrasts are in soho.toml, beside this file. Writes docs/ablations/soho.md and
benchmarks/results/study-soho.json. What the paper says of inference time is asked by benchmarks/soho_inference.py.
"""

from __future__ import annotations

from pathlib import Path

from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.setting import Setting
from pretraining_study.study import Study, main

UPDATES = 900  # every pair of the web four and a half times
CNN = ("cnn", "cnn_stem")  # stays as its eyes were, as in the first ten of the paper's epochs


def arm(name: str, label: str, codes: int) -> Arm:
    objectives = {"mlm": 1.0, "mvm": 0.1, "itm": 1.0} if codes else {"mlm": 1.0, "itm": 1.0}
    learnt = Pretraining(objectives=tuple(objectives), weights=tuple(objectives.values()), updates=UPDATES, frozen=CNN)
    return Arm(
        name=name,
        label=label,
        family="soho",
        pretraining=(learnt,),
        fine_tuning=FineTuning(budgets=(300,)),
        tasks=("vqa", "retrieval"),
        config={"dictionary_size": codes},
    )


SETTING = Setting(side=48, web=6_400, train=400, batch=32, lr=3e-3, eyes=600)
ARMS = (
    arm("without", "no dictionary", 0),
    arm("small", "32 codes", 32),
    arm("middle", "128 codes", 128),
    arm("large", "512 codes", 512),
)

STUDY = Study(
    name="soho",
    title="What of SOHO's visual dictionary shows on a small set-up that can tell",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    setting=SETTING,
    notes=(
        f"Images become {(SETTING.side // SETTING.patch) ** 2} cells of {SETTING.patch} pixels, by the small "
        f"detector's CNN. In the place of ImageNet's weights it begins with what {SETTING.eyes} updates on the web's "
        "pictures taught it, told what lies on each cell. It stays so while the rest pretrains (the paper: ten of "
        "forty epochs); in tasks AdamW trains it as everything else. 32, 128 and 512 codes are in the place of the "
        "paper's 1024, 2048 and 8192.",
        "A pair has one text of its own and one of another image. Without a dictionary there is no MVM; with one, its "
        "weight is 0.1 where the paper's is 1, as in presets/soho.yaml. One seed of a pilot had R@1 22 with 128 codes "
        "at 1, 33 at 0.1, and 41 without a dictionary; seeds differ by 5 to 7.",
        "Retrieval fuses each pair: of each test image one caption, and its own image among ten, of the other nine of "
        "which it is not true. It is fine-tuned by telling the own image from three others.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
