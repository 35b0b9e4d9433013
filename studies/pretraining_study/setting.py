"""The set-up of a study, in numbers. Two results are comparable where their settings are equal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from pretraining_study.arms import TASKS
from vlp_models.synthetic.scenes.captions import Noise


@dataclass(frozen=True, kw_only=True)
class Setting:
    """
    scene_seed       of all scenes; a study's seeds draw the 100 target images, weights, order and masks
    web              scenes with one noisy alt text each: what is pretrained on, the same for every seed
    train            target images a seed: five clean captions and `questions` questions each
    val, test        target images, the same for every seed
    tasks            what the target has: captioning, vqa, retrieval, entailment, nlvr2, vcr
    feature_dim      of a region: its symbols through a fixed random projection
    feature_noise    standard deviation of the noise added to each symbol (0 or 1) before the projection
    side, patch      of a drawn scene and of a patch of it, in pixels. side 0: nothing is drawn, models read regions
    vision_warmup    updates of the vision warm-up before everything else (vision_warmup.py); 0: none
    hidden, layers   of the model; sizes.py makes each family's of them
    batch            of pretraining, captioning, VQA and retrieval alike
    """

    scene_seed: int = 2021
    web: int = 12_800
    noise: Noise = field(default_factory=Noise)
    train: int = 100
    val: int = 100
    test: int = 300
    questions: int = 6
    feature_dim: int = 32
    feature_noise: float = 0.3
    side: int = 0
    patch: int = 8
    vision_warmup: int = 0
    hidden: int = 64
    heads: int = 4
    layers: int = 1
    batch: int = 64
    lr: float = 2e-3
    max_text_len: int = 32
    tasks: tuple[str, ...] = TASKS

    def fingerprint(self, *others: Any) -> str:
        """Of the setting and of whatever else decides a result: a result with another one is not of this study."""
        plain = [dataclasses.asdict(self), *map(_plain, others)]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
