"""The report of `vlp influence`, and which of its pairs `validate` removes."""

from __future__ import annotations

import json
from pathlib import Path

from vlp_models.contrib.influence.params import InfluenceParams
from vlp_models.errors import DataError, first_line
from vlp_models.params import ValidateParams


def files(params: ValidateParams) -> list[str]:
    """Return the file that `read_worst` reads, relative to the project's root; it need not exist."""
    section = params.section(InfluenceParams)
    return [section.report] if section.worst else []


def read_worst(params: ValidateParams, root: Path) -> dict[str, str]:
    """Return caption id -> why it is removed: of the pairs with the lowest scores, those that raise the loss.

    Raises:
        DataError: the report is missing, damaged, or of questions.
    """
    section = params.section(InfluenceParams)
    worst, file = section.worst, root / section.report
    if not worst:
        return {}
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if any(row["task"] == "vqa" for row in rows):
            raise DataError(f"{file}: has questions of {rows[0]['run']}; `validate.influence.worst` removes captions")
        lowest = sorted(rows, key=lambda row: (row["score"], row["pair_id"]))[: int(worst * len(rows))]
        return {
            str(row["pair_id"]): f"influence: score {row['score']:.2e}, among the lowest {worst:.1%}"
            for row in lowest
            if row["score"] < 0
        }
    except OSError:
        raise DataError(f"{file}: not found; run `vlp influence RUN`, or set `validate.influence.worst: 0`") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: damaged ({first_line(error)}); run `vlp influence RUN` again") from None
