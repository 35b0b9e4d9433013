"""SBU Captioned Photos (Ordonez et al. 2011): `sbu-captions-all.json`, one object of parallel lists.

`{"image_urls": [...], "user_ids": [...], "captions": [...]}`, a million of each. The id of a pair is its place from 0.
You download the photos: below `params.images`, by their places (formats/downloaded.py). A pair whose photo is not
there is left out, and counted. SBU has no splits: all is train, but for `params.val_fraction` of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from vlp_models.data.formats.base import Row, Tables, get_sentence, image_row, join_id, need_root, read_json
from vlp_models.data.formats.downloaded import Downloaded
from vlp_models.data.formats.photo_lists import is_held_out
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

FILE = "sbu-captions-all.json"
LISTS = ("image_urls", "captions")


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """`params.limit` keeps the first pairs with a photo.

    Raises:
        DataError: the folder or the file is missing, its lists are not there or not parallel, or no pair has a photo.
    """
    root = need_root(base, params.root, f"get {FILE} from SBU's page and set data.{name}.root to its folder")
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
                tables.left_out["pairs without a photo"] += 1
                continue
            text = get_sentence({"caption": captions[place]}, "caption")
            split = "val" if is_held_out(str(place), params.val_fraction) else "train"
            image: Row = {"image_id": pair_id, "provenance": provenance}
            tables["images"].append(image_row(**image, source=name, split=split, path=os.path.normpath(photo)))
            tables["captions"].append({**image, "caption_id": pair_id, "text": text})
    photos.need_any(f"data.{name}: {path}")
    return tables
