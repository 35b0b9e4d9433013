"""NLVR2: say whether a statement about two images is true (Suhr et al. 2019).

Each image is fused with the statement by itself; the pooled features of the two, left one first, are joined for a
classifier (VLMo, Bao et al. 2022, section 4.2, after OSCAR; SOHO, Huang et al. 2021, does the same). The papers speak
of a classification layer. VLMo's code has two with a norm and GELU between, and so has this. It also gives the second
image a token type of its own, a copy of the first's to begin with: VLMo's `second_image_type`. Without it, the image's
place in the joined feature tells it apart.
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
from vlp_models.errors import DataError
from vlp_models.evaluation.report.galleries import Card, Gallery, PictureSource, rows_by_id
from vlp_models.metrics.classification import official_csv
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss
from vlp_models.tasks import statements
from vlp_models.tasks.base import TaskModel, Words, init_head, need_targets
from vlp_models.tasks.scoring import BLANKED, Place, Prediction, Scored

IMAGES = 2  # of a statement


class NLVR2(TaskModel):
    """Two layers on the joined features of both images; targets int64 [B], 1 for true."""

    task = "nlvr2"
    title = "True or false of two images (NLVR2)"
    view = "image_pairs"
    prediction_view = "image_pairs"
    needs = (Fuses,)
    id_key = "pair_id"
    metric = "accuracy"
    headlines = ("accuracy", "consistency", f"gain over {BLANKED}")
    blanked_fields = ("prediction",)
    words = Words(verb="judge", text="statement", images=IMAGES)
    gallery = Gallery(title="True or false of two", about="pairs at even distances from the split.", wide=True)

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        width = IMAGES * cast(Fuses, model).fused_dim
        self.head = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 2))
        init_head(self.head, info)

    def read(self, samples: Sequence[Sample]) -> Batch:
        """
        Raises:
            DataError: a statement is not about two images.
        """
        for sample in samples:
            if len(sample.image_ids) != IMAGES:
                raise DataError(
                    f"{sample.sample_id}: a statement about {len(sample.image_ids)} image(s), "
                    f"{', '.join(sample.image_ids)}; {self.task} takes {IMAGES}, left and right"
                )
        return super().read(samples)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        return statements.true_or_false(samples)

    def logits(self, batch: Batch) -> Tensor:
        """[B, 2]: false, true"""
        of_each_M = torch.arange(len(batch), device=batch.text.ids_BT.device).repeat_interleave(IMAGES)
        pooled_MP = cast(Fuses, self.model).fuse(batch.image, batch.text.select(of_each_M)).pooled_BP
        return self.head(pooled_MP.reshape(len(batch), IMAGES * pooled_MP.shape[1]))

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        labels_B = need_targets(batch)
        return classification(self.logits(batch), labels_B, name="nlvr2")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        said = statements.verdicts(self.logits(batch), samples)
        ids = ({"pair_id": sample.sample_id, "image_ids": list(sample.image_ids)} for sample in samples)
        return [{**of, **verdict} for of, verdict in zip(ids, said, strict=True)]

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        return statements.spoken(prediction)

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        place.progress("NLVR2 accuracy and consistency")
        return statements.score_statements(predictions, samples, id_key=self.id_key)

    @classmethod
    def slices(cls, sample: Sample) -> list[str]:
        """The label: which of the two it is that a model misses."""
        known = [] if sample["label"] is None else [f"label={str(sample['label']).lower()}"]
        return [*super().slices(sample), *known]

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """NLVR2's CSV of identifiers and verdicts."""
        path = directory / f"nlvr2_{place.source}_{split}_predictions.csv"
        write_text(path, official_csv((p["pair_id"].partition("/")[2], p["prediction"]) for p in predictions))
        return path

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """Both pictures, the left one first, and the statement with the model's verdict and the label."""
        first = [{**row, "image_id": row["image_ids"][0]} for row in predictions]
        asked = rows_by_id("image_pairs", "pair_id", workspace, first)
        return [
            statements.card(row, asked.get(row["pair_id"], {}), *map(pictures.get, row["image_ids"]))
            for row in predictions
        ]
