"""VLMo's sizes and settings. Where the paper decides, its choice is the default; model.py says where it doesn't."""

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
    """Each at the paper's value, or where the paper is silent at ours; the public code's stands behind it."""

    # both: a second contrast, of the same image and text run through the vision-language experts apart, with
    # projections and a temperature of its own; the two losses are averaged
    contrast: Literal["unimodal", "both"] = "unimodal"  # both
    max_scale: NonNegativeFloat = 100.0  # of one divided by the temperature; 0: no limit, as there
    # True: pairs of one image are each other's negatives, in contrast and in matching; nothing there knows of them
    same_image_negatives: bool = False
    whole_words: bool = False  # True: MLM masks all pieces of a word together
    second_image_type: bool = False  # True: the second of a sample's images (NLVR2) has a type of its own
    # mlp: Linear, LayerNorm, GELU onto twice the width between the pooler and a task's classifier (VQA's there)
    classifier: Literal["linear", "mlp"] = "linear"

    def set_switches(self) -> list[str]:
        """Those that are not at the default."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class VLMoConfig(PublicSwitches):
    """VLMo-Base is the default: 12 layers, 768 wide, 12 heads. VLMo-Large: 24, 1024, 16, intermediate
    4096, vl_start 21.

    vocab_size and mask_id are the data's. `PublicSwitches`: what the public code does differently.
    """

    vocab_size: int
    mask_id: int = 103  # of [MASK]: 4 in a vocabulary trained here, 103 in BERT's

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    layers: PositiveInt = 12
    intermediate: PositiveInt = 3072
    vl_start: NonNegativeInt = 10  # the first layer, from 0, with a vision-language expert; `layers`: there is none
    # shared: one feed-forward net for all, a standard transformer ("Std TRM" of table 4); vl_start has no meaning
    feed_forward: Literal["experts", "shared"] = "experts"

    side: PositiveInt = 224  # pixels, of the square that every image becomes
    patch: PositiveInt = 16  # pixels, of a patch's side
    # linear: the paper's projection. Before it, for a model that learns to see from little: convolutions, a small CNN;
    # timm, one of timm's, for which pretrained weights may be had (cnn_stem.py)
    stem: Literal["linear", "convolutions", "timm"] = "linear"
    stem_channels: list[PositiveInt] = field(default_factory=lambda: [24, 48, 96])  # of `convolutions`, 8 pixels a cell
    stem_backbone: str = ""  # of `timm`: its name of the CNN
    stem_stage: int = -1  # of `timm`: which of the CNN's feature maps; the last one
    max_positions: PositiveInt = 196  # tokens of a text; [CLS] and [SEP] included
    positions: Literal["relative", "absolute"] = "relative"  # biases between tokens, or embeddings added to them
    # take over biases (or embeddings) of a start with another number of patches, interpolated
    interpolate_positions: bool = False

    layer_scale: NonNegativeFloat = 0.1  # where the learnt scales of both sub-layers begin; 0: there are none
    drop_path: Share = 0.1  # of the last layer; it rises from 0 in the first
    dropout: Share = 0.1  # of text embeddings
    layer_norm_eps: PositiveFloat = 1e-6
    embedding_norm_eps: PositiveFloat = 1e-12  # of text embeddings and of the word head
    init_std: PositiveFloat = 0.02
    temperature: PositiveFloat = 0.07  # where the learnt one begins

    mask_scheme: Literal["mask", "bert"] = "bert"  # always [MASK], or BERT's 80% [MASK], 10% random, 10% kept
    # Masked image modelling, the first stage: so many visual tokens; 0: it is not learnt, as with weights of BEiT's
    image_codes: NonNegativeInt = 0
    image_tokenizer: str = ""  # path of the dVAE's weights (8,192 codes); empty: the stand-in of image_tokens.py
    image_mask_share: Share = 0.4  # of the patches, in blocks

    # the paper: RandAugment; its code crops before it, and mirrors, also where a text says left or right
    augment: list[Augmentation] = field(default_factory=lambda: ["random_resized_crop"])
    crop_scale: list[Share] = field(default_factory=lambda: [0.5, 1.0])

    @property
    def grid(self) -> int:
        """Patches along a side."""
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
                f"config: stem_backbone ({self.stem_backbone!r}) must be timm's name of a CNN with `stem: timm`, as in "
                "tf_efficientnet_lite0; the small CNN is `stem: convolutions`"
            )
        if len(self.stem_channels) != 3:
            raise ParamsError(f"config: stem_channels ({self.stem_channels}) must be three widths")
        if self.vl_start > self.layers:
            raise ParamsError(f"config: vl_start ({self.vl_start}) is behind the last of {self.layers} layers")
        if self.max_positions < 3:
            raise ParamsError("config: max_positions must hold [CLS], a word and [SEP]")
        if len(self.crop_scale) != 2:
            raise ParamsError(f"config: crop_scale ({self.crop_scale}) must be two shares of the area")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ParamsError(f"config: crop_scale ({self.crop_scale}) must be above 0, the smaller share first")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ParamsError(f"config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.mask_scheme == "bert" and self.mask_id + 1 == self.vocab_size:
            raise ParamsError("config: mask_scheme `bert` draws words behind [MASK], but there are none")
        if self.contrast == "both" and (self.vl_start == self.layers or self.feed_forward == "shared"):
            raise ParamsError("config: `contrast: both` runs vision-language experts, but there are none")
