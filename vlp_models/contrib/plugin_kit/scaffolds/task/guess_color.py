"""A complete task in one file: which color does a question about an image ask for?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from vlp_models.common.io import write_text
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.metrics.score import STATISTICS, Evidence, FloatArray, Score, mean_score
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.tasks.base import RequestFormat, TaskModel, read_answers, require_targets
from vlp_models.tasks.scoring import EvalContext, Prediction, TaskScores

UNKNOWN = -1  # an answer that is not a label: not trained on


def error_percent(sums_SK: FloatArray) -> FloatArray:
    """Columns: right ones, all."""
    return 100 * (1 - sums_SK[:, 0] / sums_SK[:, 1])


class GuessColor(TaskModel):
    task = "guess_color"
    title = "Guess the color"
    view = "questions"
    prediction_view = "questions"
    needs = (Fuses,)
    has_labels = True
    id_key = "question_id"
    metric = "error (all)"
    direction = "lower"
    headlines = ("error (all)",)
    statistics: ClassVar = {**STATISTICS, "error": error_percent}
    blind_fields = ("color",)
    request = RequestFormat(text="question")

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info, labels=labels)
        # (B, P) -> (B, labels)
        self.head = nn.Linear(cast(Fuses, model).fused_dim, len(self.labels))

    @classmethod
    def initial_labels(cls, tokenizer: Path) -> list[str]:
        return read_answers(tokenizer)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        # Samples without answers, as at prediction time, have no targets.
        if not all(sample["answers"] for sample in samples):
            return None
        index = {label: i for i, label in enumerate(self.labels)}
        return torch.tensor([index.get(sample["answers"][0], UNKNOWN) for sample in samples])

    def logits(self, batch: Batch) -> Tensor:
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        targets_B = require_targets(batch)
        # (B,): only questions whose answer is a label are trained on.
        known_B = targets_B != UNKNOWN
        return cross_entropy(self.logits(batch)[known_B], targets_B[known_B], name="guess_color")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        best_B = self.logits(batch).argmax(-1).tolist()
        return [
            {"question_id": s.sample_id, "image_id": s.image_id, "color": self.labels[i]}
            for s, i in zip(samples, best_B, strict=True)
        ]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        # Samples without answers are predicted and not scored.
        scored = [(p, s) for p, s in zip(predictions, samples, strict=True) if s["answers"]]
        right = [float(p["color"] == s["answers"][0]) for p, s in scored]
        groups, items = [s.image_id for _, s in scored], [s.sample_id for _, s in scored]
        # (N, 2): right or not, and 1 for each item; sums over items give the error.
        parts = np.column_stack([right, np.ones(len(right))])
        evidence = Evidence(groups=groups, items=items, parts_NK=parts, statistic=error_percent)
        error = Score(
            metric="error (all)",
            value=float(error_percent(parts.sum(0, keepdims=True))[0]),
            n=len(right),
            evidence=evidence,
        )
        return TaskScores(scores=[error, mean_score("accuracy", right, groups, items=items)])

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        path = directory / f"colors_{context.source}_{split}.txt"
        write_text(path, "".join(f"{p['question_id']} {p['color']}\n" for p in predictions))
        return path
