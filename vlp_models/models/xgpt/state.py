"""What XGPT passes from one part to the next.

Shape suffixes: B images or encoded texts, R places, K packed regions, D hidden, N texts or hypotheses, U tokens of an
infilled sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing
from vlp_models.objectives.masked_modeling import Corruption

T = TypeVar("T", Tensor, KeyValues)


@dataclass(frozen=True, kw_only=True)
class ImageStates:
    """Regions before the encoder, [K, D], and their packing in [B, R]; nothing in it depends on text.

    embedded_KD  the paper's x^I, without dropout except that of features: TIFG's target
    refined_KD   after attention on attention: what the encoder reads
    """

    embedded_KD: Tensor
    refined_KD: Tensor
    packing: Packing

    def select(self, index_N: Tensor | None) -> ImageStates:
        """Return the images at these indices; None: all of them."""
        if index_N is None:
            return self
        packing = Packing.of(self.packing.mask_BT.index_select(0, index_N))
        # Whole images are copied, so the gradient adds images and not regions.
        embedded = packing.pack(self.packing.pad(self.embedded_KD).index_select(0, index_N))
        refined = packing.pack(self.packing.pad(self.refined_KD).index_select(0, index_N))
        return ImageStates(embedded_KD=embedded, refined_KD=refined, packing=packing)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the decoder attends to: keys and values for each of its layers.

    mask     bool [B, 1, 1, R]
    owner_N  int64: the row of the memory that each text or hypothesis reads; None: text i reads row i
    """

    layers: tuple[KeyValues, ...]
    mask: Tensor
    owner_N: Tensor | None

    @property
    def images(self) -> int:
        return self.mask.shape[0]

    def of_texts(self, rows: T) -> T:
        """Copy rows of the memory for each text that reads them."""
        if self.owner_N is None:
            return rows
        return rows.select(self.owner_N) if isinstance(rows, KeyValues) else rows.index_select(0, self.owner_N)


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(Corruption):
    """What IMLM and IDA hide. IMLM's part is in the base class: its fragment is `words_BT`.

    infilled_BU, infilled_mask_BU  int64 and bool: the sentences with IDA's spans replaced; None without IDA
    """

    infilled_BU: Tensor | None = None
    infilled_mask_BU: Tensor | None = None
