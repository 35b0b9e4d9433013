"""TDEN's config. The paper's values are the defaults; model.py lists the choices where it is silent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vlp_models.errors import ParamsError
from vlp_models.params.schema import PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class PublicSwitches:
    """What the authors' code (YehLi/xmodaler) does where the paper is silent or differs; see `PublicTDEN`.

    The defaults are the paper's; the comments name the value of the authors' code.
    """

    separate_ffn: bool = False  # True: one feed-forward net per modality in the cross-modal encoder
    # cross_encoder: in pretraining the decoder attends to the image after the cross-modal encoder, which has read the
    # caption in MLM's path. Captioning always attends to the object encoder's output
    decoder_visual_source: Literal["object_encoder", "cross_encoder"] = "object_encoder"
    ism_pooling: Literal["last", "all_layers"] = "last"  # all_layers: ISM pools every object encoder layer
    pooler_batch_norm: bool = False  # True: after ISM's poolers
    use_decoder_in_fusion: bool = True  # False for VCR: no decoder part in the holistic feature
    understanding_decoder_mask: Literal["causal", "bidirectional"] = "causal"  # bidirectional
    # all_layers: the holistic feature pools the image's states after every cross-modal encoder layer
    fusion_pooling: Literal["last", "all_layers"] = "last"
    fusion: Literal["sum", "product"] = "sum"  # product of pooled image and text; the sum is MCAN's
    fusion_decoder: Literal["added", "apart"] = "added"  # apart: the decoder's part is a feature of its own
    fusion_norm_eps: float = 1e-12  # 1e-5
    segment_types: bool = False  # True for VCR: type 1 for a text's last segment

    def set_switches(self) -> list[str]:
        """Return the names of the switches that differ from the paper's value."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class TDENConfig(PublicSwitches):
    """The paper's size is the default: 768 wide, 12 heads, 6 object, 12 sentence, 6 + 6 cross-modal layers.

    The data determines the first three. `structure` and `ism_source` are the paper's ablations (variants.py).
    """

    vocab_size: int
    feature_dim: int  # of one detected region; the paper's detector: 2048
    num_classes: int  # of the detector, background included; 0: no class probabilities, hence no MOC

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    intermediate: PositiveInt = 3072
    object_layers: PositiveInt = 6  # K_I
    sentence_layers: PositiveInt = 12  # K_S
    encoder_layers: PositiveInt = 6  # K_E
    decoder_layers: PositiveInt = 6  # K_D
    similarity_dim: PositiveInt | None = None  # of ISM's vectors; None: hidden. The authors' code: 1024
    fusion_dim: PositiveInt | None = None  # of the holistic feature; None: hidden. The authors' code for VCR: 1024
    max_positions: PositiveInt = 512
    dropout: Share = 0.1
    attention_dropout: Share = 0.1
    feature_dropout: float = 0.0  # from 0 to below 1; the same entries of all regions of an image
    layer_norm_eps: PositiveFloat = 1e-12
    embedding_norm_eps: PositiveFloat = 1e-5  # with 1e-12 the gradient of a blank region would grow by a factor of 1e6
    images_per_text: PositiveInt = 1  # of a text, in one sequence; above 1: a learned vector for each later image
    init_std: PositiveFloat = 0.02
    mask_id: int = 4  # of [MASK]: 4 in a vocabulary trained here, 103 in BERT's
    separate_region_norms: bool = False  # normalize feature and location before adding them, as UNITER and LXMERT do
    tie_lm_head: bool = True  # as in BERT; the authors' checkpoints are untied

    mask_scheme: Literal["mask", "bert"] = "mask"  # always [MASK], or BERT's 80% [MASK], 10% random, 10% unchanged
    zero_overlapping_regions: bool = False  # MOC also hides regions with IoU > 0.4 to a masked one
    ism_margin: float = 0.2
    ism_negatives: Literal["all", "hardest"] = "all"
    ism_residual: bool = False  # ISM also reads the mean region past the object encoder; in neither paper nor its code

    # decoupled: a cross-modal encoder and a decoder. two_stream: one stack of `encoder_layers` for both
    # (`decoder_layers` has no effect). single_stream: that stack alone, directly on the embeddings (neither have
    # `object_layers` and `sentence_layers`).
    structure: Literal["decoupled", "two_stream", "single_stream"] = "decoupled"
    # cross_modal: ISM after the cross-modal encoder, which then reads mismatched pairs (*, table 2)
    ism_source: Literal["unimodal", "cross_modal"] = "unimodal"

    @property
    def is_ablation(self) -> bool:
        return self.structure != "decoupled" or self.ism_source != "unimodal"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if not 0 <= self.feature_dropout < 1:
            raise ParamsError(f"config: feature_dropout ({self.feature_dropout}) must be from 0 to below 1")
        if self.is_ablation and self.set_switches():
            name = self.set_switches()[0]
            raise ParamsError(
                f"config: `{name}: {getattr(self, name)}` is for the authors' code, which has no ablations; it cannot "
                f"be combined with `structure: {self.structure}`, `ism_source: {self.ism_source}`"
            )
        if not 0 <= self.mask_id < self.vocab_size:
            raise ParamsError(f"config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
