"""Visual entailment: does an image entail a sentence, contradict it, or leave it open (SNLI-VE, Xie et al. 2019)?

Image premise only: the caption that SNLI's annotators saw is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.common.io import write_text
from vlp_models.common.workspace import Workspace
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import ENTAILMENT
from vlp_models.evaluation.report.galleries import Card, Gallery, Line, PictureSource, rows_by_id
from vlp_models.metrics.classification import HypothesisOnly, Labelled, commonest_label, score_labels
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks.base import TaskModel, Words, init_head, need_targets
from vlp_models.tasks.scoring import BLANKED, Place, Prediction, Scored, blank_control, by_metric, own_id, train_rows


class Entailment(TaskModel):
    """A linear layer on the fused feature; targets int64 [B], places in `labels`."""

    task = "entailment"
    title = "Visual entailment"
    view = "hypotheses"
    prediction_view = "hypotheses"
    needs = (Fuses,)
    shares_images = True
    has_labels = True
    id_key = "hypothesis_id"
    metric = "accuracy"
    headlines = ("accuracy", "macro F1", f"gain over {BLANKED}")
    blanked_fields = ("prediction",)
    words = Words(text="hypothesis")
    gallery = Gallery(title="Entailed, open or contradicted", about="hypotheses at even distances from the split.")

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ENTAILMENT
    ) -> None:
        super().__init__(model, tokenizer, info, labels=labels)
        self._index = {label: number for number, label in enumerate(self.labels)}
        self.head = nn.Linear(cast(Fuses, model).fused_dim, len(self.labels))
        init_head(self.head, info)

    @classmethod
    def labels_for(cls, tokenizer: Path) -> list[str]:
        return list(ENTAILMENT)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        labels = [sample["gold_label"] for sample in samples]
        if any(label is None for label in labels):
            return None
        return torch.tensor([self._index[label] for label in labels])

    def logits(self, batch: Batch) -> Tensor:
        """[B, labels]"""
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        labels_B = need_targets(batch)
        return classification(self.logits(batch), labels_B, name="entailment")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        probability_BC = self.logits(batch).float().softmax(-1).tolist()
        return [
            {
                "hypothesis_id": sample.sample_id,
                "image_id": sample.image_id,
                "label": sample["gold_label"],
                "prediction": max(zip(row, self.labels, strict=True), key=lambda pair: pair[0])[1],
                "probabilities": {label: round(p, 6) for label, p in zip(self.labels, row, strict=True)},
            }
            for sample, row in zip(samples, probability_BC, strict=True)
        ]

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        likely = sorted(prediction["probabilities"].items(), key=lambda pair: -pair[1])
        return [prediction["prediction"], *(f"  {probability:6.1%}  {label}" for label, probability in likely)]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """Accuracy, macro F1 and each label's recall, over the hypotheses whose label is known.

        Baselines: the commonest label of train, what train's hypotheses alone teach (metrics/hypothesis_only.py), the
        mean annotator (by the dataset's own annotations, whose majority is the label), and the same model with the
        images blanked.
        """
        place.progress("entailment accuracy")
        known = [(p, sample) for p, sample in zip(predictions, samples, strict=True) if sample["gold_label"]]

        def rows(said: Sequence[str]) -> list[Labelled]:
            return [
                Labelled(group=s.image_id, item=s.sample_id, label=s["gold_label"], prediction=prediction)
                for (_, s), prediction in zip(known, said, strict=True)
            ]

        scores = score_labels(rows([p["prediction"] for p, _ in known]), self.labels)
        others = {}
        train = train_rows("hypotheses", place, ["text", "gold_label"]).to_pylist()
        labelled = [(row["text"], row["gold_label"]) for row in train if row["gold_label"] in self._index]
        if labelled and known:
            commonest, blind = commonest_label(label for _, label in labelled), HypothesisOnly(labelled)
            others["majority label"] = score_labels(rows([commonest] * len(known)), self.labels)
            others["hypothesis only"] = score_labels(rows([blind.predict(s.text) for _, s in known]), self.labels)
        if known and "prediction_blank" in known[0][0]:
            others[BLANKED] = score_labels(rows([p["prediction_blank"] for p, _ in known]), self.labels)
            scores += blank_control(scores[0], others[BLANKED][0])
        baselines = by_metric(others)
        people = _agreement([sample for _, sample in known])
        if people is not None:
            baselines.setdefault("accuracy", {})["one annotator"] = people
        return Scored(scores=scores, baselines=baselines)

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """Tab-separated, `pairID` and `gold_label`: SNLI-VE has no evaluation server, and its labels are public."""
        path = directory / f"snli_ve_{place.source}_{split}_predictions.tsv"
        lines = [f"{own_id(p['hypothesis_id'])}\t{p['prediction']}\n" for p in predictions]
        write_text(path, "pairID\tgold_label\n" + "".join(lines))
        return path

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """Hypotheses with the model's label and the right one."""
        asked = rows_by_id("hypotheses", "hypothesis_id", workspace, predictions)
        cards = []
        for row in predictions:
            label = row["label"]
            said = Line(
                text=f"says {row['prediction']}",
                right=None if label is None else row["prediction"] == label,
                after=f"labelled {label}" if label else "",
            )
            cards.append(
                Card(
                    picture=pictures.get(row["image_id"]),
                    lines=[Line(text=asked.get(row["hypothesis_id"], {"text": ""})["text"], strong=True)],
                    bars=[(name, float(p)) for name, p in row["probabilities"].items()],
                    below=[said],
                )
            )
        return cards


def _agreement(samples: Sequence[Sample]) -> float | None:
    """The share of single annotations that are the label, in percent, where a hypothesis has three or more; None
    without any such."""
    judged = [
        (label, s["gold_label"]) for s in samples if len(s["annotator_labels"]) > 2 for label in s["annotator_labels"]
    ]
    return round(100 * sum(said == gold for said, gold in judged) / len(judged), 4) if judged else None
