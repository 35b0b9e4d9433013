"""Visual question answering as multi-label classification over frequent answers (Anderson et al. 2018)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss


def soft_label_answers(logits_BA: Tensor, scores_BA: Tensor) -> Loss:
    """Binary cross-entropy with the soft scores (0 to 1), summed over answers and questions.

    `vqa_accuracy`: the mean soft score of the most probable answer.
    """
    logits_BA = logits_BA.float() if logits_BA.dtype.itemsize < 4 else logits_BA
    scores_BA = scores_BA.to(logits_BA.dtype)
    total = F.binary_cross_entropy_with_logits(logits_BA, scores_BA, reduction="sum")
    scored = scores_BA.gather(1, logits_BA.argmax(1, keepdim=True)).sum()
    return Loss.of(total, len(logits_BA), vqa=total, vqa_accuracy=scored)
