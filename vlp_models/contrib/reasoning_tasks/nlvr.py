"""NLVR and NLVR2: is a statement about one image (Suhr et al. 2017) or two (Suhr et al. 2019) true?

NLVR2: each image is fused with the statement separately; the pooled features of the two, left image first, are
concatenated for a classifier (VLMo, Bao et al. 2022, section 4.2, after OSCAR; SOHO, Huang et al. 2021, does the same).
The papers mention one classification layer. VLMo's code has two with a norm and GELU between, and so has this one.
VLMo's code also gives the second image a token type of its own, initialized as a copy of the first's: the model option
`second_image_type`. Without it, only the position in the concatenated feature distinguishes the images.
The option `one_pass` reads both images and the statement in one sequence instead, so that the images attend to each
other (UNITER, Chen et al. 2020, "triplet"); it needs a model with `images_per_text: 2`, and no paper here does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.common.io import write_text
from vlp_models.contrib.reasoning_tasks.scores import Judgment, format_nlvr_csv, majority_label, score_nlvr
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.protocols import Fuses, ReadsSeveralImages
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.tasks.base import RequestFormat, TaskModel, TaskOptions, init_head, require_targets
from vlp_models.tasks.scoring import (
    BLIND,
    MAJORITY,
    EvalContext,
    Prediction,
    TaskScores,
    baselines_by_metric,
    blind_baseline,
)

IMAGES = 2  # of an NLVR2 statement


class StatementTask(TaskModel):
    """True or false: what NLVR and NLVR2 share. Targets int64 [B], 1 for true; logits [B, 2], false first.

    A prediction has `group`, `label`, `prediction` and `p_true`, and the statement's id under the task's `id_key`.
    """

    needs = (Fuses,)
    metric = "accuracy"
    headlines = ("accuracy", "consistency", f"gain over {BLIND}")
    baselines_to_beat = (MAJORITY,)
    blind_fields = ("prediction",)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        labels = [sample["label"] for sample in samples]
        return None if None in labels else torch.tensor([int(label) for label in labels])

    def logits(self, batch: Batch) -> Tensor:
        """Return logits [B, 2]: false, true."""
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        labels_B = require_targets(batch)
        return cross_entropy(self.logits(batch), labels_B, name=self.task)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        # (B, 2) -> (B,): the probability of true.
        p_true_B = self.logits(batch).float().softmax(-1)[:, 1].tolist()
        return [
            {
                self.id_key: sample.sample_id,
                **self._image_ids(sample),
                "group": sample["group"] or "",
                "label": sample["label"],
                "prediction": p > 0.5,
                "p_true": round(p, 6),
            }
            for sample, p in zip(samples, p_true_B, strict=True)
        ]

    def _image_ids(self, sample: Sample) -> dict[str, Any]:
        return {"image_id": sample.image_id}

    @classmethod
    def format_prediction(cls, prediction: Prediction) -> list[str]:
        return [f"{str(prediction['prediction']).lower()}  (p = {prediction['p_true']:.2f})"]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return accuracy and consistency over the statements whose label is known.

        Baselines: the split's own majority label, and the blind model.
        """
        context.progress(f"{self.task.upper()} accuracy and consistency")
        # A statement's label may be hidden (None): it is predicted, and not scored.
        labels = {sample.sample_id: sample["label"] for sample in samples}

        def judgments(key: str) -> list[Judgment]:
            """Compare the predictions under `key` with the labels; statements whose label is hidden are left out."""
            rows = []
            for p in predictions:
                statement_id = p[self.id_key]
                label = labels[statement_id]
                if label is not None:
                    rows.append(Judgment(group=p["group"], label=label, prediction=bool(p[key]), item=statement_id))
            return rows

        scores = score_nlvr(judgments("prediction"))
        baselines = {}
        truth = judgments("prediction")
        # The same answer for every statement: what a model that learned nothing else achieves.
        if truth:
            majority = majority_label(judgment.label for judgment in truth)
            baselines[MAJORITY] = score_nlvr([replace(judgment, prediction=majority) for judgment in truth])
        if predictions and "prediction_blind" in predictions[0]:
            blind = score_nlvr(judgments("prediction_blind"))
            baselines[BLIND] = blind
            scores += blind_baseline(scores[0], blind[0])
        return TaskScores(scores=scores, baselines=baselines_by_metric(baselines))


