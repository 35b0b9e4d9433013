"""What TDEN passes between its modules, passes and decoding steps.

Shape suffixes: B images, S visual tokens ([IMG] and R regions), K packed visual tokens, D hidden, V vocabulary,
N texts or hypotheses, M packed words.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing
from vlp_models.objectives.distributed import previous_rows


@dataclass(frozen=True, kw_only=True)
class VisualStates:
    """The object encoder's outputs, [K, D] per layer (the embeddings if it has none), packed in [B, S], [IMG] first.

    residual_BP: what ISM adds to the pooled outputs (`ism_residual`); it is lost where only the outputs are needed.
    Nothing in it depends on text, so one encoding serves every pass over an image.
    """

    layers: tuple[Tensor, ...]
    packing: Packing
    residual_BP: Tensor | None = None

    @property
    def last_KD(self) -> Tensor:
        return self.layers[-1]

    def last(self) -> VisualStates:
        """Return the last layer only."""
        return VisualStates(layers=self.layers[-1:], packing=self.packing)

    def select(self, index_N: Tensor | None) -> VisualStates:
        """Return the images at these indices; None: all of them."""
        if index_N is None:
            return self
        packing = Packing.of(self.packing.mask_BT.index_select(0, index_N))
        # Whole images are copied, so the gradient adds images and not tokens.
        layers = (packing.pack(self.packing.pad(x).index_select(0, index_N)) for x in self.layers)
        return VisualStates(layers=tuple(layers), packing=packing)

    def rolled(self) -> VisualStates:
        """Give every sample the image of the sample before it in the whole batch, across all processes."""
        packing = Packing.of(previous_rows(self.packing.mask_BT))
        layers = (packing.pack(previous_rows(self.packing.pad(x))) for x in self.layers)
        return VisualStates(layers=tuple(layers), packing=packing)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the cross-modal decoder attends to: the image's keys and values in each of its layers.

    mask     bool [B, 1, 1, S]
    owner_N  int64: the image of each text or hypothesis; None: text i belongs to image i
    source   the states that it was projected from
    """

    layers: tuple[KeyValues, ...]
    mask: Tensor
    owner_N: Tensor | None
    source: Tensor

    @property
    def images(self) -> int:
        return self.mask.shape[0]


@dataclass(frozen=True, kw_only=True)
class GenerationPass:
    """MSG's part of a pass, which a second pass may continue.

    logits_MV  of every predicted word from the words before it, in row-major order of the batch
    at_BT      bool: the positions that predict their next word
    ids_BT     what the generation stream read
    packing    with the cache of its layers
    """

    logits_MV: Tensor
    at_BT: Tensor
    ids_BT: Tensor
    memory: Memory
    packing: Packing
