"""NLVR: say whether a statement about an image is true (Suhr et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from vlp_models.common.io import write_text
from vlp_models.common.workspace import Workspace
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.evaluation.report.galleries import WIDE, Card, Gallery, PictureSource, rows_by_id
from vlp_models.metrics.classification import official_csv
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks import statements
from vlp_models.tasks.base import TaskModel, Words, init_head, need_targets
from vlp_models.tasks.scoring import BLANKED, Place, Prediction, Scored


class NLVR(TaskModel):
    """A linear layer on the fused feature; targets int64 [B], 1 for true."""

    task = "nlvr"
    title = "True or false of an image (NLVR)"
    view = "statements"
    prediction_view = "statements"
    needs = (Fuses,)
    shares_images = True
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
        return statements.true_or_false(samples)

    def logits(self, batch: Batch) -> Tensor:
        """[B, 2]: false, true"""
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        labels_B = need_targets(batch)
        return classification(self.logits(batch), labels_B, name="nlvr")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        said = statements.verdicts(self.logits(batch), samples)
        ids = ({"statement_id": sample.sample_id, "image_id": sample.image_id} for sample in samples)
        return [{**of, **verdict} for of, verdict in zip(ids, said, strict=True)]

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        return statements.spoken(prediction)

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        place.progress("NLVR accuracy and consistency")
        return statements.score_statements(predictions, samples, id_key=self.id_key)

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
        asked = rows_by_id("statements", "statement_id", workspace, predictions)
        return [
            statements.card(row, asked.get(row["statement_id"], {}), pictures.get(row["image_id"], WIDE))
            for row in predictions
        ]
