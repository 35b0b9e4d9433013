"""Visual entailment: does an image entail a sentence, contradict it, or neither (SNLI-VE, Xie et al. 2019)?

The premise is the image alone: the caption that SNLI's annotators read is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vlp_models.common.io import write_text
from vlp_models.contrib.reasoning_tasks.scores import HypothesisOnly, LabeledItem, most_common_label, score_labels
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views.hypotheses import ENTAILMENT
from vlp_models.metrics.score import Evidence, Score, mean_percent
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.protocols import Fuses
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.tasks.base import RequestFormat, TaskModel, init_head, require_targets
from vlp_models.tasks.scoring import (
    BLIND,
    MAJORITY,
    EvalContext,
    Prediction,
    TaskScores,
    baselines_by_metric,
    blind_baseline,
    id_in_source,
    read_train_rows,
)

HYPOTHESIS_ONLY = "hypothesis only"


class Entailment(TaskModel):
    """A linear layer on the fused feature; targets int64 [B], indices into `labels`."""

    task = "entailment"
    title = "Visual entailment"
    view = "hypotheses"
    prediction_view = "hypotheses"
    needs = (Fuses,)
    shares_images = True
    has_labels = True
    id_key = "hypothesis_id"
    metric = "accuracy"
    headlines = ("accuracy", "macro F1", f"gain over {BLIND}")
    baselines_to_beat = (MAJORITY, HYPOTHESIS_ONLY)
    blind_fields = ("prediction",)
    request = RequestFormat(text="hypothesis")
    example = 'predict("photo.jpg", "Two dogs are playing.")'

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ENTAILMENT
    ) -> None:
        super().__init__(model, tokenizer, info, labels=labels)
        self._index = {label: number for number, label in enumerate(self.labels)}
        self.head = nn.Linear(cast(Fuses, model).fused_dim, len(self.labels))
        init_head(self.head, info)

    @classmethod
    def initial_labels(cls, tokenizer: Path) -> list[str]:
        return list(ENTAILMENT)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        labels = [sample["gold_label"] for sample in samples]
        # One hidden label is enough: the targets are those of the whole batch.
        if any(label is None for label in labels):
            return None
        return torch.tensor([self._index[label] for label in labels])

    def logits(self, batch: Batch) -> Tensor:
        """Return logits [B, labels]."""
        return self.head(cast(Fuses, self.model).fuse(batch.image, batch.text).pooled_BP)

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        labels_B = require_targets(batch)
        return cross_entropy(self.logits(batch), labels_B, name="entailment")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        self.eval()
        probability_BC = self.logits(batch).float().softmax(-1).tolist()
        records = []
        for sample, row in zip(samples, probability_BC, strict=True):
            best = max(range(len(row)), key=row.__getitem__)  # the first of equal ones
            records.append(
                {
                    "hypothesis_id": sample.sample_id,
                    "image_id": sample.image_id,
                    "label": sample["gold_label"],
                    "prediction": self.labels[best],
                    "probabilities": {label: round(p, 6) for label, p in zip(self.labels, row, strict=True)},
                }
            )
        return records

    @classmethod
    def format_prediction(cls, prediction: Prediction) -> list[str]:
        ranked = sorted(prediction["probabilities"].items(), key=lambda pair: -pair[1])
        return [prediction["prediction"], *(f"  {probability:6.1%}  {label}" for label, probability in ranked)]

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return accuracy, macro F1 and each label's recall over the hypotheses whose label is known.

        Baselines: the most common label of train, a classifier of the hypothesis text (`HypothesisOnly`), the mean
        annotator (the individual annotators' agreement with the gold label), and the blind model.
        """
        context.progress("entailment accuracy")
        # A hypothesis without a gold label (the annotators disagreed, or it is hidden) is not scored.
        labeled = [(p, sample) for p, sample in zip(predictions, samples, strict=True) if sample["gold_label"]]

        def score_predicted(predicted: Sequence[str]) -> list[Score]:
            items = [
                LabeledItem(group=s.image_id, item=s.sample_id, label=s["gold_label"], prediction=prediction)
                for (_, s), prediction in zip(labeled, predicted, strict=True)
            ]
            return score_labels(items, self.labels)

        scores = score_predicted([p["prediction"] for p, _ in labeled])
        baseline_scores = {}
        rows = read_train_rows("hypotheses", context, ["text", "gold_label"]).to_pylist()
        # Train rows without a gold label, on which the annotators disagreed, have nothing to count.
        train = [(row["text"], row["gold_label"]) for row in rows if row["gold_label"] in self._index]
        # Both learn from train's labels, and neither reads an image.
        if train and labeled:
            majority, text_only = most_common_label(label for _, label in train), HypothesisOnly(train)
            baseline_scores[MAJORITY] = score_predicted([majority] * len(labeled))
            baseline_scores[HYPOTHESIS_ONLY] = score_predicted([text_only.predict(s.text) for _, s in labeled])
        if labeled and "prediction_blind" in labeled[0][0]:
            baseline_scores[BLIND] = score_predicted([p["prediction_blind"] for p, _ in labeled])
            scores += blind_baseline(scores[0], baseline_scores[BLIND][0])
        baseline_scores["one annotator"] = [_annotator_agreement([sample for _, sample in labeled])]
        return TaskScores(scores=scores, baselines=baselines_by_metric(baseline_scores))

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write `pairID` and `gold_label` as TSV; SNLI-VE has no evaluation server, and its labels are public."""
        path = directory / f"snli_ve_{context.source}_{split}_predictions.tsv"
        lines = [f"{id_in_source(p['hypothesis_id'])}\t{p['prediction']}\n" for p in predictions]
        write_text(path, "pairID\tgold_label\n" + "".join(lines))
        return path


def _annotator_agreement(samples: Sequence[Sample]) -> Score:
    """Return the individual annotators' agreement with the gold label; without a value if none was recorded.

    Only hypotheses with three or more annotations count.
    """
    counts = []
    for sample in samples:
        # Fewer annotations have no majority that one of them could miss.
        labels = sample["annotator_labels"] if len(sample["annotator_labels"]) > 2 else ()
        counts.append((sum(label == sample["gold_label"] for label in labels), len(labels)))
    # (N, 2): annotators who agree, and all of them.
    parts = np.array(counts, dtype=np.float64).reshape(-1, 2)
    total = parts.sum(axis=0, keepdims=True)
    value = float(mean_percent(total)[0]) if total[0, 1] else None
    evidence = Evidence(
        groups=[sample.image_id for sample in samples],
        parts_NK=parts,
        statistic=mean_percent,
        items=[sample.sample_id for sample in samples],
    )
    return Score(metric="accuracy", value=value, n=len(samples), evidence=evidence)
