"""Self-critical sequence training: make what was drawn likelier, as far as it beat the baseline.

S. J. Rennie et al.: "Self-critical Sequence Training for Image Captioning", CVPR 2017, equation 8: REINFORCE, with the
reward of another description of the same image as baseline.

Shape suffixes: M drawn tokens, V vocabulary, B images, K samples an image.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss


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
