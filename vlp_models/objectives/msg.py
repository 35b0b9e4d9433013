"""Masked sentence generation, and captioning: tell every word from the ones before it and from the image.

What makes it *masked* is its input, in which some words are [MASK]; every word is a target, [SEP] included.
"""

from __future__ import annotations

from torch import Tensor

from vlp_models.objectives.loss import Loss
from vlp_models.objectives.token_loss import cross_entropy


def sentence_generation(
    logits_NV: Tensor, targets_N: Tensor, *, label_smoothing: float = 0.0, name: str = "msg"
) -> Loss:
    """logits_NV: predictions of the N next tokens; targets_N int64: those tokens.

    The sum over tokens of the negative log probability; with smoothing, (1 - e) of it and e times the mean over
    the vocabulary. (TDEN's public code gives e to the other V - 1 words alone: its e is e V / (V - 1) here.)
    """
    return cross_entropy(logits_NV, targets_N, name=name, label_smoothing=label_smoothing)
