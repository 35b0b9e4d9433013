"""Conceptual Captions and SBU: datasets of image addresses, whose images you download yourself.

The image of a row is found by the row's number, from 0: as img2dataset names it (`00012/000123456.jpg`: nine digits, in
a folder of their first five) or as plain `123456.jpg`. Addresses go stale, so a row without an image is not an error:
it is skipped and counted.

Conceptual Captions (Sharma et al. 2018): lines of `caption<tab>address` without ids. A header, such as the line
`caption<tab>url` of img2dataset's recipe, is skipped: rows count from the line after it.
`Train_GCC-training.tsv` is train, `Validation_GCC-1.1.0-Validation.tsv` is val; `params.captions` names other files by
split. The id of a pair is its row, `train-17`; its image is below `<params.images>/<split>/`.

SBU Captioned Photos (Ordonez et al. 2011): `sbu-captions-all.json`, one object of parallel lists, `{"image_urls":
[...], "user_ids": [...], "captions": [...]}`, a million each. The id of a pair is its index from 0; its photo is below
`params.images`. SBU has no splits: all is train, except for `params.val_fraction` of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from vlp_models.data.formats.base import RecordError, Tables, fills, get_sentence, image_row, join_id
from vlp_models.data.formats.files import open_lines, read_json, require_directory
from vlp_models.data.formats.splits import check_splits, hold_out
from vlp_models.data.images import FORMATS
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


class Downloaded:
    """The images below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._matches = 0
        self._listings: dict[str, dict[str, str]] = {}  # folder -> name without its suffix -> name

    def find(self, row: int) -> Path | None:
        """Return the image file of a row, or None."""
        nine = f"{row:09d}"
        # img2dataset's folder, then both names without one
        for folder, name in ((nine[:5], nine), ("", nine), ("", str(row))):
            file = self._listing(folder).get(name)
            if file is not None:
                self._matches += 1
                return self._folder / folder / file
        return None

    def require_any(self, where: str) -> None:
        """Check that some row had an image.

        Raises:
            DataError: no row had one.
        """
        if not self._matches:
            raise DataError(
                f"{where}: no row has an image in {self._folder}; images are named as by img2dataset "
                "(00012/000123456.jpg, by the row's number from 0), or as 123456.jpg"
            )

    def _listing(self, folder: str) -> dict[str, str]:
        if folder not in self._listings:
            path = self._folder / folder
            files = sorted(path.iterdir()) if path.is_dir() else []
            listing = {f.stem: f.name for f in files if f.suffix.lower() in FORMATS}
            # rows come in order: only the current folder's listing is kept
            # The listing of the root, whose name is empty, is needed for every row and stays.
            self._listings = {name: held for name, held in self._listings.items() if not name} | {folder: listing}
        return self._listings[folder]


FILE = "sbu-captions-all.json"
LISTS = ("image_urls", "captions")


@fills("captions")
def read_sbu(name: str, params: SourceParams, base: Path) -> Tables:
    """Read SBU; `params.limit` keeps the first pairs with a photo.

    Raises:
        DataError: the folder or the file is missing, its lists are missing or not parallel, or no pair has a photo.
    """
    root = require_directory(base, params.root, f"get {FILE} from SBU's page and set data.{name}.root to its folder")
    path = root / FILE
    document = read_json(path, "SBU's captions")
    for key in LISTS:
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise DataError(f"{path}: no list `{key}`; this should be one object of the lists {', '.join(LISTS)}")
    captions, addresses = document["captions"], document["image_urls"]
    if len(captions) != len(addresses):
        raise DataError(f"{path}: {len(captions):,} captions and {len(addresses):,} image_urls; the file is damaged")
    tables, photos = Tables(), Downloaded(root / params.images)
    for row in range(len(captions)):
        # pairs without a photo do not count
        if params.limit and len(tables["images"]) >= params.limit:
            break
        provenance, pair_id = f"{FILE}#captions[{row}]", join_id(name, row)
        with tables.record("captions", provenance, pair_id):
            photo = photos.find(row)
            if photo is None:
                tables.skipped["pairs without a photo"] += 1
                continue
            text = get_sentence({"caption": captions[row]}, "caption")
            split = hold_out(tables, params, pair_id, str(row))
            file = os.path.normpath(photo)
            image = image_row(pair_id, source=name, split=split, path=file, provenance=provenance)
            tables["images"].append(image)
            tables.add_caption(pair_id, pair_id, text, provenance)
    photos.require_any(f"data.{name}: {path}")
    return tables


FILES = {"train": "Train_GCC-training.tsv", "val": "Validation_GCC-1.1.0-Validation.tsv"}


@dataclass(frozen=True, kw_only=True)
class ConceptualCaptionsParams(SourceParams):
    """Keys of the format conceptual_captions."""

    file_keys: ClassVar[tuple[str, ...]] = ("captions",)

    captions: dict[str, list[str]] = field(default_factory=dict)  # tsv files by split, in place of the usual ones


@fills("captions")
def read_conceptual_captions(name: str, params: ConceptualCaptionsParams, base: Path) -> Tables:
    """Read Conceptual Captions.

    `params.limit` keeps the first pairs with an image of each split; `params.val_fraction` of train becomes val.

    Raises:
        DataError: the folder or a file is missing, two files of one split are named, or no pair has an image.
    """
    root = require_directory(base, params.root, "get the tsv files from ai.google.com/research/ConceptualCaptions")
    # files by split: those in params.yaml, or the usual ones that exist
    files = params.captions or {split: [file] for split, file in FILES.items() if (root / file).is_file()}
    if not files:
        raise DataError(f"{root}: contains none of {', '.join(FILES.values())}; name yours in data.{name}.captions")
    check_splits(f"data.{name}.captions", files)
    tables = Tables()
    for split, several in files.items():
        if len(several) != 1:
            raise DataError(
                f"params.yaml: data.{name}.captions.{split}: only one file per split, since ids are row numbers"
            )
        _read_tsv(root / several[0], name, params, split, Downloaded(root / params.images / split), tables)
    return tables


def _read_tsv(path: Path, name: str, params: SourceParams, split: str, pictures: Downloaded, tables: Tables) -> None:
    count = headers = 0
    for number, line in enumerate(open_lines(path, "Conceptual Captions, one caption<tab>address a line"), start=1):
        parts = line.rstrip("\r").split("\t")  # not csv: captions contain unpaired quotes
        # a header names its second column, which is an address in any other line
        if number == 1 and len(parts) == 2 and parts[1].strip() and "://" not in parts[1]:
            headers = 1
            continue
        row = number - 1 - headers  # img2dataset numbers images from the first pair
        local, provenance = f"{split}-{row}", f"{path.name}:{number}"
        if params.limit and count >= params.limit:
            break
        if not line.strip():
            continue
        with tables.record("captions", provenance, join_id(name, local)):
            if len(parts) != 2:
                raise RecordError(f"{len(parts) - 1} tabs, expected one, between caption and address")
            # many addresses are stale
            picture = pictures.find(row)
            if picture is None:
                tables.skipped[f"pairs of {split} without an image"] += 1
                continue
            count += 1
            image_id = join_id(name, local)
            image_split = hold_out(tables, params, image_id, local, split)
            text = get_sentence({"caption": parts[0]}, "caption")
            file = os.path.normpath(picture)
            image = image_row(image_id, source=name, split=image_split, path=file, provenance=provenance)
            tables["images"].append(image)
            tables.add_caption(image_id, image_id, text, provenance)
    pictures.require_any(f"data.{name}: {path}")
