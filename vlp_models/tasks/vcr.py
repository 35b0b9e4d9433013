"""Visual commonsense reasoning: choose one of four answers, and one of four rationales given the answer.

As in VQA (TDEN, section "Downstream Tasks"), each choice's text is fused with the image and a linear layer makes one
logit of the fused feature; cross-entropy over the four. (The public code leaves the cross-modal decoder out of this
feature: `models.<name>.config.use_decoder_in_fusion`.) The segments of a text are told apart by [SEP] alone, as in
RoBERTa: [CLS] question [SEP] answer [SEP], and [CLS] question [SEP] answer [SEP] rationale [SEP]. The public code gives
the last one a token type of its own, the one that means in pretraining that words are being generated; the paper does
not speak of it (`models.<name>.config.segment_types`, off but in imported VCR models).

The image's own objects come before the detected regions, as far as `max_regions` goes (data/collate.py). The same ones
serve answers and rationales, so that an answer is chosen without a hint of the rationale. A model that reads pixels
gets no boxes of objects: what its texts call 'person1' has no place in the picture. TDEN's [IMG] is the mean of all
regions that it sees; its public code has features of the objects themselves, and weighs their mean and the detected
regions' by one more than either's number, also where it then leaves some out.

Shape suffixes: B questions, N texts of a question, P fused feature.
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
from vlp_models.common.workspace import Workspace
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.evaluation.report.galleries import Card, Gallery, Line, PictureSource, rows_by_id
from vlp_models.metrics.vcr import CHANCE, Judged, official_csv, score_vcr
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks.base import TaskModel, TaskOptions, init_head, joined, need_targets
from vlp_models.tasks.scoring import BLANKED, Place, Prediction, Scored, blank_control, by_metric, own_id

CHOICES = 4
UNKNOWN = -1  # a label that the run does not learn from


@dataclass(frozen=True, kw_only=True)
class VCROptions(TaskOptions):
    """subtask: one model for both, their losses added (as the public code, which takes turns), or one alone."""

    subtask: Literal["both", "answer", "rationale"] = "both"


class VCR(TaskModel):
    """Targets int64 [B, 2]: the right answer's place and the right rationale's."""

    task = "vcr"
    title = "Visual commonsense reasoning"
    view = "choices"
    prediction_view = "choices"
    needs = (Fuses,)
    options_class = VCROptions
    id_key = "choice_id"
    metric = "Q->AR"
    headlines = ("Q->A", "QA->R", "Q->AR", f"gain over {BLANKED}")
    blanked_fields = ("answer", "rationale")
    gallery = Gallery(
        title="Answers and rationales",
        about="questions at even distances from the split. Chosen ones are bold; the rationale is chosen given the "
        "right answer.",
    )

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        subtask = cast(VCROptions, self.options).subtask
        self.answers_too, self.rationales_too = subtask != "rationale", subtask != "answer"
        self.head = nn.Linear(cast(Fuses, model).fused_dim, 1)
        init_head(self.head, info)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        rows = []
        for sample in samples:
            # a rationale is learned given the right answer
            if sample["answer_label"] is None or (self.rationales_too and sample["rationale_label"] is None):
                return None
            rows.append(
                [sample["answer_label"], UNKNOWN if sample["rationale_label"] is None else sample["rationale_label"]]
            )
        return torch.tensor(rows)

    def read(self, samples: Sequence[Sample]) -> Batch:
        """N texts a question, in the order: four answers, then four rationales for each answer that is given: the right
        one, or each of the four where a question of the batch hides it."""
        hidden = any(sample["answer_label"] is None for sample in samples)
        texts = [self._texts(sample, hidden) for sample in samples]
        text = self.tokenizer.encode_segments([segments for own in texts for segments in own], self.info.max_text_len)
        owner_N = torch.tensor([row for row, own in enumerate(texts) for _ in own], dtype=torch.int64)
        return self.reader.collate(samples, text=dataclasses.replace(text, owner_N=owner_N), known_objects=True)

    def _texts(self, sample: Sample, every_answer: bool) -> list[tuple[str, ...]]:
        if len(sample["answers"]) != CHOICES or len(sample["rationales"]) != CHOICES:
            raise DataError(f"{sample.sample_id}: not {CHOICES} answers and {CHOICES} rationales; `dvc repro validate`")
        texts: list[tuple[str, ...]] = []
        if self.answers_too:
            texts += [(sample.text, answer) for answer in sample["answers"]]
        if self.rationales_too:
            given = sample["answers"] if every_answer else (sample["answers"][cast(int, sample["answer_label"])],)
            texts += [(sample.text, answer, rationale) for answer in given for rationale in sample["rationales"]]
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

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Parts `vcr_answer` and `vcr_rationale`, with their accuracies; the loss is their sum, a question an item."""
        labels_B2 = need_targets(batch)
        answers_B4, rationales_BG4 = self.logits(batch)
        losses = []
        if answers_B4 is not None:
            losses.append(classification(answers_B4, labels_B2[:, 0], name="vcr_answer"))
        if rationales_BG4 is not None:
            losses.append(classification(rationales_BG4[:, 0], labels_B2[:, 1], name="vcr_rationale"))
        return joined(*losses)

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
                given = sample["answer_label"] if sample["answer_label"] is not None else answer
                block = 0 if len(of_rationales) == 1 else given  # the only block is the right answer's
                rationale = None if block is None else _best(of_rationales[block])
            records.append(
                {
                    "choice_id": sample.sample_id,
                    "image_id": sample.image_id,
                    "answer_label": sample["answer_label"],
                    "rationale_label": sample["rationale_label"],
                    "answer": answer,
                    "rationale": rationale,
                    "answer_probabilities": of_answers,
                    "rationale_probabilities": of_rationales,
                }
            )
        return records

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """VCR's three accuracies. Baselines: chance, and the same model with the images blanked."""
        place.progress("VCR accuracies")
        scores = score_vcr(_judged(predictions, ""))
        baselines = {metric: {"chance": value} for metric, value in CHANCE.items()}
        if predictions and "answer_blank" in predictions[0]:
            blank = score_vcr(_judged(predictions, "_blank"))
            for metric, values in by_metric({BLANKED: blank}).items():
                baselines[metric] |= values
            known = [(score, other) for score, other in zip(scores, blank, strict=True) if score.value is not None]
            if known:
                scores = scores + blank_control(*known[-1])  # Q->AR, or what the run did learn
        return Scored(scores=scores, baselines=baselines)

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """The leaderboard's CSV of probabilities.

        None where labels are known: the file gives the rationales of all four answers, which are worked out only where
        the right one is hidden.
        """
        rows = [(p["choice_id"], p["answer_probabilities"], p["rationale_probabilities"]) for p in predictions]
        if not all(answers and len(rationales) == len(answers) for _, answers, rationales in rows):
            return None
        path = directory / f"vcr_{place.source}_{split}_predictions.csv"
        write_text(path, official_csv([(str(own_id(name)), answers, rationales) for name, answers, rationales in rows]))
        return path

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """Questions with their answers and rationales, what was chosen and what is right."""
        asked = rows_by_id("choices", "choice_id", workspace, predictions)
        cards = []
        for row in predictions:
            question = asked.get(row["choice_id"], {"text": "", "answers": [], "rationales": []})
            texts = [
                Line(
                    text=text,
                    right=True if i == row[label] else False if i == row[kind] and row[label] is not None else None,
                    strong=i == row[kind],
                    soft=True,
                )
                for kind, several, label in (
                    ("answer", "answers", "answer_label"),
                    ("rationale", "rationales", "rationale_label"),
                )
                for i, text in enumerate(question[several])
            ]
            heading = Line(text=question["text"], strong=True)
            cards.append(Card(picture=pictures.get(row["image_id"]), lines=[heading, *texts]))
        return cards


def _judged(predictions: Sequence[Prediction], suffix: str) -> list[Judged]:
    """suffix: "_blank" for what was said of the blanked image."""

    def right(chosen: int | None, label: int | None) -> bool | None:
        return None if chosen is None or label is None else chosen == label

    return [
        Judged(
            group=p["image_id"],
            item=p["choice_id"],
            answer_right=right(p[f"answer{suffix}"], p["answer_label"]),
            rationale_right=right(p[f"rationale{suffix}"], p["rationale_label"]),
        )
        for p in predictions
    ]


def _probabilities(logits: Tensor | None, count: int) -> list[Any]:
    """Softmax over the last dimension, as nested lists; empty ones for what was not learned."""
    if logits is None:
        return [[] for _ in range(count)]
    rounded: list[Any] = (logits.float().softmax(-1).double() * 1e6).round().div(1e6).tolist()
    return rounded


def _best(probabilities: Sequence[float]) -> int:
    return max(range(len(probabilities)), key=probabilities.__getitem__)
