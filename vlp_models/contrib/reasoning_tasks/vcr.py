"""Visual commonsense reasoning: choose one of four answers, and one of four rationales given the answer.

As in VQA (TDEN, section "Downstream Tasks"), each choice's text is fused with the image and a linear layer computes one
logit from the fused feature; cross-entropy over the four. (The public code leaves the cross-modal decoder out of this
feature: `models.<name>.config.use_decoder_in_fusion`.) Only [SEP] separates the segments of a text, as in RoBERTa:
[CLS] question [SEP] answer [SEP], and [CLS] question [SEP] answer [SEP] rationale [SEP]. The public code gives the last
segment a token type of its own, the one that marks generated text in pretraining; the paper does not mention it
(`models.<name>.config.segment_types`, on only in imported VCR models).

The image's annotated objects come before the detected regions, up to `max_regions` (data/batch.py). Answers and
rationales read the same regions, so the regions give no hint of the rationale. A model that reads pixels gets no object
boxes: what its texts call 'person1' is not marked in the picture. Nor does a model that reads regions get a link
between a name and a region, as in the authors' code: only a region's content distinguishes two persons. TDEN's [IMG] is
the mean of all regions it reads; its public code takes the means of the objects and of the detected regions and weights
each by its count plus one, even if some regions are then dropped.

Shape suffixes: B questions, N texts per question, G given answers, P fused feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vlp_models.common.io import write_text
from vlp_models.contrib.reasoning_tasks.scores import VCR_CHANCE, VCRResult, format_vcr_csv, score_vcr
from vlp_models.contrib.reasoning_tasks.segments import encode_segments
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.tasks.base import TaskModel, TaskOptions, init_head, require_targets, sum_losses
from vlp_models.tasks.scoring import (
    BLIND,
    CHANCE,
    Baselines,
    EvalContext,
    Prediction,
    TaskScores,
    baselines_by_metric,
    blind_baseline,
    id_in_source,
)

CHOICES = 4
UNKNOWN = -1  # a label that the run does not train on


@dataclass(frozen=True, kw_only=True)
class VCROptions(TaskOptions):
    """subtask: one model for both, with their losses added (the public code alternates), or for one of them."""

    subtask: Literal["both", "answer", "rationale"] = "both"


class VCR(TaskModel):
    """Targets int64 [B, 2]: the index of the right answer and of the right rationale."""

    task = "vcr"
    title = "Visual commonsense reasoning"
    view = "choices"
    prediction_view = "choices"
    needs = (Fuses,)
    options_class = VCROptions
    id_key = "choice_id"
    metric = "Q->AR"
    headlines = ("Q->A", "QA->R", "Q->AR", f"gain over {BLIND}")
    baselines_to_beat = (CHANCE,)
    blind_fields = ("answer", "rationale")

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        subtask = cast(VCROptions, self.options).subtask
        self.has_answers, self.has_rationales = subtask != "rationale", subtask != "answer"
        self.head = nn.Linear(cast(Fuses, model).fused_dim, 1)
        init_head(self.head, info)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        rows = []
        for sample in samples:
            # the rationale is trained given the right answer, so it needs both labels
            if sample["answer_label"] is None or (self.has_rationales and sample["rationale_label"] is None):
                return None
            rationale_label = UNKNOWN if sample["rationale_label"] is None else sample["rationale_label"]
            rows.append([sample["answer_label"], rationale_label])
        return torch.tensor(rows)

    def read(self, samples: Sequence[Sample]) -> Batch:
        """Collate N texts per question: the four answers, then the four rationales for each given answer.

        The given answer is the right one, or each of the four if any question of the batch hides it.
        """
        hidden = any(sample["answer_label"] is None for sample in samples)
        texts = [self._texts(sample, hidden) for sample in samples]
        flat = [segments for question_texts in texts for segments in question_texts]
        text = encode_segments(self.tokenizer, flat, self.info.max_text_len)
        # The texts of a question share its image.
        owners = [row for row, question_texts in enumerate(texts) for _ in question_texts]
        text = dataclasses.replace(text, owner_N=torch.tensor(owners, dtype=torch.int64))
        return self.reader.collate(samples, text=text, known_objects=True)

    def _texts(self, sample: Sample, every_answer: bool) -> list[tuple[str, ...]]:
        if len(sample["answers"]) != CHOICES or len(sample["rationales"]) != CHOICES:
            raise DataError(
                f"{sample.sample_id}: expected {CHOICES} answers and {CHOICES} rationales; run `dvc repro validate`"
            )
        texts: list[tuple[str, ...]] = []
        if self.has_answers:
            texts += [(sample.text, answer) for answer in sample["answers"]]
        if self.has_rationales:
            answers = sample["answers"]
            if not every_answer:
                answers = [answers[cast(int, sample["answer_label"])]]
            texts += [(sample.text, answer, rationale) for answer in answers for rationale in sample["rationales"]]
        return texts

    def logits(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return logits of answers [B, 4] and of rationales given an answer [B, 1 or 4, 4]; None if not trained."""
        texts = CHOICES * (self.has_answers + self.has_rationales)  # per question, if the batch is empty
        if len(batch):
            texts = len(batch.text) // len(batch)
        # (B * N, P) -> (B, N): one logit per text
        pooled_XP = cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP
        logits_BN = self.head(pooled_XP).view(len(batch), texts)
        # The answers' logits come first, then four for the rationales of each given answer.
        first = CHOICES if self.has_answers else 0
        return (
            logits_BN[:, :CHOICES] if self.has_answers else None,
            logits_BN[:, first:].unflatten(1, (-1, CHOICES)) if self.has_rationales else None,
        )

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Return the sum of the parts `vcr_answer` and `vcr_rationale` (each with its accuracy), per question."""
        labels_B2 = require_targets(batch)
        answers_B4, rationales_BG4 = self.logits(batch)
        losses = []
        if answers_B4 is not None:
            losses.append(cross_entropy(answers_B4, labels_B2[:, 0], name="vcr_answer"))
        if rationales_BG4 is not None:
            # In training the right answer is known and so is the only given one: (B, 1, 4) -> (B, 4).
            losses.append(cross_entropy(rationales_BG4[:, 0], labels_B2[:, 1], name="vcr_rationale"))
        return sum_losses(*losses)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Choose an answer, and a rationale given the right answer (or the chosen one, if the right one is hidden)."""
        self.eval()
        answers_B4, rationales_BG4 = self.logits(batch)
        answers = _probabilities(answers_B4, len(batch))
        rationales = _probabilities(rationales_BG4, len(batch))
        records = []
        for sample, answer_probabilities, rationale_probabilities in zip(samples, answers, rationales, strict=True):
            answer = _best(answer_probabilities) if answer_probabilities else None
            rationale = None
            if rationale_probabilities:
                given_answer = sample["answer_label"] if sample["answer_label"] is not None else answer
                block = 0 if len(rationale_probabilities) == 1 else given_answer  # a single block is the right answer's
                rationale = None if block is None else _best(rationale_probabilities[block])
            records.append(
                {
                    "choice_id": sample.sample_id,
                    "image_id": sample.image_id,
                    "answer_label": sample["answer_label"],
                    "rationale_label": sample["rationale_label"],
                    "answer": answer,
                    "rationale": rationale,
                    "answer_probabilities": answer_probabilities,
                    "rationale_probabilities": rationale_probabilities,
                }
            )
        return records

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return VCR's three accuracies. Baselines: chance, and the blind model."""
        context.progress("VCR accuracies")
        scores = score_vcr(_results(predictions, ""))
        baselines: Baselines = {metric: {CHANCE: value} for metric, value in VCR_CHANCE.items()}
        if predictions and "answer_blind" in predictions[0]:
            blind = score_vcr(_results(predictions, "_blind"))
            for metric, values in baselines_by_metric({BLIND: blind}).items():
                baselines[metric] |= values
            pairs = [(score, other) for score, other in zip(scores, blind, strict=True) if score.value is not None]
            if pairs:
                scores = scores + blind_baseline(*pairs[-1])  # Q->AR, or the subtask that was trained
        return TaskScores(scores=scores, baselines=baselines)

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write the leaderboard's CSV of probabilities.

        None if labels are known: the file holds the rationales of all four answers, which are computed only if the
        right one is hidden.
        """
        rows = [(p["choice_id"], p["answer_probabilities"], p["rationale_probabilities"]) for p in predictions]
        if not all(answers and len(rationales) == len(answers) for _, answers, rationales in rows):
            return None
        path = directory / f"vcr_{context.source}_{split}_predictions.csv"
        named = [(str(id_in_source(choice_id)), answers, rationales) for choice_id, answers, rationales in rows]
        write_text(path, format_vcr_csv(named))
        return path


def _results(predictions: Sequence[Prediction], suffix: str) -> list[VCRResult]:
    """Return which choices are right; suffix: "_blind" for the blind model."""

    def right(choice: int | None, label: int | None) -> bool | None:
        return None if choice is None or label is None else choice == label

    return [
        VCRResult(
            group=p["image_id"],
            item=p["choice_id"],
            answer_right=right(p[f"answer{suffix}"], p["answer_label"]),
            rationale_right=right(p[f"rationale{suffix}"], p["rationale_label"]),
        )
        for p in predictions
    ]


def _probabilities(logits: Tensor | None, count: int) -> list[Any]:
    """Return the softmax over the last dimension as nested lists; empty ones for a subtask that was not trained."""
    if logits is None:
        return [[] for _ in range(count)]
    # Rounded in double precision, so that the JSON has six digits and no more.
    rounded: list[Any] = (logits.float().softmax(-1).double() * 1e6).round().div(1e6).tolist()
    return rounded


def _best(probabilities: Sequence[float]) -> int:
    return max(range(len(probabilities)), key=probabilities.__getitem__)
