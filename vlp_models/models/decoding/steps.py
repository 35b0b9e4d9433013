"""What the decoders share: the step interface they drive, and what they return.

Shape suffixes: N hypotheses, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vlp_models.data.batch import Image, Regions


class Steps(Protocol):
    """The part of `Generates` (models/protocols.py) that decoding needs. Set the model to eval mode first."""

    def start(self, image: Image, *, max_len: int) -> Any: ...

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def reorder(self, state: Any, index_N: Tensor) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Started:
    """Images that are encoded already, for decoders that follow one another: `start` returns the same state again.

    state: what `model.start` returned, for the largest `max_len` that any of them will ask for.
    """

    model: Steps
    state: Any

    def start(self, image: Image, *, max_len: int) -> Any:
        return self.state

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.model.step(token_N, state)

    def reorder(self, state: Any, index_N: Tensor) -> Any:
        return self.model.reorder(state, index_N)


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """ids: the tokens between [CLS] and [SEP]; score: the sum of their log probabilities, [SEP]'s included."""

    ids: list[int]
    score: float


def collect(tokens_NT: Tensor, scores_N: Tensor, eos_id: int) -> list[Hypothesis]:
    """Rows of tokens, cut before their first `eos_id`."""
    hypotheses = []
    for ids, score in zip(tokens_NT.tolist(), scores_N.tolist(), strict=True):
        end = ids.index(eos_id) if eos_id in ids else len(ids)
        hypotheses.append(Hypothesis(ids=ids[:end], score=score))
    return hypotheses


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """In float32 at least, whatever precision the model runs in."""
    return logits_NV.log_softmax(-1, dtype=torch.promote_types(logits_NV.dtype, torch.float32))


def device_of(image: Image) -> torch.device:
    return image.mask_BR.device if isinstance(image, Regions) else image.pixels_B3HW.device
