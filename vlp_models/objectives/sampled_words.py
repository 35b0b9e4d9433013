"""Scheduled sampling of masked words: pure functions of a first pass's predictions and an explicit generator.

Bengio et al. 2015; for masked pretraining Li et al. 2021 (TDEN), "Scheduled Sampling in VL Pretraining".

Shape suffixes: B batch, T text tokens, M masked words, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vlp_models.objectives.categorical import draw_categorical
from vlp_models.objectives.masking import draw_uniform


def share_at(update: int | None, *, start: float, end: float, steps: int) -> float:
    """The share of the masked words that update number `update` replaces: linear from `start` to `end` in `steps`
    updates, then `end`. None (validation) is the end, so that validations compare."""
    if update is None or update >= steps:
        return end
    return start + (end - start) * update / steps


def sample_words(logits_MV: Tensor, *, how: Literal["multinomial", "argmax"], generator: torch.Generator) -> Tensor:
    """Word ids, int64 [M]: drawn from the predicted distributions (the paper) or the most probable (its code).

    No gradient passes.
    """
    logits_MV = logits_MV.detach()
    if how == "argmax":
        return logits_MV.argmax(-1)
    return draw_categorical(logits_MV.float().softmax(-1), generator)


def select_replaced(words_BT: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Which of the masked words to replace: each with probability `share`. bool [B, T]"""
    return words_BT & (draw_uniform(tuple(words_BT.shape), generator, words_BT.device) < share)


def replace_words(ids_BT: Tensor, words_BT: Tensor, words_M: Tensor, replaced_BT: Tensor) -> Tensor:
    """The sentences with `words_M`, which belong to the True places of `words_BT` in row-major order, written where
    `replaced_BT`, too, is True."""
    written_BT = ids_BT.clone()
    written_BT[words_BT] = words_M
    return torch.where(replaced_BT, written_BT, ids_BT)
