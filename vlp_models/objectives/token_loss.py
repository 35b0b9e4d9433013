"""Cross-entropy over selected tokens: the common part of MLM, MSG and classification.

Shape suffixes: N tokens (or samples), V vocabulary (or classes).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss
from vlp_models.objectives.ranks import count_over_ranks, mean_over_batch


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, name: str, label_smoothing: float = 0.0) -> Loss:
    """Mean over all processes' N tokens, in float32 at least; zero, but attached to the graph, if there are none."""
    if count_over_ranks(len(targets_N)) == 0:
        return empty(logits_NV, name)
    logits_NV = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    total = F.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=label_smoothing)
    correct = (logits_NV.argmax(-1) == targets_N).sum()
    loss, (mean, accuracy) = mean_over_batch(total, len(targets_N), correct)
    return Loss(total=loss, parts={name: mean, f"{name}_accuracy": accuracy})


def empty(outputs: Tensor, name: str) -> Loss:
    """Nothing was selected: zero, with zero gradients (so that data-parallel replicas still agree). No accuracy."""
    total = outputs.sum() * 0.0
    return Loss(total=total, parts={name: total.detach()})
