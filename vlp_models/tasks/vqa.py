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
from vlp_models.common.workspace import Workspace
from vlp_models.data.answers import is_exact, most_frequent, soft_scores
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.evaluation.report.galleries import Card, Gallery, Line, PictureSource, rows_by_id
from vlp_models.metrics.vqa import AnsweredQuestion, prior_predictions, question_accuracy, score_vqa, score_wups
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fuses, FusesApart
from vlp_models.objectives.loss import Loss, Part, soft_label_answers
from vlp_models.tasks.base import TaskModel, Words, answer_vocabulary, init_head, joined, need_targets
from vlp_models.tasks.scoring import BLANKED, Place, Prediction, Scored, blank_control, by_metric, own_id, train_rows

TOP = 5
UNKNOWN = "<unk>"  # where public code keeps a row for it, it stands for all answers that have none, and is never given


class VQA(TaskModel):
    """A linear layer on the fused feature; binary cross-entropy with soft labels (Anderson et al. 2018, section 3.3).

    A model that gives the decoder's part apart (`FusesApart`) has a second layer on it: the losses add up, and an
    answer's probability is the mean of two softmaxes, as in the public code of TDEN.

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
    headlines = ("accuracy", f"gain over {BLANKED}")
    blanked_fields = ("answer",)
    words = Words(verb="answer", text="question")
    gallery = Gallery(title="Questions and answers", about="questions at even distances from the split.")

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        """labels: the answers to choose from."""
        super().__init__(model, tokenizer, info, labels=labels)
        self._given = [i for i, answer in enumerate(labels) if answer != UNKNOWN]
        if not self._given:
            raise DataError(
                "no answers to choose from (data/tokenizer/answers.json is empty): lower tokenizer.min_answer_count"
            )
        self._index = {answer: i for i, answer in enumerate(self.labels)}
        sizes = {"fused": cast(Fuses, model).fused_dim}
        if isinstance(model, FusesApart) and model.decoder_dim:
            sizes["decoder"] = model.decoder_dim
        layers = {name: nn.Linear(size, len(self.labels)) for name, size in sizes.items()}
        for layer in layers.values():
            init_head(layer, info)
            # One right answer in A at the start; from 1/2 the first epochs would only learn that most are wrong.
            nn.init.constant_(layer.bias, -math.log(len(self.labels)))
        self.head = nn.ModuleDict(layers) if len(layers) > 1 else layers["fused"]

    @classmethod
    def labels_for(cls, tokenizer: Path) -> list[str]:
        return answer_vocabulary(tokenizer)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        if not all(sample["answers"] for sample in samples):
            return None
        scores_BA = torch.zeros(len(samples), len(self.labels))
        for i, sample in enumerate(samples):
            for answer, score in soft_scores(sample["answers"], self._index).items():
                scores_BA[i, answer] = score
        return scores_BA

    def logits(self, batch: Batch) -> list[Tensor]:
        """[B, A] of the fused feature, and of the decoder's where the model gives it apart."""
        fused = cast(Fuses, self.model).fuse(batch.image, batch.text)
        if not isinstance(self.head, nn.ModuleDict):
            return [self.head(fused.pooled_BP)]
        assert fused.decoder_BP is not None, "a model with a decoder_dim gives a decoder_BP"
        return [self.head["fused"](fused.pooled_BP), self.head["decoder"](fused.decoder_BP)]

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Parts `vqa` and `vqa_accuracy`; of two classifiers the losses' sum, and the first one's accuracy."""
        targets_BA = need_targets(batch)
        losses = [soft_label_answers(logits_BA, targets_BA) for logits_BA in self.logits(batch)]
        both = joined(*losses)
        own = Part(sum=both.sum.detach(), count=both.count)
        return replace(both, parts={**losses[0].parts, "vqa": own})

    def probabilities(self, batch: Batch) -> Tensor:
        """[B, A]: a sigmoid; of two classifiers, the mean of two softmaxes."""
        logits = [logits_BA.float() for logits_BA in self.logits(batch)]
        return torch.stack([x.softmax(-1) for x in logits]).mean(0) if len(logits) > 1 else logits[0].sigmoid()

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """`top`: the five most probable answers. Each probability is its answer's own, they need not sum to one; those
        of two classifiers do, over all answers and `<unk>`."""
        self.eval()
        best = self.probabilities(batch)[:, self._given].topk(min(TOP, len(self._given)))
        labels = [self.labels[i] for i in self._given]
        return [
            {
                "question_id": sample.sample_id,
                "image_id": sample.image_id,
                "answer": labels[indices[0]],
                "top": [[labels[i], round(p, 6)] for i, p in zip(indices, probabilities, strict=True)],
            }
            for sample, indices, probabilities in zip(samples, best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        """The answer, and the likeliest ones with their probabilities."""
        likely = [f"  {probability:6.1%}  {text}" for text, probability in prediction["top"]]
        return [prediction["answer"], *likely]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """Official accuracy overall, per answer type, per question type; of questions with one right answer the share
        that is met exactly, and WUPS.

        Baselines, learnt from train: the commonest answer overall, per question type and per question text.
        """
        place.progress("VQA accuracy")
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
            for name, answers in prior_predictions(_train_questions(place), questions).items()
        }
        if predictions and "answer_blank" in predictions[0]:
            blank = score_vqa({p["question_id"]: p["answer_blank"] for p in predictions}, questions)
            baselines[BLANKED] = blank
            scores += blank_control(scores[0], blank[0])
        exact = [(p["answer"], q) for p, q in zip(predictions, questions, strict=True) if is_exact(q.answers)]
        if exact:
            place.progress("WUPS")
            asked = [question for _, question in exact]
            scores += score_wups(
                [answer for answer, _ in exact],
                [question.answers[0] for question in asked],
                [question.question_id for question in asked],
                [question.image_id for question in asked],
            )
        return Scored(scores=scores, baselines=by_metric(baselines))

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """VQA's result JSON."""
        path = directory / f"vqa_{place.source}_{split}_results.json"
        write_json(path, [{"question_id": own_id(p["question_id"]), "answer": p["answer"]} for p in predictions])
        return path

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """Questions with the five likeliest answers and the annotators' own."""
        asked = rows_by_id("questions", "question_id", workspace, predictions)
        cards = []
        for row in predictions:
            question = asked.get(row["question_id"], {"text": "", "answers": []})
            answers = question["answers"] or []
            below = []
            if answers:
                accuracy = question_accuracy(row["answer"], answers)
                people = f"people say {most_frequent(answers)}"
                below.append(Line(text=people, right=accuracy >= 0.5, after=f"(accuracy {100 * accuracy:.0f})"))
            if row.get("answer_blank"):
                below.append(Line(text=f"{BLANKED}: {row['answer_blank']}", soft=True))
            cards.append(
                Card(
                    picture=pictures.get(row["image_id"]),
                    lines=[Line(text=question["text"], strong=True)],
                    bars=[(text or "(empty)", float(probability)) for text, probability in row["top"]],
                    below=below,
                )
            )
        return cards


def _train_questions(place: Place) -> list[AnsweredQuestion]:
    rows = train_rows("questions", place, ["question_id", "text", "question_type", "answer_type", "answers"])
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
