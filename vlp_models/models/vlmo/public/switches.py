"""What the authors' public code (microsoft/unilm, vlmo) does where the paper is silent or says otherwise.

Its weights of losses are a recipe's: `objectives: {itc: 1.0, itm: 1.0, mlm: 0.25}`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vlp_models.params.ranges import NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class PublicSwitches:
    """Each at the paper's value, or where the paper is silent at ours; the public code's stands behind it."""

    # both: a second contrast, of the same image and text run through the vision-language experts apart, with
    # projections and a temperature of its own; the two losses are averaged
    contrast: Literal["unimodal", "both"] = "unimodal"  # both
    max_scale: NonNegativeFloat = 100.0  # of one divided by the temperature; 0: no limit, as there
    # True: pairs of one image are each other's negatives, in contrast and in matching; nothing there knows of them
    twins_are_negatives: bool = False
    whole_words: bool = False  # True: MLM masks all pieces of a word together
    second_image_type: bool = False  # True: the second of a sample's images (NLVR2) has a type of its own
    # mlp: Linear, LayerNorm, GELU onto twice the width between the pooler and a task's classifier (VQA's there)
    classifier: Literal["linear", "mlp"] = "linear"

    def set_switches(self) -> list[str]:
        """Those that are not at the default."""
        fields = dataclasses.fields(PublicSwitches)
        return [field.name for field in fields if getattr(self, field.name) != field.default]
