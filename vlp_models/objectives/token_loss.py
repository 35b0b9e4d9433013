"""Cross-entropy over selected tokens: the common part of MLM, MSG and classification.

Shape suffixes: N tokens (or samples), V vocabulary (or classes).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.objectives.loss import Loss


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, name: str, label_smoothing: float = 0.0) -> Loss:
    """Summed over the N tokens, in float32 at least; zero, but attached to the graph, if there are none."""
    logits_NV = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    total = F.cross_entropy(logits_NV, targets_N, reduction="sum", label_smoothing=label_smoothing)
    correct = (logits_NV.argmax(-1) == targets_N).sum()
    return Loss.of(total, len(targets_N), **{name: total, f"{name}_accuracy": correct})


def empty(outputs: Tensor, name: str) -> Loss:
    """Nothing to learn from: zero of no items, with zero gradients (so that data-parallel replicas still agree).

    Only where all processes have nothing: it names no accuracy, and all must name the same parts.
    """
    total = outputs.sum() * 0.0
    return Loss.of(total, 0, **{name: total})


def trainable(module: nn.Module) -> Tensor:
    """A parameter that learns, for `empty`: a loss of what is frozen has no gradient at all."""
    return next((weight for weight in module.parameters() if weight.requires_grad), next(module.parameters()))
