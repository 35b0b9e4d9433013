"""VLMo's sizes and options. Defaults are the paper's choices; model.py lists what the paper leaves open."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from vlp_models.data.pixels import Augmentation
from vlp_models.errors import ParamsError
from vlp_models.params.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share
from vlp_models.vision.small_backbone import STRIDE

HALF = 0.5  # mean and standard deviation of the pixels that VLMo reads


@dataclass(frozen=True, kw_only=True)
class PublicSwitches:
    """What the authors' public code (microsoft/unilm, vlmo) does differently.

    Defaults are the paper's choices, or this model's where the paper is silent; comments give the public code's.
    """

    # both: a second contrastive loss, of image and text encoded separately by the vision-language experts, with its own
    # projections and temperature; the two losses are averaged
    contrast: Literal["unimodal", "both"] = "unimodal"  # both
    max_scale: NonNegativeFloat = 100.0  # limit of 1 / temperature; 0: no limit, as in the public code
    # True: pairs of the same image are each other's negatives, in contrast and matching
    same_image_negatives: bool = False
    whole_words: bool = False  # True: MLM masks all pieces of a word together
    second_image_type: bool = False  # True: the second image of a sample (NLVR2) has its own type embedding
    # mlp: Linear, LayerNorm, GELU to twice the width before a task's classifier (the public code's VQA)
    classifier: Literal["linear", "mlp"] = "linear"

    def set_switches(self) -> list[str]:
        """Return the names of the switches that are not at the default."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class VLMoConfig(PublicSwitches):
    """The default is VLMo-Base: 12 layers of 768, 12 heads. VLMo-Large: 24 of 1024, 16, intermediate 4096, vl_start 21.

    vocab_size and mask_id come from the data.
    """

    vocab_size: int
    mask_id: int = 103  # [MASK]: 4 in a vocabulary trained by this pipeline, 103 in BERT's

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    layers: PositiveInt = 12
    intermediate: PositiveInt = 3072
    vl_start: NonNegativeInt = 10  # first layer, from 0, with a vision-language expert; `layers`: no such expert
    # shared: one feed-forward net for all tokens, a standard transformer ("Std TRM" of table 4); vl_start is ignored
    feed_forward: Literal["experts", "shared"] = "experts"

    side: PositiveInt = 224  # pixels; images are resized to this square
    patch: PositiveInt = 16  # pixels of a patch's side
    # linear: the paper's projection. A CNN before it (embeddings.py): `convolutions`, a small one, or `timm`
    stem: Literal["linear", "convolutions", "timm"] = "linear"
    stem_channels: list[PositiveInt] = field(
        default_factory=lambda: [24, 48, 96]
    )  # for `convolutions`: widths of its blocks; stride 8
    stem_backbone: str = ""  # for `timm`: the CNN's model name
    stem_stage: int = -1  # for `timm`: index of the CNN's feature map; -1: the last
    max_positions: PositiveInt = 196  # maximum tokens of a text, including [CLS] and [SEP]
    positions: Literal["relative", "absolute"] = "relative"  # biases between tokens, or added embeddings
    # interpolate biases (or embeddings) of initial weights with another number of patches
    interpolate_positions: bool = False

    layer_scale: NonNegativeFloat = 0.1  # initial value of the learned scales of both sub-layers; 0: no scales
    drop_path: Share = 0.1  # of the last layer; rises linearly from 0 in the first
    dropout: Share = 0.1  # of text embeddings
    layer_norm_eps: PositiveFloat = 1e-6
    embedding_norm_eps: PositiveFloat = 1e-12  # of text embeddings and of the word head
    images_per_text: PositiveInt = 1  # of a text, in one sequence; above 1: a learned vector for each later image
    init_std: PositiveFloat = 0.02
    temperature: PositiveFloat = 0.07  # initial value of the learned temperature

    mask_scheme: Literal["mask", "bert"] = "bert"  # always [MASK], or BERT's 80% [MASK], 10% random, 10% kept
    # Masked image modeling, the first stage: number of visual tokens; 0: no MIM, as when starting from BEiT's weights
    image_codes: NonNegativeInt = 0
    image_tokenizer: str = ""  # path of a dVAE's weights (8,192 codes); empty: image_tokens.py's stand-in
    image_mask_share: Share = 0.4  # share of patches to mask, in blocks

    # The paper uses RandAugment; its code also crops, and flips even if a text mentions left or right
    augment: list[Augmentation] = field(default_factory=lambda: ["random_resized_crop"])
    crop_scale: list[Share] = field(default_factory=lambda: [0.5, 1.0])

    @property
    def grid(self) -> int:
        """Return the number of patches along a side."""
        return self.side // self.patch

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.side % self.patch:
            raise ParamsError(f"config: side ({self.side}) must be a multiple of patch ({self.patch})")
        if self.stem == "convolutions" and self.patch % STRIDE:
            raise ParamsError(f"config: patch ({self.patch}) must be a multiple of {STRIDE} with `stem: convolutions`")
        if self.stem == "timm" and self.stem_backbone in ("", "small"):
            raise ParamsError(
                f"config: stem_backbone ({self.stem_backbone!r}) must be a CNN of timm with `stem: timm`, such as "
                "tf_efficientnet_lite0; the small CNN is `stem: convolutions`"
            )
        if len(self.stem_channels) != 3:
            raise ParamsError(f"config: stem_channels ({self.stem_channels}) must be three widths")
        if self.vl_start > self.layers:
            raise ParamsError(f"config: vl_start ({self.vl_start}) must be at most layers ({self.layers})")
        if self.max_positions < 3:
            raise ParamsError("config: max_positions must hold [CLS], a word and [SEP]")
        if len(self.crop_scale) != 2:
            raise ParamsError(f"config: crop_scale ({self.crop_scale}) must be two shares of the area")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ParamsError(f"config: crop_scale ({self.crop_scale}) must be above 0, the smaller share first")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ParamsError(f"config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.contrast == "both" and (self.vl_start == self.layers or self.feed_forward == "shared"):
            raise ParamsError(
                "config: `contrast: both` needs vision-language experts: vl_start below layers, feed_forward: experts"
            )
