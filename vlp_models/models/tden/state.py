"""What TDEN hands from one of its modules, passes or decoding steps to the next.

Shape suffixes: B images, S visual tokens ([IMG] and R regions), K packed visual tokens, D hidden, V vocabulary,
N texts or hypotheses, M packed words.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing
from vlp_models.objectives.ranks import previous_rows


@dataclass(frozen=True, kw_only=True)
class VisualStates:
    """The object encoder's outputs, [K, D] each, one per layer (the embeddings if it has none), and where they stand in
    [B, S], [IMG] at 0.

    Nothing in it depends on text, so one encoding serves every pass over an image.
    """

    layers: tuple[Tensor, ...]
    packing: Packing

    @property
    def last_KD(self) -> Tensor:
        return self.layers[-1]

    def select(self, index_N: Tensor | None) -> VisualStates:
        """The images of these numbers; None: all of them."""
        if index_N is None:
            return self
        packing = Packing.of(self.packing.mask_BT.index_select(0, index_N))
        # Whole images are copied, so that the gradient adds images, not tokens.
        layers = (packing.pack(self.packing.pad(x).index_select(0, index_N)) for x in self.layers)
        return VisualStates(layers=tuple(layers), packing=packing)

    def last(self) -> VisualStates:
        """The last layer alone."""
        return VisualStates(layers=self.layers[-1:], packing=self.packing)

    def rolled(self) -> VisualStates:
        """Every sample gets the image of the sample before it in the whole batch, over all processes."""
        packing = Packing.of(previous_rows(self.packing.mask_BT))
        layers = (packing.pack(previous_rows(self.packing.pad(x))) for x in self.layers)
        return VisualStates(layers=tuple(layers), packing=packing)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the cross-modal decoder attends to: the image's keys and values in each of its layers.

    owner_N  int64: whose memory each text or hypothesis reads; None: text i that of image i
    source   the states it was projected from
    """

    layers: tuple[KeyValues, ...]
    mask: Tensor
    owner_N: Tensor | None
    source: Tensor

    @property
    def images(self) -> int:
        return self.mask.shape[0]


@dataclass(frozen=True, kw_only=True)
class Told:
    """MSG's part of a pass: what a second one takes over.

    logits_MV  of every word that is predicted, from the words before it, in row-major order of the batch
    at_BT      where it is predicted
    ids_BT     what the generation stream read
    packing    what its layers kept
    """

    logits_MV: Tensor
    at_BT: Tensor
    ids_BT: Tensor
    memory: Memory
    packing: Packing
