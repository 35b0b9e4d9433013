"""Referring expressions: choose the region or patch that an expression refers to.

Each located state (`LocatesStates`) gets a score; the one whose box overlaps most with the object's box is the right
one, and cross-entropy over the image's states trains the score. The prediction is the box of the best state. It is
right if its intersection over union with the object's box is at least 0.5, as in RefCOCO (Yu et al. 2016). A model can
only be right where one of its boxes reaches 0.5: the score `reachable`, which bounds the accuracy.

Boxes are fractions of the upright image everywhere, so nothing has to be moved when an image is augmented. An object
that was cropped away overlaps no state, and is not trained on.

Shape suffixes: N expressions, R located states, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.data.boxes import overlap
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.metrics.score import Score, mean_score
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Located, LocatesStates
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.tasks.base import RequestFormat, TaskModel, init_head, require_targets
from vlp_models.tasks.scoring import (
    BLIND,
    EvalContext,
    Prediction,
    TaskScores,
    baselines_by_metric,
    blind_baseline,
)

WHOLE = (0.0, 0.0, 1.0, 1.0)  # predicted if an image has no located state
WHOLE_IMAGE = "whole image"  # the baseline that always answers with it
MIN_OVERLAP = 0.5


class Referring(TaskModel):
    """Two layers on each located state. Targets float32 [N, 4]: the object's box."""

    task = "referring"
    title = "Find what an expression refers to"
    view = "expressions"
    prediction_view = "expressions"
    needs = (LocatesStates,)
    shares_images = True
    id_key = "expression_id"
    metric = "accuracy"
    headlines = ("accuracy", "reachable", f"gain over {BLIND}")
    baselines_to_beat = (WHOLE_IMAGE,)
    blind_fields = ("box",)
    request = RequestFormat(text="expression")

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        width = cast(LocatesStates, model).located_dim
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        init_head(self.head, info)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        if not all(sample["boxes"] for sample in samples):
            return None
        return torch.tensor([sample["boxes"][0] for sample in samples])

    def scores_of_states(self, batch: Batch) -> tuple[Tensor, Located]:
        """Return a score for each located state, [N, R], -inf where masked."""
        located = cast(LocatesStates, self.model).locate(batch.image, batch.text)
        scores_NR = self.head(located.states_NRD).squeeze(-1).float()
        return scores_NR.masked_fill(~located.mask_NR, float("-inf")), located

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        boxes_N4 = require_targets(batch)
        scores_NR, located = self.scores_of_states(batch)
        best_N, right_N = overlap(located.boxes_NR4, boxes_N4[:, None]).max(1)
        visible_N = best_N > 0
        return cross_entropy(scores_NR[visible_N], right_N[visible_N], name=self.task)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        scores_NR, located = self.scores_of_states(batch)
        found_N4 = located.boxes_NR4[torch.arange(len(scores_NR)), scores_NR.argmax(1)].cpu()
        boxes_NR4, records = located.boxes_NR4.cpu(), []
        for row, sample in enumerate(samples):
            box = found_N4[row].tolist() if bool(located.mask_NR[row].any()) else list(WHOLE)
            truth = sample["boxes"][0] if sample["boxes"] else None
            best = None if truth is None else float(overlap(boxes_NR4[row], torch.tensor(truth)).max())
            records.append(
                {
                    "expression_id": sample.sample_id,
                    "image_id": sample.image_id,
                    "box": [round(v, 4) for v in box],
                    "best_overlap": None if best is None else round(best, 4),
                }
            )
        return records

    @classmethod
    def format_prediction(cls, prediction: Prediction) -> list[str]:
        x1, y1, x2, y2 = (f"{100 * v:.0f}%" for v in prediction["box"])
        return [f"from {x1}, {y1} to {x2}, {y2} of the image's width and height"]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return the accuracy at an overlap of 0.5, and the share of objects that one of the boxes reaches."""
        truth = {sample.sample_id: sample["boxes"][0] for sample in samples if sample["boxes"]}
        known = [p for p in predictions if p["expression_id"] in truth]

        def accuracy(boxes: Sequence[Sequence[float]]) -> Score:
            right = [_reaches(box, truth[p["expression_id"]]) for box, p in zip(boxes, known, strict=True)]
            return _mean("accuracy", right, known)

        scores = [accuracy([p["box"] for p in known])]
        baselines = {WHOLE_IMAGE: [accuracy([WHOLE] * len(known))]}
        reachable = _mean("reachable", [float(p["best_overlap"] >= MIN_OVERLAP) for p in known], known, kept=False)
        if known and "box_blind" in known[0]:
            blind = accuracy([p["box_blind"] for p in known])
            baselines[BLIND] = [blind]
            scores += blind_baseline(scores[0], blind)
        return TaskScores(scores=[*scores, reachable], baselines=baselines_by_metric(baselines))

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        return bool(sample["boxes"])


def _reaches(box: Sequence[float], truth: Sequence[float]) -> float:
    return float(overlap(torch.tensor(box), torch.tensor(truth)) >= MIN_OVERLAP)


def _mean(metric: str, values: Sequence[float], known: Sequence[Mapping[str, Any]], *, kept: bool = True) -> Score:
    groups, items = [p["image_id"] for p in known], [p["expression_id"] for p in known]
    return mean_score(metric, values, groups, items=items, kept=kept)
