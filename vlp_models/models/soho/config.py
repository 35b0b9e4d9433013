"""SOHO's sizes and options. Defaults are the paper's choices; model.py lists what the paper leaves open."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vlp_models.data.pixels import Augmentation
from vlp_models.errors import ParamsError
from vlp_models.params.schema import NonNegativeInt, PositiveFloat, PositiveInt, Share

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}  # torchvision's, and most of timm's


@dataclass(frozen=True, kw_only=True)
class PublicSwitches:
    """What the authors' public code (researchmm/soho) does differently (variants.py).

    Defaults are the paper's choices, or this model's where the paper is silent; comments give the public code's.
    """

    pool_first: bool = False  # True: pool before the 1x1 convolution, dropping an odd last row or column
    gate: bool = False  # True: a linear layer on dictionary vectors, then a gate that mixes them with the features
    square_mask: bool = False  # True: reproduce its bug, a padding mask as wide as it is high for any image shape
    tight_canvas: bool = False  # True: crop the canvas to a batch's largest images, in steps of 32 pixels
    padding_in_dictionary: bool = False  # True: padding is looked up and updates the dictionary as well
    plain_heads: bool = False  # True: words are predicted by the tied matrix alone; no biases
    code_scores: Literal["classifier", "cosine"] = "classifier"  # cosine of state and code, no temperature
    masked_code: Literal["of_each_pair", "of_one_place"] = (
        "of_each_pair"  # of_one_place: one cell position for the whole batch
    )
    masked_pairs: Literal["matched", "all"] = "matched"  # all: pairs that learn MLM and MVM

    def set_switches(self) -> list[str]:
        """Return the names of the switches that are not at the default."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class SOHOConfig(PublicSwitches):
    """The default is the paper's size: ResNet-101, 12 layers of 768, 2048 codes, images of 600 by 1000 pixels.

    vocab_size comes from the data.
    """

    vocab_size: int

    # Images, see `PixelInput`. `pad`: fit the longer side and mask the rest. The canvas is square because a batch may
    # mix landscape and portrait images.
    height: PositiveInt = 1024
    width: PositiveInt = 1024
    longer: NonNegativeInt = 1000  # `pad`: maximum of the longer side; 0: as long as fits
    shorter: NonNegativeInt = 600  # `pad`: maximum of the shorter side; 0: as long as fits
    resize: Literal["pad", "squash", "crop"] = "pad"
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: list[float] = field(default_factory=lambda: list(IMAGENET["mean"]))  # per channel, as in the CNN's training
    std: list[float] = field(default_factory=lambda: list(IMAGENET["std"]))
    augment: list[Augmentation] = field(default_factory=list)
    crop_scale: list[float] = field(default_factory=lambda: [0.5, 1.0])

    # A model name of timm; its weights come from `vlp import-checkpoint`. `small`: the small detector's CNN, stride 8
    backbone: str = "resnet101"
    backbone_options: dict[str, Any] = field(default_factory=dict)  # for timm.create_model; for `small`: channels
    backbone_stage: int = -1  # index of its feature map; -1: the last
    pool: PositiveInt = 2  # side of the max pooling after the 1x1 convolution; 1: no pooling
    neck_norm: Literal["batch", "none"] = "batch"

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    intermediate: PositiveInt = 3072
    layers: PositiveInt = 12
    max_positions: PositiveInt = 512
    dropout: Share = 0.1
    attention_dropout: Share = 0.1
    images_per_text: PositiveInt = 1  # of a text, in one sequence; above 1: a learned vector for each later image
    init_std: PositiveFloat = 0.02
    mask_id: int = 4  # [MASK]: 4 in a vocabulary trained by this pipeline, 103 in BERT's
    mask_scheme: Literal["bert", "mask"] = "bert"  # BERT's 80% [MASK], 10% random, 10% kept, or always [MASK]

    dictionary_size: NonNegativeInt = 2048  # k; 0: no dictionary and no MVM (the paper's baseline, table 7)
    dictionary_momentum: Share = 0.4  # gamma of equation 4; not in the paper, this is the public code's
    # paper: equation 4, for the codes that were hit. released: moving averages of every code's count and sum
    dictionary_update: Literal["paper", "released"] = "paper"
    revive_after: NonNegativeInt = 0  # updates without a hit after which a code is moved to a feature; 0: never
    mvm_probability: Share = 0.15  # that one code of a pair's image is hidden; the public code: 0.015
    # What tasks read: the dictionary's input (better, section 4.2) or its output
    task_features: Literal["input", "dictionary"] = "input"

    fusion_hidden: NonNegativeInt = 0  # width of a ReLU layer before a task's classifier; the public code's VQA: 3072
    fusion_dropout: Share = 0.5  # after that layer

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden % 4:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads}) and of 4")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ParamsError(f"config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.gate and not self.dictionary_size:
            raise ParamsError("config: `gate` mixes features with dictionary vectors; it needs a dictionary_size")
        if len(self.mean) != 3 or len(self.std) != 3 or not all(0 < value < math.inf for value in self.std):
            raise ParamsError(f"config: mean {self.mean} and std {self.std} must have three values each, std above 0")
        if len(self.crop_scale) != 2:
            raise ParamsError(
                f"config: crop_scale {self.crop_scale} must be two shares of the area, the smaller one first"
            )
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ParamsError(
                f"config: crop_scale {self.crop_scale} must be above 0 and at most 1, the smaller one first"
            )
        if self.task_features == "dictionary" and not self.dictionary_size:
            raise ParamsError("config: `task_features: dictionary` needs a dictionary_size")
