"""Visual commonsense reasoning: choose one of four answers, and one of four rationales given the answer.

As in VQA (TDEN, section "Downstream Tasks"), each choice's text is fused with the image and a linear layer makes one
logit of the fused feature; cross-entropy over the four. (The public code leaves the cross-modal decoder out of this
feature: `model.config.use_decoder_in_fusion`.) The segments of a text are told apart by [SEP] alone, as in
RoBERTa: [CLS] question [SEP] answer [SEP], and [CLS] question [SEP] answer [SEP] rationale [SEP]. The public code gives
the last one a token type of its own, the one that means in pretraining that words are being generated; the paper does
not speak of it (`model.config.segment_types`, off but in imported VCR models).

The image's own objects come before the detected regions, as far as `max_regions` goes (data/collate.py). The same ones
serve answers and rationales, so that an answer is chosen without a hint of the rationale.

Shape suffixes: B questions, N texts of a question, P fused feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Regions
from vlp_models.data.collate import collate_samples, objects_first
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks.base import TaskModel, TaskOptions, init_head, need_targets

CHOICES = 4
UNKNOWN = -1  # a label that the run does not learn from


@dataclass(frozen=True, kw_only=True)
class VCROptions(TaskOptions):
    """subtask: one model for both, their losses added (as the public code, which takes turns), or one alone."""

    subtask: Literal["both", "answer", "rationale"] = "both"


class VCR(TaskModel):
    """Targets int64 [B, 2]: the right answer's place and the right rationale's."""

    task = "vcr"
    view = "choices"
    prediction_view = "choices"
    options_class = VCROptions

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: Mapping[str, Any], *, answers: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        if not isinstance(model, Fuses):
            raise ParamsError(f"the model `{info['model']}` can't fuse image and text, so it can't learn vcr")
        subtask = cast(VCROptions, self.options).subtask
        self.answers_too, self.rationales_too = subtask != "rationale", subtask != "answer"
        self.head = nn.Linear(model.fused_dim, 1)
        init_head(self.head, info)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        rows = []
        for sample in samples:
            # a rationale is learned given the right answer
            if sample.answer_label is None or (self.rationales_too and sample.rationale_label is None):
                return None
            rows.append([sample.answer_label, UNKNOWN if sample.rationale_label is None else sample.rationale_label])
        return torch.tensor(rows)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """N texts a question, in the order: four answers, then four rationales for each answer that is given: the right
        one, or each of the four where a question of the batch hides it."""
        seen = [
            dataclasses.replace(sample, regions=None if r is None else objects_first(r, sample.boxes))
            for sample in samples
            for r in (sample.regions,)
        ]
        batch = collate_samples(
            seen, self.tokenizer, max_text_len=self.info["max_text_len"], max_regions=self.info["max_regions"]
        )
        hidden = any(sample.answer_label is None for sample in samples)
        texts = [segments for sample in samples for segments in self._texts(sample, hidden)]
        image = batch.image.blanked() if self.blank_images and isinstance(batch.image, Regions) else batch.image
        return dataclasses.replace(
            batch,
            image=image,
            text=self.tokenizer.encode_segments(texts, self.info["max_text_len"]),
            targets=self.targets(samples),
        )

    def _texts(self, sample: Sample, every_answer: bool) -> list[tuple[str, ...]]:
        if len(sample.answers) != CHOICES or len(sample.rationales) != CHOICES:
            raise DataError(f"{sample.sample_id}: not {CHOICES} answers and {CHOICES} rationales; `dvc repro validate`")
        texts: list[tuple[str, ...]] = []
        if self.answers_too:
            texts += [(sample.text, answer) for answer in sample.answers]
        if self.rationales_too:
            given = sample.answers if every_answer else (sample.answers[cast(int, sample.answer_label)],)
            texts += [(sample.text, answer, rationale) for answer in given for rationale in sample.rationales]
        return texts

    def logits(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """[B, 4] of the answers and [B, 1 or 4, 4] of the rationales given an answer; None for what is not learned."""
        own = CHOICES * (self.answers_too + self.rationales_too)  # says nothing of an empty batch's text
        texts = len(batch.text) // len(batch) if len(batch) else own
        pooled_XP = cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP
        logits_BN = self.head(pooled_XP).view(len(batch), texts)
        first = CHOICES if self.answers_too else 0
        return (
            logits_BN[:, :CHOICES] if self.answers_too else None,
            logits_BN[:, first:].unflatten(1, (-1, CHOICES)) if self.rationales_too else None,
        )

    def loss(self, batch: Batch) -> Loss:
        """Parts `vcr_answer` and `vcr_rationale`, with their accuracies; the loss is their sum, a question an item."""
        labels_B2 = need_targets(batch)
        answers_B4, rationales_BG4 = self.logits(batch)
        losses = []
        if answers_B4 is not None:
            losses.append(classification(answers_B4, labels_B2[:, 0], name="vcr_answer"))
        if rationales_BG4 is not None:
            losses.append(classification(rationales_BG4[:, 0], labels_B2[:, 1], name="vcr_rationale"))
        parts = {name: value for loss in losses for name, value in loss.parts.items()}
        return Loss(sum=torch.stack([loss.sum for loss in losses]).sum(), count=len(labels_B2), parts=parts)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """`rationale` is chosen given the right answer; given the chosen one where the right one is hidden."""
        self.eval()
        answers_B4, rationales_BG4 = self.logits(batch)
        answers = _probabilities(answers_B4, len(batch))
        rationales = _probabilities(rationales_BG4, len(batch))
        records = []
        for sample, of_answers, of_rationales in zip(samples, answers, rationales, strict=True):
            answer = _best(of_answers) if of_answers else None
            rationale = None
            if of_rationales:
                given = sample.answer_label if sample.answer_label is not None else answer
                block = 0 if len(of_rationales) == 1 else given  # the only block is the right answer's
                rationale = None if block is None else _best(of_rationales[block])
            records.append(
                {
                    "choice_id": sample.sample_id,
                    "image_id": sample.image_id,
                    "answer_label": sample.answer_label,
                    "rationale_label": sample.rationale_label,
                    "answer": answer,
                    "rationale": rationale,
                    "answer_probabilities": of_answers,
                    "rationale_probabilities": of_rationales,
                }
            )
        return records


def _probabilities(logits: Tensor | None, count: int) -> list[Any]:
    """Softmax over the last dimension, as nested lists; empty ones for what was not learned."""
    if logits is None:
        return [[] for _ in range(count)]
    rounded: list[Any] = (logits.float().softmax(-1).double() * 1e6).round().div(1e6).tolist()
    return rounded


def _best(probabilities: Sequence[float]) -> int:
    return max(range(len(probabilities)), key=probabilities.__getitem__)
