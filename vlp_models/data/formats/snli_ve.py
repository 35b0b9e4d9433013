"""SNLI-VE (Xie et al. 2019): `<root>/snli_ve_<split>.jsonl`, one hypothesis a line, and Flickr30k's images.

A line is one of SNLI 1.0 with its image's id: `{"Flikr30kID": "111222.jpg", "pairID": "111222.jpg#2r1e", "gold_label":
"entailment", "annotator_labels": ["entailment"], "sentence2": "Children are eating.", ...}`. The published files spell
the id's key without its c; files made anew by the authors' script have `Flickr30K_ID`, and the value may lack ".jpg".
`sentence1` is the caption that SNLI's annotators saw in place of the image; it is no caption here. Annotators' labels
that are none of the three are dropped. What splits may be besides the files' own: formats/hypotheses.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlp_models.data.formats.base import RecordError, Row, Tables, get_sentence, get_text, need_root, read_lines
from vlp_models.data.formats.hypotheses import Hypothesis, fill, known_label, photo_file
from vlp_models.data.tables import SPLITS
from vlp_models.data.views import ENTAILMENT
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

FILES = {"train": "snli_ve_train.jsonl", "val": "snli_ve_dev.jsonl", "test": "snli_ve_test.jsonl"}
IMAGE_KEYS = ("Flikr30kID", "Flickr30K_ID")


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads the files of `params.splits`, or all that are there; `params.limit` keeps the first lines of each split.

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

    def records() -> Iterator[tuple[str, Row, str]]:
        for split in splits:
            lines = read_lines(root / FILES[split], tables, "hypotheses", f"SNLI-VE's {split} split, JSON lines")
            for provenance, record in lines:
                yield provenance, record, split

    fill(tables, name, params, root, records(), _hypothesis)
    return tables


def _hypothesis(local: str, record: Row) -> Hypothesis:
    given: Any = record.get("annotator_labels", [])
    if not isinstance(given, list):
        raise RecordError("`annotator_labels` is no list")
    return Hypothesis(
        local=local,
        file=photo_file(record, IMAGE_KEYS),
        text=get_sentence(record, "sentence2"),
        label=known_label(get_text(record, "gold_label")) if "gold_label" in record else None,
        annotators=[said for said in given if said in ENTAILMENT],
    )
