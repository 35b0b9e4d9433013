"""What NLVR and NLVR2 share: statements that are true or false, about one image or two.

A prediction holds `group`, `label`, `prediction` and `p_true`, and the statement's id under the task's `id_key`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlp_models.data.sample import Sample
from vlp_models.metrics.nlvr import Judgement, majority_label, score_nlvr
from vlp_models.tasks.gallery import Card, Line
from vlp_models.tasks.scoring import BLANKED, Prediction, Scored, blank_control, by_metric


def true_or_false(samples: Sequence[Sample]) -> Tensor | None:
    """Targets, int64 [B], 1 for true; None where one is hidden."""
    labels = [sample["label"] for sample in samples]
    return None if None in labels else torch.tensor([int(label) for label in labels])


def verdicts(logits_B2: Tensor, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What is said of each statement; columns: false, true."""
    p_true_B = logits_B2.float().softmax(-1)[:, 1].tolist()
    return [
        {
            "group": sample["group"] or "",
            "label": sample["label"],
            "prediction": p > 0.5,
            "p_true": round(p, 6),
        }
        for sample, p in zip(samples, p_true_B, strict=True)
    ]


def spoken(prediction: Prediction) -> list[str]:
    return [f"{str(prediction['prediction']).lower()}  (p = {prediction['p_true']:.2f})"]


def score_statements(predictions: Sequence[Prediction], samples: Sequence[Sample], *, id_key: str) -> Scored:
    """Accuracy and consistency over the statements whose label is known. Baselines: the split's own majority label, and
    the same model with the images blanked."""
    labels = {sample.sample_id: sample["label"] for sample in samples}

    def judgements(key: str) -> list[Judgement]:
        rows = ((p, labels[p[id_key]]) for p in predictions)
        return [
            Judgement(group=p["group"], label=label, prediction=bool(p[key]), item=p[id_key])
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


def card(row: Prediction, statement: Mapping[str, Any], picture: Any, beside: Any = None) -> Card:
    """A statement with the model's verdict and the label."""
    known = row["label"] is not None
    labelled = f", labelled {str(row['label']).lower()}" if known else ""
    said = Line(
        text=f"says {str(row['prediction']).lower()}",
        right=row["label"] == row["prediction"] if known else None,
        after=f"(p of true {row['p_true']:.2f}{labelled})",
    )
    return Card(picture=picture, beside=beside, lines=[Line(text=statement.get("text", ""), strong=True)], below=[said])
