"""Unified VLP's config. The paper's values are the defaults; model.py lists the choices where it is silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlp_models.errors import ParamsError
from vlp_models.params.schema import PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class UnifiedVLPConfig:
    """The paper's size is the default: BERT-base.

    The data determines the first six.
    """

    vocab_size: int
    feature_dim: int  # of one detected region; the paper's detector: 2048
    num_classes: int  # of the detector, background included; 0: no class probabilities
    cls_id: int = 2
    sep_id: int = 3
    mask_id: int = 4  # in a vocabulary trained here; 101, 102 and 103 in BERT's

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    intermediate: PositiveInt = 3072
    layers: PositiveInt = 12
    max_positions: PositiveInt = 512
    region_slots: int = 100  # positions reserved for regions: [SEP] has position region_slots + 1
    dropout: Share = 0.1
    attention_dropout: Share = 0.1
    feature_dropout: float = 0.0  # the same entries of all regions of an image
    layer_norm_eps: PositiveFloat = 1e-5
    images_per_text: PositiveInt = 1  # of a text, in one sequence; above 1: a learned vector for each later image
    init_std: PositiveFloat = 0.02
    # of the region embedding and VQA's first layer: torch's default, which depends on the width, or N(0, init_std)
    image_init: Literal["torch", "normal"] = "torch"

    # input: class probabilities are part of the region embedding (equation 1). pretext: they are the targets of masked
    # regions, objective `moc` (table 6). none: not used
    region_classes: Literal["input", "pretext", "none"] = "input"
    mask_scheme: Literal["mask", "bert"] = "bert"  # always [MASK], or 80% [MASK], 10% random, 10% unchanged
    max_masked: int = 3  # words of a sentence, as in the authors' code; 0: no limit
    mask_question: bool = False  # VQA masks a word of each training question, as the authors' code does
    # the region embedding of the authors' checkpoints (regions.py), and their beam search (decoding/search.py)
    compat_reference: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if not 0 <= self.feature_dropout < 1:
            raise ParamsError(f"config: feature_dropout ({self.feature_dropout}) must be from 0 to below 1")
        if self.max_masked < 0:
            raise ParamsError(f"config: max_masked: {self.max_masked} must be zero (no limit) or more")
        if self.region_slots < 0 or self.max_positions < self.region_slots + 4:
            raise ParamsError(
                f"config: max_positions ({self.max_positions}) must hold region_slots ({self.region_slots}), [CLS], "
                "[SEP] and a sentence"
            )
        if self.compat_reference and (self.region_classes != "input" or not self.num_classes):
            raise ParamsError(
                "config: compat_reference reads class probabilities; it needs `region_classes: input` and features "
                "that have them"
            )
        special = {"cls_id": self.cls_id, "sep_id": self.sep_id, "mask_id": self.mask_id}
        for name, number in special.items():
            if not 0 <= number < self.vocab_size:
                raise ParamsError(f"config: {name} {number} is outside the vocabulary of {self.vocab_size}")

    @property
    def max_text(self) -> int:
        """The largest number of tokens of a text, [CLS] and [SEP] included."""
        return self.max_positions - self.region_slots - 1
