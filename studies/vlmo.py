"""VLMo's claims (tables 3 and 4), tested at small scale: contrasts written down before the runs.

    make ablations-vlmo    (runs python studies/vlmo.py; --help lists its other options)

The contrasts are in vlmo.toml, next to this file. Writes benchmarks/results/study-vlmo.md and
benchmarks/results/study-vlmo.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.setting import Setting
from pretraining_study.study import Study, main

UPDATES = 300  # on pairs: every pair of the web one and a half times
STAGE = 150  # on images alone, and on texts alone
ALL = ("itc", "itm", "mlm")
FROZEN = ("image_embedding",)  # frozen after the vision warm-up
IMAGES = Pretraining(objectives=("mim",), updates=STAGE, reads="images", frozen=FROZEN)
# Attention and the vision side stay as the image stage left them (section 3.4).
TEXTS = Pretraining(
    objectives=("mlm",),
    updates=STAGE,
    reads="texts",
    frozen=("attention", "vision_expert", *FROZEN),
)


def pairs(*objectives: str) -> Pretraining:
    return Pretraining(objectives=objectives, updates=UPDATES, frozen=FROZEN)


def arm(name: str, label: str, *pretraining: Pretraining, **more: Any) -> Arm:
    return Arm(
        name=name,
        label=label,
        family="vlmo",
        pretraining=pretraining,
        fine_tuning=FineTuning(budgets=(150,)),
        tasks=("vqa", "retrieval"),
        **more,
    )


SETTING = Setting(side=48, patch=8, web=6_400, train=100, batch=32, lr=3e-3, vision_warmup=600)
ARMS = (
    arm("all", "ITC + ITM + MLM", pairs(*ALL)),
    arm("itc", "ITC alone", pairs("itc")),
    arm("standard", "one feed-forward net for all", pairs(*ALL), config={"feed_forward": "shared"}),
    arm("no-vl-expert", "no vision-language expert", pairs(*ALL), config={"vl_start": 3 * SETTING.layers}),
    arm("images", "images first", IMAGES, pairs(*ALL)),
    arm("images-texts", "images, then texts first", IMAGES, TEXTS, pairs(*ALL)),
)

STUDY = Study(
    name="vlmo",
    title="VLMo's pretraining at small scale",
    script=Path(__file__).resolve(),
    arms=ARMS,
    contrasts=Path(__file__).resolve().with_suffix(".toml"),
    setting=SETTING,
    notes=(
        f"Images are {(SETTING.side // SETTING.patch) ** 2} patches of {SETTING.patch} pixels; the last layer has the "
        "vision-language expert. The small detector's CNN precedes the patches, which is not the paper's. In place of "
        f"weights from a million labeled images it has {SETTING.vision_warmup} updates of vision warm-up on the web "
        "images. It stays frozen during pretraining, and is trained in tasks.",
        "VQA is in the place of the paper's NLVR2, by fusion; retrieval is by the two encoders, by contrast.",
        f"Images alone and texts alone are the web's own, {STAGE} updates each: the paper's came from elsewhere, and "
        "far more of them. Visual tokens are the stand-in's (models/vlmo/image_tokens.py). What starts from neither "
        "starts from that warm-up alone, where the paper's table 4 starts from ViT's weights.",
        "Only vision experts and attention take over what images taught; in the paper's first row of table 3 the other "
        "experts begin with it, too. On pairs all parts learn, as in the paper.",
    ),
)

if __name__ == "__main__":
    main(STUDY)
