"""Masked object classification: tell what the detector saw in a hidden region (TDEN; UNITER's MRC-KL)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss


def masked_object_classification(logits_MC: Tensor, targets_MC: Tensor) -> Loss:
    """KL(target || prediction), summed over the C classes and the M masked regions.

    targets_MC: the detector's class probabilities. They may have been stored in half precision, so they are made
    to sum to one again. Computed in float32 at least.
    """
    logits_MC = logits_MC.float() if logits_MC.dtype.itemsize < 4 else logits_MC
    targets_MC = targets_MC.to(logits_MC.dtype)
    targets_MC = targets_MC / targets_MC.sum(-1, keepdim=True).clamp(min=1e-6)
    total = F.kl_div(logits_MC.log_softmax(-1), targets_MC, reduction="sum")
    correct = (logits_MC.argmax(-1) == targets_MC.argmax(-1)).sum()
    return Loss.of(total, len(logits_MC), moc=total, moc_accuracy=correct)
