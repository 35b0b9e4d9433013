"""What the authors' public code (researchmm/soho) does where the paper is silent or says otherwise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal


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
