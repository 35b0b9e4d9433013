"""Losses of generation: sentences (MSG, captioning), sampled sentences with rewards (SCST), and region features (TIFG).

Shape suffixes: N tokens, M sampled tokens or regions, V vocabulary, B images, K samples an image, D features.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss, at_least_float32, cross_entropy


def sentence_generation(
    logits_NV: Tensor, targets_N: Tensor, *, label_smoothing: float = 0.0, name: str = "msg"
) -> Loss:
    """Return the loss of masked sentence generation and captioning: each word from the preceding words and the image.

    *Masked* refers to the input, in which some words are [MASK]; all words are targets, including [SEP].

    logits_NV: predictions of the N next tokens; targets_N int64: those tokens. The result is the sum over tokens of the
    negative log probability. With smoothing e it is (1 - e) of that plus e times the mean over the vocabulary. (TDEN's
    public code gives e to the other V - 1 words alone: its e is e V / (V - 1) here.)
    """
    return cross_entropy(logits_NV, targets_N, name=name, label_smoothing=label_smoothing)


def region_generation(generated_MD: Tensor, targets_MD: Tensor, *, reduction: Literal["mean", "sum"]) -> Loss:
    """Return the loss of text-conditioned image feature generation (Xia et al. 2020 (XGPT), equation 5).

    The squared distance between generated and target features of M regions, in float32 at least. No gradient flows to
    the target.

    reduction: over a region's D features. `sum` is the equation as written, D times `mean`. Both are logged: `tifg` is
        the mean, `tifg_squared` the sum.
    """
    generated_MD = at_least_float32(generated_MD)
    # (M, D) -> one number: summed over regions, so that processes with few of them do not count more.
    squared = (generated_MD - targets_MD.detach().to(generated_MD.dtype)).square().sum()
    mean = squared / generated_MD.shape[1]
    return Loss.of(mean if reduction == "mean" else squared, len(generated_MD), tifg=mean, tifg_squared=squared)


# ---- Self-critical sequence training -----------------------------------------------------------------------------


def self_critical(
    logits_MV: Tensor,
    drawn_M: Tensor,
    advantage_M: Tensor,
    *,
    temperature: float = 1.0,
    name: str = "self_critical",
) -> Loss:
    """Return REINFORCE's loss with a baseline: the sum over sampled tokens of -log p(token) * advantage.

    S. J. Rennie et al.: "Self-critical Sequence Training for Image Captioning", CVPR 2017, equation 8.

    drawn_M int64: the tokens of all samples, up to and including each sample's first [SEP]; advantage_M: the advantage
    of the sample that each token belongs to; temperature: p is softmax(logits / temperature), as in sampling.
    """
    logits_MV = at_least_float32(logits_MV)
    if temperature != 1:
        logits_MV = logits_MV / temperature
    # (M, V), (M,) -> (M,): -log p of each drawn token, before it is weighted.
    total = (F.cross_entropy(logits_MV, drawn_M, reduction="none") * advantage_M).sum()
    return Loss.of(total, len(drawn_M), **{name: total})


def advantages(
    reward_BK: Tensor, baseline: Literal["greedy", "leave_one_out"], greedy_B: Tensor | None = None
) -> Tensor:
    """Return each sample's reward minus the baseline. [B, K]

    The baseline is the reward of the greedy caption (Rennie et al.) or the mean reward of the image's other samples
    (Luo: "A Better Variant of Self-Critical Sequence Training", 2020).
    """
    if baseline == "greedy":
        assert greedy_B is not None, "the greedy baseline needs greedy captions"
        return reward_BK - greedy_B[:, None]
    other_samples = reward_BK.shape[1] - 1
    assert other_samples > 0, "the leave-one-out baseline needs at least two samples per image"
    # The sum of the others is the sum of all minus the sample's own.
    return reward_BK - (reward_BK.sum(1, keepdim=True) - reward_BK) / other_samples
