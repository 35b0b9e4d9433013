"""What TDEN hands from one of its modules, passes or decoding steps to the next.

Shape suffixes: B batch, S visual tokens ([IMG] and R regions), T text tokens, D hidden, N hypotheses or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlp_models.models.layers.attention import KeyValues
from vlp_models.models.layers.reading import Reading
from vlp_models.objectives.ranks import previous_rows


@dataclass(frozen=True, kw_only=True)
class VisualStates:
    """The object encoder's outputs: [B, S, D], one per layer (the embeddings if it has none), and which are real.

    Nothing in it depends on text, so one encoding serves every pass over an image.
    """

    layers: tuple[Tensor, ...]
    mask_BS: Tensor

    @property
    def last_BSD(self) -> Tensor:
        return self.layers[-1]

    def repeated(self, times: int) -> VisualStates:
        """Each image `times` times in a row: for several texts about one image."""
        if times == 1:
            return self
        return VisualStates(
            layers=tuple(x.repeat_interleave(times, 0) for x in self.layers),
            mask_BS=self.mask_BS.repeat_interleave(times, 0),
        )

    def rolled(self) -> VisualStates:
        """Every sample gets the image of the sample before it in the whole batch, over all processes."""
        return VisualStates(layers=tuple(map(previous_rows, self.layers)), mask_BS=previous_rows(self.mask_BS))


@dataclass(frozen=True, kw_only=True)
class Generated:
    """MSG's part of a pass.

    logits_NV   of every token but [CLS], from the tokens before it, in row-major order of the batch
    ids_BT      what the generation stream read
    memory_BSD  what the decoder attended to
    reading     what its layers keep of both, for a second pass
    """

    logits_NV: Tensor
    ids_BT: Tensor
    memory_BSD: Tensor
    reading: Reading


@dataclass(frozen=True, kw_only=True)
class PassOutput:
    """The predictions of one pass over a batch; what was not asked for is None.

    mlm_logits_MV  at the masked words, in row-major order of the batch
    moc_logits_KC  at the masked regions, likewise
    text_BTD       the sentence encoder's understanding stream, for ISM
    generated      by the decoder
    """

    mlm_logits_MV: Tensor | None = None
    moc_logits_KC: Tensor | None = None
    text_BTD: Tensor | None = None
    generated: Generated | None = None

    @property
    def msg_logits_NV(self) -> Tensor | None:
        return self.generated.logits_NV if self.generated is not None else None

    def msg_logits_at(self, selected_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """The decoder's predictions of the selected words, row for row beside `mlm_logits_MV`."""
        assert self.generated is not None, "the pass ran without the decoder"
        return self.generated.logits_NV[selected_BT[:, 1:][mask_BT[:, 1:]]]


@dataclass(frozen=True, kw_only=True)
class DecodingState:
    """Keys and values of everything read so far, for N hypotheses that continue descriptions of some images.

    owner_N says which row of `memory` (the projected image, one entry per layer) a hypothesis describes:
    either the hypotheses of an image lie together and are equally many, and then share its one row, or every
    hypothesis has a row of its own.
    """

    length: int
    max_len: int
    past: tuple[KeyValues, ...]  # of the sentence encoder's layers, then the decoder's; empty before the first step
    memory: tuple[KeyValues, ...]
    memory_mask: Tensor
    owner_N: Tensor

    def reorder(self, index_N: Tensor) -> DecodingState:
        past = tuple(layer.select(index_N) for layer in self.past)
        owner_N = self.owner_N[index_N]
        images = self.memory_mask.shape[0]
        shared_N = torch.arange(images, device=owner_N.device).repeat_interleave(max(1, len(owner_N) // images))
        if torch.equal(owner_N, shared_N):
            return replace(self, past=past, owner_N=owner_N)
        return replace(
            self,
            past=past,
            memory=tuple(layer.select(owner_N) for layer in self.memory),
            memory_mask=self.memory_mask[owner_N],
            owner_N=torch.arange(len(owner_N), device=owner_N.device),
        )
