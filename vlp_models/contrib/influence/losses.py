"""The loss of each pair on its own, without dropout and label smoothing.

Shape suffixes: B pairs, T tokens, N words, A answers.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch
from vlp_models.errors import DataError
from vlp_models.models.protocols import Contrasts, Embeds, Generates
from vlp_models.objectives.loss import at_least_float32
from vlp_models.objectives.matching import similarities
from vlp_models.tasks.base import TaskModel, implements
from vlp_models.tasks.captioning import Captioning
from vlp_models.tasks.retrieval import Retrieval
from vlp_models.tasks.vqa import VQA, require_targets

TEMPERATURE = 0.05  # of a softmax over similarities, for a run that trains with a margin


def check_task(task: TaskModel, name: str) -> None:
    """
    Raises:
        DataError: there is no loss of a single pair of this task here.
    """
    if not isinstance(task, Captioning | VQA | Retrieval):
        raise DataError(f"{name}: its task is {task.task}; vlp influence supports captioning, vqa and retrieval")
    if isinstance(task, Retrieval) and task.by_pairs:
        raise DataError(f"{name}: it scores fused pairs; vlp influence needs `options.scorer: embeddings`")


def pair_losses(task: TaskModel, batch: Batch) -> Tensor:
    """Return the loss of each pair [B], in float32.

    Captioning: summed over the caption's words. VQA: over the answers. Retrieval: a softmax over the batch's images for
    the text, plus one over its texts for the image; pairs of one image are not each other's negatives.
    """
    if isinstance(task, Captioning):
        return _caption_losses(task, batch)
    if isinstance(task, VQA):
        targets_BA = require_targets(batch)
        losses = [
            F.binary_cross_entropy_with_logits(at_least_float32(logits_BA), targets_BA, reduction="none").sum(1)
            for logits_BA in task.logits(batch)
        ]
        return torch.stack(losses).sum(0)
    return _retrieval_losses(cast(Retrieval, task), batch)


def _caption_losses(task: Captioning, batch: Batch) -> Tensor:
    at_BT = batch.text.has_next_BT
    logits_NV = cast(Generates, task.model).generation_logits(batch.image, batch.text, at_BT)
    loss_N = F.cross_entropy(at_least_float32(logits_NV), batch.text.next_tokens(at_BT), reduction="none")
    # (N,) -> (B,): the words of each caption.
    return loss_N.new_zeros(len(at_BT)).index_add(0, at_BT.nonzero()[:, 0], loss_N)


def _retrieval_losses(task: Retrieval, batch: Batch) -> Tensor:
    model = cast(Embeds, task.model)
    texts_BE, images_BE = model.embed_text(batch.text), model.embed_image(batch.image)
    if implements(task.model, Contrasts) and task.options.temperature is None:
        scale = cast(Contrasts, task.model).contrast_scale()
    else:
        scale = torch.tensor(1 / (task.options.temperature or TEMPERATURE), device=texts_BE.device)
    numbers = {image_id: number for number, image_id in enumerate(dict.fromkeys(batch.image_ids))}
    image_B = torch.tensor([numbers[image_id] for image_id in batch.image_ids], device=texts_BE.device)
    own_B = torch.arange(len(image_B), device=texts_BE.device)
    # (B, B): another pair of the same image
    twin_BB = (image_B[:, None] == image_B) & (own_B[:, None] != own_B)
    logits_BB = (scale * similarities(texts_BE, images_BE)).masked_fill(twin_BB, float("-inf"))
    return F.cross_entropy(logits_BB, own_B, reduction="none") + F.cross_entropy(logits_BB.T, own_B, reduction="none")
