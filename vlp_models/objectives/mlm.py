"""Masked language modelling: tell the masked words from what is left of the sentence and from the image."""

from __future__ import annotations

from torch import Tensor

from vlp_models.objectives.loss import Loss
from vlp_models.objectives.token_loss import cross_entropy


def masked_language_modelling(logits_MV: Tensor, targets_M: Tensor) -> Loss:
    """logits_MV: predictions at the M masked positions; targets_M int64: the words that stood there."""
    return cross_entropy(logits_MV, targets_M, name="mlm")