class NLVR(StatementTask):
    """A linear layer on the fused feature."""

    task = "nlvr"
    title = "True or false of an image (NLVR)"
    view = "statements"
    prediction_view = "statements"
    shares_images = True
    id_key = "statement_id"
    request = RequestFormat(text="statement")
    example = 'judge("image.png", "There is a yellow circle.")'

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        self.head = nn.Linear(cast(Fuses, model).fused_dim, 2)
        init_head(self.head, info)

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write NLVR's CSV of image names and predictions."""
        import pyarrow as pa

        from vlp_models.data.tables import read_rows_of

        path = directory / f"nlvr_{context.source}_{split}_predictions.csv"
        image_ids = pa.array([p["image_id"] for p in predictions], pa.string())
        images = read_rows_of(image_ids, "images", context.validated, ["image_id", "path"])
        # The official script finds an image by the name of its file.
        names = dict(zip(images["image_id"].to_pylist(), images["path"].to_pylist(), strict=True))
        write_text(path, format_nlvr_csv((Path(names[p["image_id"]]).name, p["prediction"]) for p in predictions))
        return path


@dataclass(frozen=True, kw_only=True)
class NLVR2Options(TaskOptions):
    """one_pass: read both images and the statement in one sequence; False: each image with the statement separately."""

    one_pass: bool = False


class NLVR2(StatementTask):
    """Two layers on the concatenated features of both images, or on the feature of one sequence (`one_pass`)."""

    task = "nlvr2"
    title = "True or false of two images (NLVR2)"
    view = "image_pairs"
    prediction_view = "image_pairs"
    options_class = NLVR2Options
    id_key = "pair_id"
    request = RequestFormat(text="statement", images=IMAGES)
    example = 'judge(["left.png", "right.png"], "Both images show a dog.")'

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        # A model without this protocol reads one image per text.
        model_images = model.images_per_text if isinstance(model, ReadsSeveralImages) else 1
        if self.options.one_pass and model_images < IMAGES:
            raise ParamsError(
                f"params.yaml: `one_pass` of {self.task} reads {IMAGES} images in one sequence, but the model "
                f"`{info.name}` reads {model_images}; set `models.{info.name}.config.images_per_text: {IMAGES}`"
            )
        # The head reads one feature, or the two of both passes side by side.
        width = (1 if self.options.one_pass else IMAGES) * cast(Fuses, model).fused_dim
        self.head = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 2))
        init_head(self.head, info)

    def read(self, samples: Sequence[Sample]) -> Batch:
        """Collate the samples.

        Raises:
            DataError: a statement does not have two images.
        """
        for sample in samples:
            if len(sample.image_ids) != IMAGES:
                raise DataError(
                    f"{sample.sample_id}: a statement about {len(sample.image_ids)} image(s), "
                    f"{', '.join(sample.image_ids)}; {self.task} takes {IMAGES}, left and right"
                )
        return super().read(samples)

    def logits(self, batch: Batch) -> Tensor:
        """Return logits [B, 2]: false, true. The batch has M = 2 B images, the left one of each pair first."""
        if self.options.one_pass:
            return self.head(cast(Fuses, self.model).fuse(batch.group_images(), batch.text).pooled_BP)
        # Two passes: each image is fused with its pair's statement, which is therefore there twice.
        text_of_image_M = torch.arange(len(batch), device=batch.text.ids_BT.device).repeat_interleave(IMAGES)
        pooled_MP = cast(Fuses, self.model).fuse(batch.image, batch.text.select(text_of_image_M)).pooled_BP
        # (2 B, P) -> (B, 2 P): the left image's feature, then the right one's
        return self.head(pooled_MP.reshape(len(batch), IMAGES * pooled_MP.shape[1]))

    def _image_ids(self, sample: Sample) -> dict[str, Any]:
        return {"image_ids": list(sample.image_ids)}

    @classmethod
    def slices(cls, sample: Sample) -> list[str]:
        """Return the common slices and the label."""
        label = [] if sample["label"] is None else [f"label={str(sample['label']).lower()}"]
        return [*super().slices(sample), *label]

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write NLVR2's CSV of identifiers and predictions."""
        # The official script's identifiers have no prefix of the dataset.
        path = directory / f"nlvr2_{context.source}_{split}_predictions.csv"
        write_text(path, format_nlvr_csv((p["pair_id"].partition("/")[2], p["prediction"]) for p in predictions))
        return path
