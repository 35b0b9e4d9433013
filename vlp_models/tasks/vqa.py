"""Visual question answering as classification over the frequent answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.common.io import write_json
from vlp_models.data.answers import is_exact, soft_scores
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.metrics.vqa import PRIORS, AnsweredQuestion, prior_predictions, score_vqa, score_wups
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.protocols import Fuses, FusesDecoder
from vlp_models.objectives.loss import Loss, Part, soft_label_answers
from vlp_models.tasks.base import RequestFormat, TaskModel, init_head, read_answers, require_targets, sum_losses
from vlp_models.tasks.scoring import (
    BLIND,
    EvalContext,
    Prediction,
    TaskScores,
    baselines_by_metric,
    blind_baseline,
    id_in_source,
    read_train_rows,
)

TOP = 5
UNKNOWN = "<unk>"  # some public checkpoints have a row for all other answers; it is never predicted


class VQA(TaskModel):
    """A linear layer on the fused feature; binary cross-entropy with soft labels (Anderson et al. 2018, section 3.3).

    A model that returns its decoder's feature separately (`FusesDecoder`) gets a second layer on it: the losses add up,
    and an answer's probability is the mean of two softmaxes, as in the public code of TDEN.

    Targets float32 [B, A]: each answer's soft score, zero for answers that no annotator gave.
    """

    task = "vqa"
    title = "Visual question answering"
    view = "questions"
    prediction_view = "questions"
    needs = (Fuses,)
    shares_images = True
    has_labels = True
    id_key = "question_id"
    metric = "accuracy"
    headlines = ("accuracy", f"gain over {BLIND}")
    baselines_to_beat = PRIORS
    blind_fields = ("answer",)
    request = RequestFormat(text="question")
    example = 'answer("photo.jpg", "What color is the cat?")'

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        """labels: the answers to choose from."""
        super().__init__(model, tokenizer, info, labels=labels)
        self._answer_rows = [i for i, answer in enumerate(labels) if answer != UNKNOWN]
        if not self._answer_rows:
            raise DataError(
                "no answers to choose from (data/tokenizer/answers.json is empty): lower `tokenizer.min_answer_count`"
            )
        self._index = {answer: i for i, answer in enumerate(self.labels)}
        # One classifier for each feature that the model returns.
        sizes = {"fused": cast(Fuses, model).fused_dim}
        if isinstance(model, FusesDecoder) and model.decoder_dim:
            sizes["decoder"] = model.decoder_dim
        layers = {name: nn.Linear(size, len(self.labels)) for name, size in sizes.items()}
        for layer in layers.values():
            init_head(layer, info)
            # Start at probability 1/A: from 1/2 the first epochs would only learn that most answers are wrong.
            nn.init.constant_(layer.bias, -math.log(len(self.labels)))
        self.head = nn.ModuleDict(layers) if len(layers) > 1 else layers["fused"]

    @classmethod
    def initial_labels(cls, tokenizer: Path) -> list[str]:
        return read_answers(tokenizer)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        if not all(sample["answers"] for sample in samples):
            return None
        scores_BA = torch.zeros(len(samples), len(self.labels))
        # Only frequent answers have a column, so a question whose answers are all rare has zeros alone.
        for i, sample in enumerate(samples):
            for answer, score in soft_scores(sample["answers"], self._index).items():
                scores_BA[i, answer] = score
        return scores_BA

    def logits(self, batch: Batch) -> list[Tensor]:
        """Return logits [B, A] of the fused feature and, if the model returns it separately, of the decoder's."""
        fused = cast(Fuses, self.model).fuse(batch.image, batch.text)
        if not isinstance(self.head, nn.ModuleDict):
            return [self.head(fused.pooled_BP)]
        assert fused.decoder_BP is not None, "a model with a decoder_dim returns decoder_BP"
        return [self.head["fused"](fused.pooled_BP), self.head["decoder"](fused.decoder_BP)]

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Return the loss, summed over the classifiers; parts `vqa` and `vqa_accuracy` (of the first classifier)."""
        targets_BA = require_targets(batch)
        # The accuracy logged is the first classifier's; the loss logged is the sum that is trained.
        losses = [soft_label_answers(logits_BA, targets_BA) for logits_BA in self.logits(batch)]
        total = sum_losses(*losses)
        summed = Part(sum=total.sum.detach(), count=total.count)
        return replace(total, parts={**losses[0].parts, "vqa": summed})

    def probabilities(self, batch: Batch) -> Tensor:
        """Return [B, A]: a sigmoid; with two classifiers, the mean of two softmaxes."""
        logits = [logits_BA.float() for logits_BA in self.logits(batch)]
        if len(logits) == 1:
            return logits[0].sigmoid()
        return torch.stack([logits_BA.softmax(-1) for logits_BA in logits]).mean(0)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return `answer` and `top`, the five most probable answers.

        Sigmoid probabilities need not sum to one; those of two classifiers do, over all answers and `<unk>`.
        """
        self.eval()
        # (B, A) -> (B, answers without `<unk>`) -> (B, 5)
        best = self.probabilities(batch)[:, self._answer_rows].topk(min(TOP, len(self._answer_rows)))
        labels = [self.labels[i] for i in self._answer_rows]
        records = []
        for sample, indices, probabilities in zip(samples, best.indices.tolist(), best.values.tolist(), strict=True):
            records.append(
                {
                    "question_id": sample.sample_id,
                    "image_id": sample.image_id,
                    "answer": labels[indices[0]],
                    "top": [[labels[i], round(p, 6)] for i, p in zip(indices, probabilities, strict=True)],
                }
            )
        return records

    @classmethod
    def format_prediction(cls, prediction: Prediction) -> list[str]:
        """Return the answer, then the most likely ones with their probabilities."""
        return [prediction["answer"], *(f"  {probability:6.1%}  {text}" for text, probability in prediction["top"])]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return the official accuracy overall, per answer type and per question type; for questions with one right
        answer (DAQUAR), the share of equal sets of words and WUPS.

        Baselines from train: the most common answer overall, per question type and per question text; the blind model.
        """
        context.progress("VQA accuracy")
        questions = [
            AnsweredQuestion(
                question_id=sample.sample_id,
                image_id=sample.image_id,
                text=sample.text,
                question_type=sample["question_type"] or "",
                answer_type=sample["answer_type"] or "",
                answers=sample["answers"],
            )
            for sample in samples
        ]
        scores = score_vqa({p["question_id"]: p["answer"] for p in predictions}, questions)
        baselines = {
            name: score_vqa(answers, questions)
            for name, answers in prior_predictions(_train_questions(context), questions).items()
        }
        if predictions and "answer_blind" in predictions[0]:
            blind = score_vqa({p["question_id"]: p["answer_blind"] for p in predictions}, questions)
            baselines[BLIND] = blind
            scores += blind_baseline(scores[0], blind[0])
        # Questions with one right answer, as in DAQUAR, are also scored by how close an answer's meaning is.
        exact = [(p["answer"], q) for p, q in zip(predictions, questions, strict=True) if is_exact(q.answers)]
        if exact:
            context.progress("WUPS")
            scores += score_wups(
                [answer for answer, _ in exact],
                [question.answers[0] for _, question in exact],
                [question.question_id for _, question in exact],
                [question.image_id for _, question in exact],
            )
        return TaskScores(scores=scores, baselines=baselines_by_metric(baselines))

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write VQA's result JSON."""
        path = directory / f"vqa_{context.source}_{split}_results.json"
        write_json(path, [{"question_id": id_in_source(p["question_id"]), "answer": p["answer"]} for p in predictions])
        return path


def _train_questions(context: EvalContext) -> list[AnsweredQuestion]:
    rows = read_train_rows("questions", context, ["question_id", "text", "question_type", "answer_type", "answers"])
    return [
        AnsweredQuestion(
            question_id=row["question_id"],
            image_id=row["image_id"],
            text=row["text"],
            question_type=row["question_type"] or "",
            answer_type=row["answer_type"] or "",
            answers=row["answers"] or (),
        )
        for row in rows.to_pylist()
    ]
