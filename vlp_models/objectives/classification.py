"""One label out of several: NLVR, image-text matching."""

from __future__ import annotations

from torch import Tensor

from vlp_models.objectives.loss import Loss, cross_entropy


def classification(logits_BC: Tensor, labels_B: Tensor, *, name: str) -> Loss:
    """logits_BC: scores of C labels; labels_B int64. Cross-entropy, summed over B."""
    return cross_entropy(logits_BC, labels_B, name=name)
