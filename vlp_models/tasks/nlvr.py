"""NLVR: say whether a statement about an image is true (Suhr et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks.base import TaskModel, init_head, need_targets


class NLVR(TaskModel):
    """A linear layer on the fused feature; targets int64 [B], 1 for true."""

    task = "nlvr"
    view = "statements"
    prediction_view = "statements"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: Mapping[str, Any], *, answers: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        if not isinstance(model, Fuses):
            raise ParamsError(f"the model `{info['model']}` can't fuse image and text, so it can't learn nlvr")
        self.head = nn.Linear(model.fused_dim, 2)
        init_head(self.head, info)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        labels = [sample.label for sample in samples]
        if any(label is None for label in labels):
            return None
        return torch.tensor([int(bool(label)) for label in labels])

    def logits(self, batch: Batch) -> Tensor:
        """[B, 2]: false, true"""
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch) -> Loss:
        labels_B = need_targets(batch)
        return classification(self.logits(batch), labels_B, name="nlvr")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        p_true_B = self.logits(batch).float().softmax(-1)[:, 1].tolist()
        return [
            {
                "statement_id": sample.sample_id,
                "image_id": sample.image_id,
                "group": sample.group,
                "label": sample.label,
                "prediction": p > 0.5,
                "p_true": round(p, 6),
            }
            for sample, p in zip(samples, p_true_B, strict=True)
        ]
