"""SOHO's sizes and settings. Where the paper decides, its choice is the default; model.py says where it doesn't."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vlp_models.data.pixels import Augmentation
from vlp_models.errors import ParamsError
from vlp_models.params.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Share

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}  # torchvision's, and most of timm's


@dataclass(frozen=True, kw_only=True)
class PublicSwitches:
    """Each at the paper's value, or at ours where it has none; the public code's stands behind it. public/model.py acts
    on them."""

    pool_first: bool = False  # True: pooling, which drops an odd row or column, before the 1x1 convolution
    gate: bool = False  # True: dictionary vectors go through a linear layer, then are mixed with the features by a gate
    square_mask: bool = False  # True: its bug, a padding mask as wide as it is high, whatever the images' shape
    tight_canvas: bool = False  # True: of the canvas only what a batch's images need is seen, in steps of 32 pixels
    padding_in_dictionary: bool = False  # True: padded cells are looked up and learnt, too
    plain_heads: bool = False  # True: words are told by the tied matrix alone; no biases
    code_scores: Literal["classifier", "cosine"] = "classifier"  # cosine: of state and code, without a temperature
    masked_code: Literal["of_each_pair", "of_one_place"] = "of_each_pair"  # of_one_place: one place for the whole batch
    masked_pairs: Literal["matched", "all"] = "matched"  # all: which pairs learn MLM and MVM

    def set_switches(self) -> list[str]:
        """Those that are not at the paper's value."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class SOHOConfig(PublicSwitches):
    """The paper's size is the default: ResNet-101, 12 layers of 768, 2048 codes, images of 600 by 1000 pixels.

    vocab_size is the data's. `PublicSwitches`: what the public code does differently (public/).
    """

    vocab_size: int

    # The images, as `PixelInput` takes them. `pad`: the longer side fits, the rest is masked. An image may lie or
    # stand, so a batch of both is square.
    height: PositiveInt = 1024
    width: PositiveInt = 1024
    longer: NonNegativeInt = 1000  # `pad`: the longer side at most; 0: as long as fits
    shorter: NonNegativeInt = 600  # `pad`: the shorter side at most; 0: as long as fits
    resize: Literal["pad", "squash", "crop"] = "pad"
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: list[float] = field(default_factory=lambda: list(IMAGENET["mean"]))  # of each channel, as the CNN learnt it
    std: list[float] = field(default_factory=lambda: list(IMAGENET["std"]))
    augment: list[Augmentation] = field(default_factory=list)
    crop_scale: list[float] = field(default_factory=lambda: [0.5, 1.0])

    # any of timm's names; its weights come from `vlp import-checkpoint`. `small`: the small detector's, 8 pixels a cell
    backbone: str = "resnet101"
    backbone_options: dict[str, Any] = field(default_factory=dict)  # for timm.create_model; of `small`: channels
    backbone_stage: int = -1  # which of its feature maps: the last one
    pool: PositiveInt = 2  # side of the max pooling behind the 1x1 convolution; 1: none
    neck_norm: Literal["batch", "none"] = "batch"

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    intermediate: PositiveInt = 3072
    layers: PositiveInt = 12
    max_positions: PositiveInt = 512
    dropout: Share = 0.1
    attention_dropout: Share = 0.1
    init_std: PositiveFloat = 0.02
    mask_id: int = 4  # of [MASK]: 4 in a vocabulary trained here, 103 in BERT's
    mask_scheme: Literal["bert", "mask"] = "bert"  # BERT's 80% [MASK], 10% random, 10% kept, or always [MASK]

    dictionary_size: NonNegativeInt = 2048  # k; 0: no dictionary, hence no MVM (the paper's baseline, table 7)
    dictionary_momentum: Share = 0.4  # gamma of equation 4; the paper names none, this is the public code's
    # paper: equation 4, of each code that was hit. released: moving averages of every code's count and sum
    dictionary_update: Literal["paper", "released"] = "paper"
    revive_after: NonNegativeInt = 0  # updates without a hit, after which a code is put where a feature is; 0: never
    mvm_probability: Share = 0.15  # of a pair, that one code of its image is hidden; the public code: 0.015
    # what tasks read of an image: the dictionary's input (section 4.2 finds it better) or what it was mapped to
    task_features: Literal["input", "dictionary"] = "input"

    fusion_hidden: NonNegativeInt = (
        0  # of a ReLU layer between [CLS] and a task's classifier; the public code's VQA: 3072
    )
    fusion_dropout: Share = 0.5  # behind it

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden % 4:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads}) and of 4")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ParamsError(f"config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.mask_scheme == "bert" and self.mask_id + 1 == self.vocab_size:
            raise ParamsError("config: mask_scheme `bert` draws words behind [MASK], but there are none")
        if self.gate and not self.dictionary_size:
            raise ParamsError("config: `gate` mixes features with the dictionary's vectors; it needs a dictionary_size")
        if len(self.mean) != 3 or len(self.std) != 3 or not all(0 < value < math.inf for value in self.std):
            raise ParamsError(f"config: mean {self.mean}, std {self.std}: of red, green and blue each; std above 0")
        if len(self.crop_scale) != 2:
            raise ParamsError(f"config: crop_scale {self.crop_scale}: two shares of the area, the smaller one first")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ParamsError(f"config: crop_scale {self.crop_scale}: above 0, at most 1, the smaller one first")
        if self.task_features == "dictionary" and not self.dictionary_size:
            raise ParamsError("config: `task_features: dictionary` needs a dictionary_size")
