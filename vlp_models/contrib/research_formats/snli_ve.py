"""SNLI-VE (Xie et al. 2019) and e-SNLI-VE (Kayser et al. 2021): hypotheses about Flickr30k's photos.

SNLI-VE has `<root>/snli_ve_<split>.jsonl`, one hypothesis per line: a record of SNLI 1.0 with its image's id:
`{"Flikr30kID": "111222.jpg", "pairID": "111222.jpg#2r1e", "gold_label": "entailment", "annotator_labels":
["entailment"], "sentence2": "Children are eating.", ...}`. The published files spell the id's key without its c; files
made by the authors' script have `Flickr30K_ID`, and the value may lack ".jpg". `sentence1` is the caption that SNLI's
annotators read in place of the image; it is not used as a caption. Annotators' labels that are none of the three are
dropped.

e-SNLI-VE has the same hypotheses as csv, some of them corrected: `esnlive_{train,dev,test}.csv`, or one `esnlive.csv`
with a column `split`, with the columns `pairID, Flickr30kID, hypothesis, gold_label` and `explanation`; the last one is
not read. A photo is `<Flickr30kID>` below `params.images`, unless a column `image` names its file: Flickr8k calls
`2181846120.jpg` `2181846120_3744ca3942.jpg`.

Splits: with `params.split_files` (lists of photos) or a Karpathy file, a hypothesis is in its photo's split. SNLI-VE
divides Flickr's photos differently from Flickr8k, and this keeps one's test photos out of the other's training data.
Hypotheses about unlisted photos are then skipped and counted. A photo is the file that its record names; if there is no
such file, the one in its list: Flickr8k's files have longer names. `params.val_fraction` holds out a share of train's
photos, with all their hypotheses, as val.

A `gold_label` of "-" means that the annotators did not agree: such a line is skipped and counted, as in the published
evaluation.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.contrib.research_formats.lists import (
    ListedParams,
    check_unused,
    photo_folder,
    read_lists,
    select_splits,
)
from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    fills,
    get_id,
    get_sentence,
    get_text,
    image_row,
    join_id,
)
from vlp_models.data.formats.files import read_csv, read_lines, require_directory
from vlp_models.data.formats.splits import SplitsParams, hold_out, photo_id, safe_name, stem
from vlp_models.data.images import FORMATS
from vlp_models.data.names import Names
from vlp_models.data.tables import SPLITS, standard_split
from vlp_models.data.views.hypotheses import ENTAILMENT

FILES = {"train": "snli_ve_train.jsonl", "val": "snli_ve_dev.jsonl", "test": "snli_ve_test.jsonl"}
IMAGE_KEYS = ("Flikr30kID", "Flickr30K_ID")


@dataclass(frozen=True, kw_only=True)
class SNLIVEParams(ListedParams, SplitsParams):
    """Keys of the formats snli_ve and esnli_ve."""


@fills("hypotheses")
def read(name: str, params: SNLIVEParams, base: Path) -> Tables:
    """Read the files of `params.splits`, or all that exist; `params.limit` keeps the first lines of each split.

    Raises:
        DataError: the directory or a requested split is missing, or a file is not JSON lines.
    """
    root = require_directory(
        base,
        params.root,
        "get it from github.com/necla-ml/SNLI-VE and set data.<name>.root to the folder of its files",
    )
    splits = select_splits(name, "SNLI-VE", params, SPLITS, {split: root / file for split, file in FILES.items()})
    tables = Tables()

    def records() -> Iterator[tuple[str, Row, str]]:
        for split in splits:
            lines = read_lines(root / FILES[split], tables, "hypotheses", f"SNLI-VE's {split} split, JSON lines")
            for provenance, record in lines:
                yield provenance, record, split

    fill(tables, name, params, root, records(), _hypothesis)
    return tables


def _hypothesis(local: str, record: Row) -> Hypothesis:
    file = photo_file(record, IMAGE_KEYS)
    text = get_sentence(record, "sentence2")
    label = check_label(get_text(record, "gold_label")) if record.get("gold_label") is not None else None
    labels: Any = record.get("annotator_labels")
    # Some labels are empty or none of the three.
    annotators = [label for label in labels if label in ENTAILMENT] if isinstance(labels, list) else []
    return Hypothesis(local=local, file=file, text=text, label=label, annotators=annotators)


UNDECIDED = "-"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One record. file: of its photo, as `safe_name` returns it. label: None if it is hidden."""

    local: str
    file: str
    text: str
    label: str | None
    annotators: list[str] = field(default_factory=list)


