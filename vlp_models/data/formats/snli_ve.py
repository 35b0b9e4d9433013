"""SNLI-VE (Xie et al. 2019): `<root>/snli_ve_<split>.jsonl`, one hypothesis a line, and Flickr30k's images.

A line is one of SNLI 1.0 with its image's id: `{"Flikr30kID": "111222.jpg", "pairID": "111222.jpg#2r1e", "gold_label":
"entailment", "annotator_labels": ["entailment"], "sentence2": "Children are eating.", ...}`. The published files spell
the id's key without its c; files made anew by the authors' script have `Flickr30K_ID`, and the value may lack ".jpg".
`sentence1` is the caption that SNLI's annotators saw in place of the image; it is no caption here.

A `gold_label` of "-" means that the annotators did not agree: such a line is left out, and counted, as the published
files leave it out. Annotators' labels that are none of the three are dropped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    get_id,
    get_sentence,
    get_text,
    image_row,
    join_id,
    need_root,
    read_lines,
)
from vlp_models.data.formats.karpathy import safe_name
from vlp_models.data.tables import SPLITS
from vlp_models.data.views import ENTAILMENT
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

FILES = {"train": "snli_ve_train.jsonl", "val": "snli_ve_dev.jsonl", "test": "snli_ve_test.jsonl"}
IMAGE_KEYS = ("Flikr30kID", "Flickr30K_ID")
UNDECIDED = "-"


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads `params.splits`, or all whose file is there; `params.limit` keeps the first lines of each.

    Raises:
        DataError: the directory or a split asked for is missing, or a file is no JSON lines.
    """
    root = need_root(
        base,
        params.root,
        "get it from github.com/necla-ml/SNLI-VE and set data.<name>.root to the folder of its files",
    )
    for split in params.splits:
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.splits: SNLI-VE has no split {split!r}; known: {', '.join(SPLITS)}")
    splits = params.splits or [split for split in SPLITS if (root / FILES[split]).is_file()]
    if not splits:
        raise DataError(f"{root}: holds none of {', '.join(FILES.values())}; is it SNLI-VE's folder?")
    tables = Tables()
    seen: dict[str, str] = {}
    images: dict[str, str] = {}  # id -> split
    for split in splits:
        lines = read_lines(root / FILES[split], tables, "hypotheses", f"SNLI-VE's {split} split, JSON lines")
        for number, (provenance, record) in enumerate(lines):
            if params.limit and number >= params.limit:
                break
            with tables.record("hypotheses", provenance):
                local = get_id(record, "pairID")
                with tables.record("hypotheses", provenance, join_id(name, local)):
                    if local in seen:
                        raise RecordError(f"pairID {local} stood already in {seen[local]}", rule="id_unique")
                    seen[local] = provenance
                    row = _row(name, local, record, provenance)
                    if row is None:
                        tables.left_out["hypotheses that annotators did not agree on"] += 1
                        continue
                    file_name = _file_name(record)
                    row["image_id"] = join_id(name, Path(file_name).stem)
                    tables["hypotheses"].append(row)
                    if row["image_id"] not in images:
                        images[row["image_id"]] = split
                        path = os.path.normpath(root / params.images / file_name)
                        tables["images"].append(
                            image_row(row["image_id"], source=name, split=split, path=path, provenance=provenance)
                        )
    return tables


def _row(name: str, local: str, record: Row, provenance: str) -> Row | None:
    """Without its image; None where the annotators did not agree."""
    label: str | None = None
    if "gold_label" in record:
        label = get_text(record, "gold_label")
        if label == UNDECIDED:
            return None
        if label not in ENTAILMENT:
            raise RecordError(f"`gold_label` is {label!r}, expected {', '.join(ENTAILMENT)}", rule="gold_label_known")
    given: Any = record.get("annotator_labels", [])
    if not isinstance(given, list):
        raise RecordError("`annotator_labels` is no list")
    return {
        "hypothesis_id": join_id(name, local),
        "text": get_sentence(record, "sentence2"),
        "gold_label": label,
        "annotator_labels": [said for said in given if said in ENTAILMENT],
        "provenance": provenance,
    }


def _file_name(record: Row) -> str:
    key = next((key for key in IMAGE_KEYS if key in record), IMAGE_KEYS[0])
    name = safe_name(get_id(record, key))
    return name if Path(name).suffix.lower() in (".jpg", ".jpeg", ".png") else f"{name}.jpg"
