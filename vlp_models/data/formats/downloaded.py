"""Pictures that a dataset gives the addresses of, once somebody has downloaded them: where the picture of a row is.

A row goes by its number, from 0. Its picture is looked for as img2dataset names it (`00012/000123456.jpg`: nine
digits, in a folder of their first five) and as plain `123456.jpg`. Addresses die, so a row without a picture is no
fault of the download; whoever reads such a dataset leaves it out, and counts it.
"""

from __future__ import annotations

import os
from pathlib import Path

from vlp_models.data.formats.base import RecordError, Row, Tables, get_sentence, image_row, join_id
from vlp_models.data.formats.files import open_lines, read_json, require_directory
from vlp_models.data.formats.splits import is_held_out
from vlp_models.data.images import FORMATS
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


class Downloaded:
    """The pictures below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = 0
        self._listings: dict[str, dict[str, str]] = {}  # folder -> name without its ending -> name

    def find(self, row: int) -> Path | None:
        nine = f"{row:09d}"
        for folder, name in ((nine[:5], nine), ("", nine), ("", str(row))):
            file = self._listing(folder).get(name)
            if file is not None:
                self._found += 1
                return self._folder / folder / file
        return None

    def need_any(self, where: str) -> None:
        """
        Raises:
            DataError: no row had a picture.
        """
        if not self._found:
            raise DataError(
                f"{where}: no row of it has a picture in {self._folder}; they are looked for as img2dataset names them "
                "(00012/000123456.jpg, by the row's number from 0), or as 123456.jpg"
            )

    def _listing(self, folder: str) -> dict[str, str]:
        if folder not in self._listings:
            path = self._folder / folder
            files = sorted(path.iterdir()) if path.is_dir() else []
            listing = {f.stem: f.name for f in files if f.suffix.lower() in FORMATS}
            # rows come in order: a folder that is left is not asked for again
            self._listings = {name: held for name, held in self._listings.items() if not name} | {folder: listing}
        return self._listings[folder]


FILE = "sbu-captions-all.json"
LISTS = ("image_urls", "captions")


def read_sbu(name: str, params: SourceParams, base: Path) -> Tables:
    """`params.limit` keeps the first pairs with a photo.

    Raises:
        DataError: the folder or the file is missing, its lists are not there or not parallel, or no pair has a photo.
    """
    root = require_directory(base, params.root, f"get {FILE} from SBU's page and set data.{name}.root to its folder")
    path = root / FILE
    document = read_json(path, "SBU's captions")
    for key in LISTS:
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise DataError(f"{path}: no list `{key}`; this should be one object of the lists {', '.join(LISTS)}")
    captions, addresses = document["captions"], document["image_urls"]
    if len(captions) != len(addresses):
        raise DataError(f"{path}: {len(captions):,} captions and {len(addresses):,} image_urls: it is damaged")
    tables, photos = Tables(), Downloaded(root / params.images)
    for place in range(len(captions)):
        if params.limit and len(tables["images"]) >= params.limit:
            break
        provenance, pair_id = f"{FILE}#captions[{place}]", join_id(name, place)
        with tables.record("captions", provenance, pair_id):
            photo = photos.find(place)
            if photo is None:
                tables.skipped["pairs without a photo"] += 1
                continue
            text = get_sentence({"caption": captions[place]}, "caption")
            split = "val" if is_held_out(str(place), params.val_fraction) else "train"
            image: Row = {"image_id": pair_id, "provenance": provenance}
            tables["images"].append(image_row(**image, source=name, split=split, path=os.path.normpath(photo)))
            tables["captions"].append({**image, "caption_id": pair_id, "text": text})
    photos.need_any(f"data.{name}: {path}")
    return tables


FILES = {"train": "Train_GCC-training.tsv", "val": "Validation_GCC-1.1.0-Validation.tsv"}


def read_conceptual_captions(name: str, params: SourceParams, base: Path) -> Tables:
    """`params.limit` keeps the first pairs with a picture of each split; `params.val_fraction` of train becomes val.

    Raises:
        DataError: the folder or a file is missing, two files of one split are named, or no pair has a picture.
    """
    root = require_directory(base, params.root, "get the tsv files from ai.google.com/research/ConceptualCaptions")
    files = params.captions or {split: [file] for split, file in FILES.items() if (root / file).is_file()}
    if not files:
        raise DataError(f"{root}: holds none of {', '.join(FILES.values())}; name yours in data.{name}.captions")
    tables = Tables()
    for split, several in files.items():
        if split not in SPLITS:
            raise DataError(f"params: data.{name}.captions.{split}: expected one of {', '.join(SPLITS)}")
        if len(several) != 1:
            raise DataError(f"params: data.{name}.captions.{split}: one file a split, since rows are its ids")
        _read_tsv(root / several[0], name, params, split, Downloaded(root / params.images / split), tables)
    return tables


def _read_tsv(path: Path, name: str, params: SourceParams, split: str, pictures: Downloaded, tables: Tables) -> None:
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
                tables.skipped[f"pairs of {split} without a picture"] += 1
                continue
            kept += 1
            ours = "val" if split == "train" and is_held_out(local, params.val_fraction) else split
            image: Row = {"image_id": join_id(name, local), "provenance": provenance}
            text = get_sentence({"caption": parts[0]}, "caption")
            tables["images"].append(image_row(**image, source=name, split=ours, path=os.path.normpath(picture)))
            tables["captions"].append({**image, "caption_id": join_id(name, local), "text": text})
    pictures.need_any(f"data.{name}: {path}")
