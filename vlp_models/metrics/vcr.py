"""VCR scores (Zellers et al. 2019, section 3): the answer, the rationale given the right answer, and both at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlp_models.metrics.score import Score, mean_score, not_computed

CHANCE = {"Q->A": 25.0, "QA->R": 25.0, "Q->AR": 6.25}


@dataclass(frozen=True, kw_only=True)
class VCRResult:
    """The result of one question. group: its image. item: its id. None: the label is hidden, or no choice was made."""

    group: str
    answer_right: bool | None
    rationale_right: bool | None  # chosen given the right answer
    item: str = ""


def score_vcr(results: Sequence[VCRResult]) -> list[Score]:
    """Return Q->A, QA->R and Q->AR in percent, each over the questions where it is known."""
    columns: dict[str, list[tuple[VCRResult, bool | None]]] = {
        "Q->A": [(j, j.answer_right) for j in results],
        "QA->R": [(j, j.rationale_right) for j in results],
        "Q->AR": [
            (j, None if None in (j.answer_right, j.rationale_right) else j.answer_right and j.rationale_right)
            for j in results
        ],
    }
    scores = []
    for metric, column in columns.items():
        known = [(j, float(right)) for j, right in column if right is not None]
        if known:
            values, groups = [right for _, right in known], [j.group for j, _ in known]
            scores.append(mean_score(metric, values, groups, items=[j.item for j, _ in known]))
        else:
            scores.append(not_computed(metric, 0, "labels are hidden, or the run was not trained on it"))
    return scores


def official_csv(rows: Sequence[tuple[str, Sequence[float], Sequence[Sequence[float]]]]) -> str:
    """Format the leaderboard's file: annot_id, four answer probabilities, four rationale probabilities per answer.

    Args:
        rows: annot_id, [4], [4][4] (given answer, rationale).
    """
    header = ["annot_id", *(f"answer_{i}" for i in range(4))]
    header += [f"rationale_conditioned_on_a{given}_{i}" for given in range(4) for i in range(4)]
    lines = [",".join(header)]
    for annot_id, answer, rationales in rows:
        probabilities = [*answer, *(p for block in rationales for p in block)]
        lines.append(",".join([annot_id, *(f"{p:.6f}" for p in probabilities)]))
    return "\n".join(lines) + "\n"
