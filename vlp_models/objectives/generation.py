"""Text-conditioned image feature generation: tell the features of an image's regions from its description (XGPT).

Xia et al. 2020 (XGPT), equation 5.

Shape suffixes: M regions, D features.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss, cross_entropy


def region_generation(generated_MD: Tensor, targets_MD: Tensor, *, reduction: Literal["mean", "sum"]) -> Loss:
    """The squared distance to the target, over the M regions; in float32 at least. No gradient reaches the target.

    reduction: over a region's D features; `sum` is the equation to the letter, D times as much. Both are logged:
    `tifg` is the mean, `tifg_squared` the sum.
    """
    if generated_MD.dtype.itemsize < 4:
        generated_MD = generated_MD.float()
    squared = (generated_MD - targets_MD.detach().to(generated_MD.dtype)).square().sum()
    mean = squared / generated_MD.shape[1]
    return Loss.of(mean if reduction == "mean" else squared, len(generated_MD), tifg=mean, tifg_squared=squared)


def sentence_generation(
    logits_NV: Tensor, targets_N: Tensor, *, label_smoothing: float = 0.0, name: str = "msg"
) -> Loss:
    """logits_NV: predictions of the N next tokens; targets_N int64: those tokens.

    The sum over tokens of the negative log probability; with smoothing, (1 - e) of it and e times the mean over
    the vocabulary. (TDEN's public code gives e to the other V - 1 words alone: its e is e V / (V - 1) here.)
    """
    return cross_entropy(logits_NV, targets_N, name=name, label_smoothing=label_smoothing)


def self_critical(logits_MV: Tensor, drawn_M: Tensor, advantage_M: Tensor, *, name: str = "self_critical") -> Loss:
    """The sum over the drawn tokens of -log p(token) * advantage.

    drawn_M int64: the tokens of all samples up to and including each one's first [SEP]; advantage_M: of the sample
    that each token is part of.
    """
    logits_MV = logits_MV.float() if logits_MV.dtype.itemsize < 4 else logits_MV
    total = (F.cross_entropy(logits_MV, drawn_M, reduction="none") * advantage_M).sum()
    return Loss.of(total, len(drawn_M), **{name: total})


def advantages(
    reward_BK: Tensor, baseline: Literal["greedy", "mean_of_others"], greedy_B: Tensor | None = None
) -> Tensor:
    """What each sample's reward is above the baseline: the reward of the greedy description (Rennie et al.), or the
    mean of the image's other samples (Luo: "A Better Variant of Self-Critical Sequence Training", 2020). [B, K]"""
    if baseline == "greedy":
        assert greedy_B is not None, "the greedy baseline needs greedy descriptions"
        return reward_BK - greedy_B[:, None]
    others = reward_BK.shape[1] - 1
    assert others > 0, "one sample has no others"
    return reward_BK - (reward_BK.sum(1, keepdim=True) - reward_BK) / others
