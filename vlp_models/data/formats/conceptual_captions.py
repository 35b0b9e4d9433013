"""Conceptual Captions (Sharma et al. 2018): lines of `caption<tab>address`, without a header and without ids.

`Train_GCC-training.tsv` is train, `Validation_GCC-1.1.0-Validation.tsv` is val; `params.captions` names other files by
split. The id of a pair is its row from 0, `train-17`. You download the pictures: below `<params.images>/<split>/`, by
their rows (formats/downloaded.py). A pair whose picture is not there is left out, and counted.
"""

from __future__ import annotations

import os
from pathlib import Path

from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    get_sentence,
    image_row,
    join_id,
    need_root,
    open_lines,
)
from vlp_models.data.formats.downloaded import Downloaded
from vlp_models.data.formats.photo_lists import is_held_out
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

FILES = {"train": "Train_GCC-training.tsv", "val": "Validation_GCC-1.1.0-Validation.tsv"}


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """`params.limit` keeps the first pairs with a picture of each split; `params.val_fraction` of train becomes val.

    Raises:
        DataError: the folder or a file is missing, two files of one split are named, or no pair has a picture.
    """
    root = need_root(base, params.root, "get the tsv files from ai.google.com/research/ConceptualCaptions")
    files = params.captions or {split: [file] for split, file in FILES.items() if (root / file).is_file()}
    if not files:
        raise DataError(f"{root}: holds none of {', '.join(FILES.values())}; name yours in data.{name}.captions")
    tables = Tables()
    for split, several in files.items():
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.captions.{split}: expected one of {', '.join(SPLITS)}")
        if len(several) != 1:
            raise DataError(f"params: data.{name}.captions.{split}: one file a split, since rows are its ids")
        _read(root / several[0], name, params, split, Downloaded(root / params.images / split), tables)
    return tables


def _read(path: Path, name: str, params: SourceParams, split: str, pictures: Downloaded, tables: Tables) -> None:
    kept = 0
    for row, line in enumerate(open_lines(path, "Conceptual Captions, one caption<tab>address a line")):
        local, provenance = f"{split}-{row}", f"{path.name}:{row + 1}"
        if params.limit and kept >= params.limit:
            break
        if not line.strip():
            continue
        with tables.record("captions", provenance, join_id(name, local)):
            parts = line.rstrip("\r").split("\t")  # no csv: captions hold lone quotes
            if len(parts) != 2:
                raise RecordError(f"{len(parts) - 1} tabs, expected one, between caption and address")
            picture = pictures.find(row)
            if picture is None:
                tables.left_out[f"pairs of {split} without a picture"] += 1
                continue
            kept += 1
            ours = "val" if split == "train" and is_held_out(local, params.val_fraction) else split
            image: Row = {"image_id": join_id(name, local), "provenance": provenance}
            text = get_sentence({"caption": parts[0]}, "caption")
            tables["images"].append(image_row(**image, source=name, split=ours, path=os.path.normpath(picture)))
            tables["captions"].append({**image, "caption_id": join_id(name, local), "text": text})
    pictures.need_any(f"data.{name}: {path}")
