"""SNLI-VE (Xie et al. 2019): `<root>/snli_ve_<split>.jsonl`, one hypothesis a line, and Flickr30k's images.

A line is one of SNLI 1.0 with its image's id: `{"Flikr30kID": "111222.jpg", "pairID": "111222.jpg#2r1e", "gold_label":
"entailment", "annotator_labels": ["entailment"], "sentence2": "Children are eating.", ...}`. The published files spell
the id's key without its c; files made anew by the authors' script have `Flickr30K_ID`, and the value may lack ".jpg".
`sentence1` is the caption that SNLI's annotators saw in place of the image; it is no caption here. Annotators' labels
that are none of the three are dropped. What splits may be besides the files' own: formats/hypotheses.py.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.data.formats.base import RecordError, Row, Tables, get_id, get_sentence, get_text, image_row, join_id
from vlp_models.data.formats.files import read_csv, read_lines, require_directory
from vlp_models.data.formats.splits import is_held_out, photo_folder, photo_id, read_lists, safe_name, stem
from vlp_models.data.images import FORMATS
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
    root = require_directory(
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


UNDECIDED = "-"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One record. file: of its photo, as `safe_name` gives it. label: None where it is hidden."""

    local: str
    file: str
    text: str
    label: str | None
    annotators: list[str] = field(default_factory=list)


def fill(
    tables: Tables,
    name: str,
    params: SourceParams,
    root: Path,
    records: Iterator[tuple[str, Row, str]],
    parse: Callable[[str, Row], Hypothesis],
) -> None:
    """Adds photos and hypotheses; `params.limit` keeps the first hypotheses of each split.

    Args:
        records: (provenance, record, the split its file says).
        parse: (its id, a record) -> what it says; raises `RecordError`.
    """
    listed = read_lists(name, params, root, {}, tables) if params.split_files or params.karpathy else None
    folder = photo_folder(root, params.images)
    seen: dict[str, str] = {}
    files: dict[str, str] = {}  # of the photos met: as the record names it -> where it is
    splits: dict[str, str] = {}  # of the images met
    kept: Counter[str] = Counter()
    for provenance, record, own in records:
        with tables.record("hypotheses", provenance):
            local = get_id(record, "pairID")
            with tables.record("hypotheses", provenance, join_id(name, local)):
                if local in seen:
                    raise RecordError(f"pairID {local} stood already in {seen[local]}", rule="id_unique")
                seen[local] = provenance
                if record.get("gold_label") == UNDECIDED:
                    tables.skipped["hypotheses that annotators did not agree on"] += 1
                    continue
                hypothesis = parse(local, record)
                photo = photo_id(hypothesis.file)
                if listed is not None and photo not in listed.splits:
                    tables.skipped["hypotheses about photos that no list has"] += 1
                    continue
                held = listed is None and own == "train" and is_held_out(photo, params.val_fraction)
                split = listed.splits[photo] if listed else "val" if held else own
                file = hypothesis.file
                if listed is not None:
                    if file not in files:
                        there = (folder / file).is_file()
                        files[file] = file if there else safe_name(listed.files.get(photo, file))
                    file = files[file]
                image_id = join_id(name, stem(file))
                if splits.get(image_id, split) != split:
                    raise RecordError(
                        f"its photo is {split} here, and {splits[image_id]} before", rule="split_disjoint"
                    )
                if params.limit and kept[split] >= params.limit:
                    continue
                kept[split] += 1
                if image_id not in splits:
                    splits[image_id] = split
                    path = os.path.normpath(folder / file)
                    row = image_row(image_id, source=name, split=split, path=path, provenance=provenance)
                    tables["images"].append(row)
                tables["hypotheses"].append(
                    {
                        "hypothesis_id": join_id(name, local),
                        "image_id": image_id,
                        "text": hypothesis.text,
                        "gold_label": hypothesis.label,
                        "annotator_labels": hypothesis.annotators,
                        "provenance": provenance,
                    }
                )


def known_label(label: str) -> str:
    if label not in ENTAILMENT:
        raise RecordError(f"`gold_label` is {label!r}, expected {', '.join(ENTAILMENT)}", rule="gold_label_known")
    return label


def photo_file(record: Row, keys: tuple[str, ...]) -> str:
    """The file that the first of `keys` names which is there; some files lack the ending."""
    key = next((key for key in keys if key in record), keys[0])
    name = safe_name(get_id(record, key))
    return name if Path(name).suffix.lower() in FORMATS else f"{name}.jpg"


WHOLE = "esnlive.csv"
ESNLI_FILES = {"train": "esnlive_train.csv", "val": "esnlive_dev.csv", "test": "esnlive_test.csv"}
OURS = {"train": "train", "dev": "val", "val": "val", "test": "test"}
COLUMNS = ("pairID", "Flickr30kID", "hypothesis", "gold_label")


def read_esnli_ve(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads `esnlive.csv` where it is there, else the files of `params.splits` or all; `params.limit` keeps the first
    hypotheses of each split.

    Raises:
        DataError: the folder or a split asked for is missing, or a file lacks one of the columns.
    """
    root = require_directory(
        base, params.root, "its files are in github.com/maximek3/e-ViL; the photos are Flickr30k's"
    )
    for split in params.splits:
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.splits: e-SNLI-VE has no split {split!r}; known: {', '.join(SPLITS)}")
    splits = params.splits or [split for split in SPLITS if (root / ESNLI_FILES[split]).is_file()]
    whole = root / WHOLE
    if not splits and not whole.is_file():
        raise DataError(f"{root}: holds neither {WHOLE} nor one of {', '.join(ESNLI_FILES.values())}")
    tables = Tables()

    def records() -> Iterator[tuple[str, Row, str]]:
        if whole.is_file():
            for provenance, row in read_csv(whole, tables, "hypotheses", (*COLUMNS, "split")):
                own = OURS.get(row["split"].strip(), "")
                if not own:
                    tables.quarantine(
                        "hypotheses",
                        "",
                        "split_known",
                        f"split {row['split']!r} is none of {', '.join(OURS)}",
                        provenance,
                    )
                elif not params.splits or own in params.splits:
                    yield provenance, row, own
            return
        for split in splits:
            for provenance, row in read_csv(root / ESNLI_FILES[split], tables, "hypotheses", COLUMNS):
                yield provenance, row, split

    fill(tables, name, params, root, records(), _esnli_hypothesis)
    return tables


def _esnli_hypothesis(local: str, record: Row) -> Hypothesis:
    text = get_sentence(record, "hypothesis")
    if not text:
        raise RecordError("no hypothesis")
    return Hypothesis(
        local=local,
        file=photo_file(record, ("image",) if record.get("image") else ("Flickr30kID",)),
        text=text,
        label=known_label(get_text(record, "gold_label").strip()),
    )
