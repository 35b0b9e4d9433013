"""NLVR: say whether a statement about an image is true (Suhr et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.metrics.nlvr import Judgement, majority_label, official_csv, score_nlvr
from vlp_models.models.info import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks.base import TaskModel, Words, init_head, need_targets
from vlp_models.tasks.gallery import WIDE, Card, Gallery, Line, PictureSource, rows_by_id
from vlp_models.tasks.scoring import BLANKED, Place, Prediction, Scored, blank_control, by_metric
from vlp_models.workspace.paths import Workspace, write_text


class NLVR(TaskModel):
    """A linear layer on the fused feature; targets int64 [B], 1 for true."""

    task = "nlvr"
    title = "True or false of an image (NLVR)"
    view = "statements"
    prediction_view = "statements"
    needs = (Fuses,)
    id_key = "statement_id"
    metric = "accuracy"
    headlines = ("accuracy", "consistency", f"gain over {BLANKED}")
    blanked_fields = ("prediction",)
    words = Words(verb="judge", text="statement")
    gallery = Gallery(title="True or false", about="pairs at even distances from the split.", wide=True)

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        self.head = nn.Linear(cast(Fuses, model).fused_dim, 2)
        init_head(self.head, info)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        labels = [sample["label"] for sample in samples]
        if any(label is None for label in labels):
            return None
        return torch.tensor([int(bool(label)) for label in labels])

    def logits(self, batch: Batch) -> Tensor:
        """[B, 2]: false, true"""
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
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
                "group": sample["group"] or "",
                "label": sample["label"],
                "prediction": p > 0.5,
                "p_true": round(p, 6),
            }
            for sample, p in zip(samples, p_true_B, strict=True)
        ]

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        return [f"{str(prediction['prediction']).lower()}  (p = {prediction['p_true']:.2f})"]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """Accuracy and consistency over the statements whose label is known. Baseline: the split's own majority
        label."""
        place.progress("NLVR accuracy and consistency")
        labels = {sample.sample_id: sample["label"] for sample in samples}

        def judgements(key: str) -> list[Judgement]:
            rows = ((p, labels[p["statement_id"]]) for p in predictions)
            return [
                Judgement(group=p["group"], label=label, prediction=bool(p[key]), item=p["statement_id"])
                for p, label in rows
                if label is not None
            ]

        scores = score_nlvr(judgements("prediction"))
        baselines = {}
        labelled = [(sample["group"], sample["label"]) for sample in samples if sample["label"] is not None]
        if labelled:
            commoner = majority_label(label for _, label in labelled)
            constant = [Judgement(group=group, label=label, prediction=commoner) for group, label in labelled]
            baselines["majority label"] = score_nlvr(constant)
        if predictions and "prediction_blank" in predictions[0]:
            blank = score_nlvr(judgements("prediction_blank"))
            baselines[BLANKED] = blank
            scores += blank_control(scores[0], blank[0])
        return Scored(scores=scores, baselines=by_metric(baselines))

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """NLVR's CSV of images and verdicts."""
        path = directory / f"nlvr_{place.source}_{split}_predictions.csv"
        images = read_table("images", place.validated, columns=["image_id", "source", "path"])
        images = images.filter(pc.equal(images["source"], place.source))
        names = dict(zip(images["image_id"].to_pylist(), images["path"].to_pylist(), strict=True))
        write_text(path, official_csv((Path(names[p["image_id"]]).name, p["prediction"]) for p in predictions))
        return path

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """Statements with the model's verdict and the label."""
        statements = rows_by_id("statements", "statement_id", workspace, predictions)
        cards = []
        for row in predictions:
            known = row["label"] is not None
            labelled = f", labelled {str(row['label']).lower()}" if known else ""
            cards.append(
                Card(
                    picture=pictures.get(row["image_id"], WIDE),
                    lines=[Line(text=statements.get(row["statement_id"], {"text": ""})["text"], strong=True)],
                    below=[
                        Line(
                            text=f"says {str(row['prediction']).lower()}",
                            right=row["label"] == row["prediction"] if known else None,
                            after=f"(p of true {row['p_true']:.2f}{labelled})",
                        )
                    ],
                )
            )
        return cards
