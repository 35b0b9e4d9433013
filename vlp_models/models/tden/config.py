"""TDEN's sizes and switches. Where the paper decides, its choice is the default; model.py says where it doesn't."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlp_models.errors import ParamsError


@dataclass(frozen=True, kw_only=True)
class TDENConfig:
    """The paper's size is the default: 768 wide, 12 heads, 6 object, 12 sentence, 6 + 6 cross-modal layers."""

    vocab_size: int
    feature_dim: int  # of one detected region; the paper's detector: 2048
    num_classes: int  # of the detector, background included; 0: no class probabilities, hence no MOC

    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    object_layers: int = 6  # K_I
    sentence_layers: int = 12  # K_S
    encoder_layers: int = 6  # K_E
    decoder_layers: int = 6  # K_D
    dropout: float = 0.1
    attention_dropout: float = 0.1
    max_positions: int = 512
    layer_norm_eps: float = 1e-12
    embedding_norm_eps: float = 1e-5  # 1e-12 would turn a blank region's gradient into 1e6 times itself
    init_std: float = 0.02
    mask_id: int = 4  # of [MASK]: 4 in a vocabulary trained here, 103 in BERT's

    # decoupled: a cross-modal encoder and a decoder. The paper's ablations: two_stream has one stack of
    # `encoder_layers` for both (`decoder_layers` has no meaning); single_stream has that stack alone, right on the
    # embeddings (nor have `object_layers` and `sentence_layers`).
    structure: Literal["decoupled", "two_stream", "single_stream"] = "decoupled"
    ism_source: Literal["unimodal", "cross_modal"] = (
        "unimodal"  # cross_modal: mismatched pairs in the encoder (*, table 2)
    )
    separate_region_norms: bool = False  # normalise feature and location before they are added, as UNITER and LXMERT do
    tie_lm_head: bool = True  # as BERT; the public checkpoints are untied
    separate_ffn: bool = False  # the public code's cross-encoder: one feed-forward net per modality
    decoder_visual_source: Literal["object_encoder", "cross_encoder"] = "object_encoder"  # captioning: always the first
    ism_pooling: Literal["last", "all_layers"] = "last"  # which object encoder layers ISM pools
    similarity_dim: int | None = None  # of ISM's vectors; None: hidden. The public code: 1024
    pooler_batch_norm: bool = False  # after ISM's poolers, as the public code
    use_decoder_in_fusion: bool = True  # VQA's holistic feature from cross-modal encoder and decoder
    understanding_decoder_mask: Literal["causal", "bidirectional"] = "causal"
    fusion_pooling: Literal["last", "all_layers"] = "last"  # cross-encoder layers whose image states VQA pools
    fusion: Literal["sum", "product"] = "sum"  # of pooled image and text: MCAN's sum, or the public code's product
    fusion_decoder: Literal["added", "apart"] = "added"  # the decoder's part of it; apart: a feature of its own
    fusion_dim: int | None = None  # of the holistic feature; None: hidden. The public code's VCR: 1024
    fusion_norm_eps: float = 1e-12  # the public code: 1e-5
    segment_types: bool = False  # type 1 for a text's last segment, as the public code's VCR has it

    mask_scheme: Literal["mask", "bert"] = "mask"  # always [MASK], or BERT's 80% [MASK], 10% random, 10% kept
    zero_overlapping_regions: bool = False  # MOC hides regions with IoU > 0.4 to a masked one, too
    ism_margin: float = 0.2
    ism_negatives: Literal["all", "hardest"] = "all"

    @property
    def shared(self) -> bool:
        """One stack understands and generates."""
        return self.structure != "decoupled"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ParamsError(f"model.config: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if min(self.object_layers, self.sentence_layers, self.encoder_layers, self.decoder_layers) < 1:
            raise ParamsError("model.config: TDEN needs at least one layer in each of its four modules")
        for name, value in (("separate_ffn", True), ("decoder_visual_source", "cross_encoder")):
            if self.shared and getattr(self, name) == value:
                raise ParamsError(
                    f"model.config: `{name}: {value}` is for the decoupled structure, not {self.structure}"
                )
        if not 0 <= self.mask_id < self.vocab_size:
            raise ParamsError(f"model.config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.mask_scheme == "bert" and self.mask_id + 1 == self.vocab_size:
            raise ParamsError("model.config: mask_scheme `bert` draws words behind [MASK], but there are none")
