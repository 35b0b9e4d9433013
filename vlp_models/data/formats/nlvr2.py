"""NLVR2 (Suhr et al. 2019): `<root>/data/<split>.json`, JSON lines: a sentence about two photographs, and its label.

A line is `{"sentence": ..., "left_url": ..., "right_url": ..., "label": "True", "identifier": "dev-850-0-0", ...}`, and
has `directory` in train. The label is a text, "True" or "False"; without one it is hidden. The identifier is
`split-set-pair-sentence`: the pair's images are `split-set-pair-img0.png` (left) and `-img1.png` (right), shared by all
sentences about the pair, and a sentence is about several pairs of its set, which make its group.

The photographs are handed out on request. They lie below `params.images`, in `train/<directory>/`, `dev/`, `test1/` and
`test2/`, or, as they come, the last three beside that folder. A file that is missing is found out by `prepare`; the
statements about it then go to quarantine with it.

Official train is train here, less the directories in `validation_directories`, which are val; dev, test1 and test2 are
all test, and ids keep the official name: `nlvr2/dev-850-0-0`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

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
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

SPLITS = {"train": "train", "dev": "test", "test1": "test", "test2": "test"}
FOLDERS = ("data", "nlvr2/data")  # of the annotations: root is the repository's folder nlvr2/, or what holds that
IDENTIFIER = re.compile(r"(train|dev|test1|test2)-([0-9]+)-([0-9]+)-([0-9]+)")
LABELS = {"true": True, "false": False}


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads NLVR2's splits: `params.splits`, or all whose file is there; `params.limit` keeps the first lines of each.

    Raises:
        DataError: the directory or a split asked for is missing, or a file is no JSON lines.
    """
    root = need_root(base, params.root, "clone github.com/lil-lab/nlvr and set data.<name>.root to its folder nlvr2/")
    for split in params.splits:
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.splits: NLVR2 has no split {split!r}; known: {', '.join(SPLITS)}")
    folder = next((root / folder for folder in FOLDERS if (root / folder).is_dir()), root / FOLDERS[0])
    splits = params.splits or [split for split in SPLITS if (folder / f"{split}.json").is_file()]
    if not splits:
        raise DataError(f"{folder}: holds none of {', '.join(f'{s}.json' for s in SPLITS)}; is it NLVR2's folder?")
    tables = Tables()
    for split in splits:
        _read_split(tables, name, split, folder / f"{split}.json", root, params)
    return tables


def _read_split(tables: Tables, name: str, split: str, file: Path, root: Path, params: SourceParams) -> None:
    held_out = {str(directory) for directory in params.validation_directories}
    seen: dict[str, str] = {}
    images: set[str] = set()
    lines = read_lines(file, tables, "image_pairs", f"NLVR2's {split} split, JSON lines")
    for number, (provenance, record) in enumerate(lines):
        if params.limit and number >= params.limit:
            break
        with tables.record("image_pairs", provenance):
            identifier = get_id(record, "identifier")
            with tables.record("image_pairs", provenance, join_id(name, identifier)):
                if identifier in seen:
                    raise RecordError(f"identifier {identifier} stood already in {seen[identifier]}", rule="id_unique")
                seen[identifier] = provenance
                of_set, pair, sentence = _parts(identifier, split)
                directory = safe_name(get_id(record, "directory")) if split == "train" else ""
                stem = f"{split}-{of_set}-{pair}"
                left, right = (join_id(name, f"{stem}-img{side}") for side in (0, 1))
                row = {
                    "pair_id": join_id(name, identifier),
                    "image_id": left,
                    "other_image_ids": [right],
                    "text": get_sentence(record, "sentence"),
                    "label": _label(record),
                    "group": join_id(name, f"{split}-{of_set}-{sentence}"),
                    "provenance": provenance,
                }
                ours = "val" if split == "train" and directory in held_out else SPLITS[split]
                tables["image_pairs"].append(row)
                for image_id in (left, right):
                    if image_id not in images:
                        images.add(image_id)
                        path = _path(root, params.images, split, directory, f"{image_id.partition('/')[2]}.png")
                        tables["images"].append(
                            image_row(image_id, source=name, split=ours, path=path, provenance=provenance)
                        )


def _parts(identifier: str, split: str) -> tuple[str, str, str]:
    """The numbers of the set, of the pair in it, and of the sentence."""
    found = IDENTIFIER.fullmatch(identifier)
    if found is None or found[1] != split:
        raise RecordError(f"identifier {identifier!r} is not {split}-SET-PAIR-SENTENCE", rule="identifier_form")
    return found[2], found[3], found[4]


def _label(record: Row) -> bool | None:
    if "label" not in record:
        return None
    said = get_text(record, "label")
    if said.lower() not in LABELS:
        raise RecordError(f'`label` is {said!r}, expected "True" or "False"', rule="label_known")
    return LABELS[said.lower()]


def _path(root: Path, images: str, split: str, directory: str, file: str) -> str:
    """The first place where the file is; where it is at none, the first one that it could be at."""

    def places() -> Iterator[Path]:
        yield root / images / split / directory / file
        if split != "train":
            yield root / split / file

    found = next((path for path in places() if path.is_file()), next(places()))
    return os.path.normpath(found)
