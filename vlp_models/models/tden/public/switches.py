"""What the authors' public code (YehLi/xmodaler) does where the paper is silent or says otherwise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PublicSwitches:
    """Each at the paper's value; the public code's stands behind it. public/model.py acts on them."""

    separate_ffn: bool = False  # True: one feed-forward net per modality in the cross-modal encoder
    # cross_encoder: in pretraining the decoder attends to the image after the cross-modal encoder, which has seen the
    # caption through MLM's path. Captioning always attends to the object encoder's output
    decoder_visual_source: Literal["object_encoder", "cross_encoder"] = "object_encoder"
    ism_pooling: Literal["last", "all_layers"] = "last"  # all_layers: which object encoder layers ISM pools
    pooler_batch_norm: bool = False  # True: after ISM's poolers
    use_decoder_in_fusion: bool = True  # False in the public code's VCR: VQA's feature without the decoder's part
    understanding_decoder_mask: Literal["causal", "bidirectional"] = "causal"  # bidirectional
    fusion_pooling: Literal["last", "all_layers"] = (
        "last"  # all_layers: cross-encoder layers whose image states VQA pools
    )
    fusion: Literal["sum", "product"] = "sum"  # product: of pooled image and text; the sum is MCAN's
    fusion_decoder: Literal["added", "apart"] = "added"  # apart: the decoder's part is a feature of its own
    fusion_norm_eps: float = 1e-12  # 1e-5
    segment_types: bool = False  # True in VCR: type 1 for a text's last segment

    def set_switches(self) -> list[str]:
        """Those that are not at the paper's value."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]
