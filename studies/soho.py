"""SOHO's claims about its visual dictionary (table 7), tested at small scale: contrasts written down before the runs.

    make ablations-soho    (runs python studies/soho.py; --help lists its other options)

The contrasts are in soho.toml, next to this file. Writes benchmarks/results/study-soho.md and
benchmarks/results/study-soho.json. benchmarks/soho_inference.py measures the inference time that the paper reports.
"""

from __future__ import annotations

from pathlib import Path

from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.setting import Setting
from pretraining_study.study import Study, main

UPDATES = 900  # every pair of the web four and a half times
CNN = ("cnn", "cnn_stem")  # frozen after its warm-up, as in the first ten of the paper's epochs


def arm(name: str, label: str, codes: int) -> Arm:
    objectives = {"mlm": 1.0, "mvm": 0.1, "itm": 1.0} if codes else {"mlm": 1.0, "itm": 1.0}
    pretraining = Pretraining(
        objectives=tuple(objectives), weights=tuple(objectives.values()), updates=UPDATES, frozen=CNN
    )
    return Arm(
        name=name,
        label=label,
        family="soho",
        pretraining=(pretraining,),
        fine_tuning=FineTuning(budgets=(300,)),
        tasks=("vqa", "retrieval"),
        config={"dictionary_size": codes},
    )


SETTING = Setting(side=48, web=6_400, train=400, batch=32, lr=3e-3, vision_warmup=600)
ARMS = (
    arm("without", "no dictionary", 0),
    arm("small", "32 codes", 32),
    arm("middle", "128 codes", 128),
    arm("large", "512 codes", 512),
)

STUDY = Study(
    name="soho",
    title="SOHO's visual dictionary at small scale",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    setting=SETTING,
    notes=(
        f"Images become {(SETTING.side // SETTING.patch) ** 2} cells of {SETTING.patch} pixels, by the small "
        f"detector's CNN. In place of ImageNet's weights it has {SETTING.vision_warmup} updates of vision warm-up on "
        "the web images. It stays frozen during pretraining (the paper: ten of forty epochs); in tasks AdamW trains it "
        "like everything else. 32, 128 and 512 codes replace the paper's 1024, 2048 and 8192.",
        "A pair has one text of its own and one of another image. Without a dictionary there is no MVM; with one, its "
        "weight is 0.1 where the paper's is 1, as in the preset soho. One seed of a pilot had R@1 22 with 128 codes "
        "at 1, 33 at 0.1, and 41 without a dictionary; seeds differ by 5 to 7.",
        "Retrieval fuses each pair: one caption of each test image, and its own image among ten; the caption is false "
        "for the other nine. Fine-tuning ranks the own image against three others.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
