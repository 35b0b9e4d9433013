"""Captioning: describe an image in a sentence. No head: the model's own word predictions are the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.decoding.beam import beam_search
from vlp_models.decoding.greedy import greedy
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import Generates
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.msg import sentence_generation
from vlp_models.tasks.base import TaskModel


class Captioning(TaskModel):
    """Teacher forcing, cross-entropy over every token after [CLS] (TDEN, section "Downstream tasks")."""

    task = "captioning"
    view = "captions"
    prediction_view = "images"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: Mapping[str, Any], *, answers: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        if not isinstance(model, Generates):
            raise ParamsError(f"the model `{info['model']}` can't generate text, so it can't learn captioning")
        self.label_smoothing = float(info.get("label_smoothing", 0.0))
        self.beam_size = 3
        self.max_caption_len = 24  # tokens, [SEP] included

    def loss(self, batch: Batch) -> Loss:
        """The text is the target. Part `captioning`: mean over the batch's tokens."""
        at_BT = batch.text.followed_BT
        return sentence_generation(
            cast(Generates, self.model).generation_logits(batch.image, batch.text, at_BT),
            batch.text.following(at_BT),
            label_smoothing=self.label_smoothing,
            name="captioning",
        )

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """`caption` by beam search, `greedy` by the most probable next token."""
        self.eval()
        model = cast(Generates, self.model)
        ends = {
            "max_len": self.max_caption_len,
            "bos_id": self.tokenizer.cls_id,
            "eos_id": self.tokenizer.sep_id,
        }
        plain = greedy(model, batch.image, **ends)
        best = plain if self.beam_size == 1 else beam_search(model, batch.image, beam_size=self.beam_size, **ends)
        return [
            {
                "image_id": sample.image_id,
                "caption": self.tokenizer.decode(b.ids),
                "greedy": self.tokenizer.decode(g.ids),
            }
            for sample, b, g in zip(samples, best, plain, strict=True)
        ]
