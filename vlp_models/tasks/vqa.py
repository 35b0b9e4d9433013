"""Visual question answering as classification over the frequent answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.data.answers import soft_scores
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.protocols import Fuses, FusesApart
from vlp_models.objectives.loss import Loss, Part
from vlp_models.objectives.vqa import soft_label_answers
from vlp_models.tasks.base import TaskModel, init_head, need_targets

TOP = 5


class VQA(TaskModel):
    """A linear layer on the fused feature; binary cross-entropy with soft labels (Anderson et al. 2018, section 3.3).

    A model that gives the decoder's part apart (`FusesApart`) has a second layer on it: the losses add up, and an
    answer's probability is the mean of two softmaxes, as in the public code of TDEN.

    Targets float32 [B, A]: each answer's soft score, zero for answers that no annotator gave.
    """

    task = "vqa"
    view = "questions"
    prediction_view = "questions"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: Mapping[str, Any], *, answers: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info, answers=answers)
        if not isinstance(model, Fuses):
            raise ParamsError(f"the model `{info['model']}` can't fuse image and text, so it can't learn vqa")
        if not answers:
            raise DataError(
                "no answers to choose from (data/tokenizer/answers.json is empty): lower tokenizer.min_answer_count"
            )
        self._index = {answer: i for i, answer in enumerate(self.answers)}
        sizes = {"fused": model.fused_dim}
        if isinstance(model, FusesApart) and model.decoder_dim:
            sizes["decoder"] = model.decoder_dim
        layers = {name: nn.Linear(size, len(self.answers)) for name, size in sizes.items()}
        for layer in layers.values():
            init_head(layer, info)
            # One right answer in A at the start; from 1/2 the first epochs would only learn that most are wrong.
            nn.init.constant_(layer.bias, -math.log(len(self.answers)))
        self.head = nn.ModuleDict(layers) if len(layers) > 1 else layers["fused"]

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        if not all(sample.answers for sample in samples):
            return None
        scores_BA = torch.zeros(len(samples), len(self.answers))
        for i, sample in enumerate(samples):
            for answer, score in soft_scores(sample.answers, self._index).items():
                scores_BA[i, answer] = score
        return scores_BA

    def logits(self, batch: Batch) -> list[Tensor]:
        """[B, A] of the fused feature, and of the decoder's where the model gives it apart."""
        fused = cast(Fuses, self.model).fuse(batch.image, batch.text)
        if not isinstance(self.head, nn.ModuleDict):
            return [self.head(fused.pooled_BP)]
        assert fused.decoder_BP is not None, "a model with a decoder_dim gives a decoder_BP"
        return [self.head["fused"](fused.pooled_BP), self.head["decoder"](fused.decoder_BP)]

    def loss(self, batch: Batch) -> Loss:
        """Parts `vqa` and `vqa_accuracy`; of two classifiers the losses' sum, and the first one's accuracy."""
        targets_BA = need_targets(batch)
        losses = [soft_label_answers(logits_BA, targets_BA) for logits_BA in self.logits(batch)]
        total, count = torch.stack([loss.sum for loss in losses]).sum(), losses[0].count
        return Loss(sum=total, count=count, parts={**losses[0].parts, "vqa": Part(sum=total.detach(), count=count)})

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """`top`: the five most probable answers. Each probability is its answer's own, they need not sum to one; those
        of two classifiers do, over all answers."""
        self.eval()
        logits = [logits_BA.float() for logits_BA in self.logits(batch)]
        apart = len(logits) > 1
        probability_BA = torch.stack([x.softmax(-1) for x in logits]).mean(0) if apart else logits[0].sigmoid()
        best = probability_BA.topk(min(TOP, len(self.answers)))
        return [
            {
                "question_id": sample.sample_id,
                "image_id": sample.image_id,
                "answer": self.answers[indices[0]],
                "top": [[self.answers[i], round(p, 6)] for i, p in zip(indices, probabilities, strict=True)],
            }
            for sample, indices, probabilities in zip(samples, best.indices.tolist(), best.values.tolist(), strict=True)
        ]