def fill(
    tables: Tables,
    name: str,
    params: SNLIVEParams,
    root: Path,
    records: Iterator[tuple[str, Row, str]],
    parse: Callable[[str, Row], Hypothesis],
) -> None:
    """Add photos and hypotheses; `params.limit` keeps the first hypotheses of each split.

    Args:
        records: (provenance, record, split of its file).
        parse: (id, record) -> hypothesis; raises `RecordError`.
    """
    # photos with their splits, which then replace the files'
    listed = read_lists(name, params, root, {}, tables) if params.split_files or params.karpathy else None
    names = Names(listed.splits if listed else ())
    folder = photo_folder(root, params.images)
    files: dict[str, str] = {}  # file name in the record -> existing file name

    def locate(file: str, file_split: str) -> tuple[str, str, str] | None:
        """Return the id, the existing file and the split of a record's photo; None if it is in no list."""
        photo = photo_id(file)
        if listed is None:
            return photo, file, file_split
        # Lists may differ from the records in letter case and Unicode form.
        photo = names.match(photo) or photo
        # SNLI-VE's photos are Flickr30k's; a list may be of Flickr8k's
        if photo not in listed.splits:
            return None
        if file not in files:
            exists = (folder / file).is_file()
            files[file] = file if exists else safe_name(listed.files.get(photo, file))
        return photo, files[file], listed.splits[photo]

    used_in: dict[str, str] = {}
    images: dict[str, tuple[str, str]] = {}  # image -> its path and split
    counts: Counter[str] = Counter()
    for provenance, record, file_split in records:
        with tables.record("hypotheses", provenance):
            local = get_id(record, "pairID")
            # From here on errors have the hypothesis's id.
            with tables.record("hypotheses", provenance, join_id(name, local)):
                check_unused("pairID", local, used_in)
                if record.get("gold_label") == UNDECIDED:
                    used_in[local] = provenance
                    tables.skipped["hypotheses without a majority label"] += 1
                    continue
                hypothesis = parse(local, record)
                used_in[local] = provenance  # only now: of a repeated id the first readable record is kept
                located = locate(hypothesis.file, file_split)
                if located is None:
                    tables.skipped["hypotheses about unlisted photos"] += 1
                    continue
                photo, file, split = located
                image_id = join_id(name, stem(file))
                split = hold_out(tables, params, image_id, photo, split)
                # one id is one file in one split, whatever the order of the records
                path = os.path.normpath(folder / file)
                first_path, first_split = images.get(image_id, (path, split))
                if path != first_path:
                    first_file = os.path.relpath(first_path, folder)
                    raise RecordError(f"image {image_id} was {first_file} before and is {file} here", rule="id_unique")
                if split != first_split:
                    raise RecordError(f"its photo is {split} here and {first_split} before", rule="split_disjoint")
                if params.limit and counts[split] >= params.limit:
                    continue
                counts[split] += 1
                # a photo is added with its first hypothesis
                if image_id not in images:
                    images[image_id] = path, split
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


def check_label(label: str) -> str:
    """Return the label unchanged.

    Raises:
        RecordError: it is none of the three.
    """
    if label not in ENTAILMENT:
        raise RecordError(f"`gold_label` is {label!r}, expected {', '.join(ENTAILMENT)}", rule="gold_label_known")
    return label


def photo_file(record: Row, keys: tuple[str, ...]) -> str:
    """Return the file name in the first of `keys` that the record has; some names lack the suffix."""
    key = next((key for key in keys if key in record), keys[0])
    name = safe_name(get_id(record, key))
    return name if Path(name).suffix.lower() in FORMATS else f"{name}.jpg"


WHOLE = "esnlive.csv"
ESNLI_FILES = {"train": "esnlive_train.csv", "val": "esnlive_dev.csv", "test": "esnlive_test.csv"}
COLUMNS = ("pairID", "Flickr30kID", "hypothesis", "gold_label")


@fills("hypotheses")
def read_esnli_ve(name: str, params: SNLIVEParams, base: Path) -> Tables:
    """Read `esnlive.csv` if it exists, else the files of `params.splits` or all.

    `params.limit` keeps the first hypotheses of each split.

    Raises:
        DataError: the folder or a requested split is missing, or a file lacks one of the columns.
    """
    root = require_directory(
        base, params.root, "its files are in github.com/maximek3/e-ViL; the photos are Flickr30k's"
    )
    # one file with a column `split`, or a file per split
    # The single file wins over files per split.
    all_splits = root / WHOLE
    files = {split: all_splits if all_splits.is_file() else root / file for split, file in ESNLI_FILES.items()}
    splits = select_splits(name, "e-SNLI-VE", params, SPLITS, files, also=WHOLE)
    tables = Tables()

    def records() -> Iterator[tuple[str, Row, str]]:
        if all_splits.is_file():
            for provenance, row in read_csv(all_splits, tables, "hypotheses", (*COLUMNS, "split")):
                row_split = standard_split(row["split"])
                # a row of another split is bad; one of a split that is not requested is skipped
                if row_split not in SPLITS:
                    tables.quarantine(
                        "hypotheses",
                        "",
                        "split_known",
                        f"split {row['split']!r} is not one of {', '.join(SPLITS)}",
                        provenance,
                    )
                elif row_split in splits:
                    yield provenance, row, row_split
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
        label=check_label(get_text(record, "gold_label").strip()),
    )
