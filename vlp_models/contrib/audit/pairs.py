"""The pairs that are audited: all valid captions, and those that only the audit has removed.

The audit's own quarantine is left out of account. So its result depends on the data alone, and a second audit after a
removal lists the same pairs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.workspace import Workspace, require_output
from vlp_models.curation.validation.rules import FLAGGED
from vlp_models.data.tables import BATCH_ROWS, LANGUAGES, UNKNOWN, read_batches, read_table
from vlp_models.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Captions [P] and the images [I] that have any.

    owner_P    the image of each caption
    languages  of the captions; `unknown` without a code
    """

    image_ids: list[str]
    paths: list[str]
    splits: list[str]
    caption_ids: list[str]
    texts: list[str]
    languages: list[str]
    owner_P: NDArray[np.int64]


def read_pairs(workspace: Workspace, datasets: Sequence[str]) -> Pairs:
    """Read the pairs of some datasets.

    Raises:
        DataError: they are not prepared or validated, or have no captions.
    """
    validated = require_output(workspace.validated, "validate")
    rows = read_table("images", validated, ["image_id", "path", "split", "source"]).to_pylist()
    images = {row["image_id"]: (row["path"], row["split"]) for row in rows if row["source"] in datasets}
    # captions that other rules refuse
    rows = read_table("quarantine", validated, ["table", "row_id", "rule"]).to_pylist()
    refused = {row["row_id"] for row in rows if row["table"] == "captions" and row["rule"] != FLAGGED.name}
    number: dict[str, int] = {}
    captions: dict[str, tuple[int, str]] = {}
    languages: dict[str, str] = {}
    for dataset in datasets:
        directory = require_output(workspace.interim(dataset), f"prepare@{dataset}")
        for table in read_batches([directory / "captions.parquet"], BATCH_ROWS, ["caption_id", "image_id", "text"]):
            for row in table.to_pylist():
                if row["image_id"] in images and row["caption_id"] not in refused:
                    owner = number.setdefault(row["image_id"], len(number))
                    captions[row["caption_id"]] = (owner, row["text"])
        if (directory / LANGUAGES).exists():
            with (directory / LANGUAGES).open(encoding="utf-8") as lines:
                languages |= {row["caption_id"]: row["language"] for row in map(json.loads, lines)}
    if not captions:
        raise DataError(f"vlp audit: {', '.join(datasets)}: no valid captions")
    return Pairs(
        image_ids=list(number),
        paths=[images[name][0] for name in number],
        splits=[images[name][1] for name in number],
        caption_ids=list(captions),
        texts=[text for _, text in captions.values()],
        languages=[languages.get(name, UNKNOWN) for name in captions],
        owner_P=np.array([owner for owner, _ in captions.values()], np.int64),
    )
