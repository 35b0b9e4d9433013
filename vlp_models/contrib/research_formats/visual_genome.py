"""Visual Genome (Krishna et al. 2017): region descriptions as captions of their images, and objects with attributes.

`image_data.json` lists the images of `VG_100K/` and `VG_100K_2/`: the folder is the second to last part of their
address. `region_descriptions.json` has their phrases; older releases call a region's id `id`. `attributes.json` or
`objects.json` becomes objects if `params.instances` names it under `all`. Boxes are x, y, w, h; those of regions are
not used.

51,208 of the images are COCO's. If you evaluate on COCO, do not train on those of its val and test: `exclude` names
Karpathy's `dataset_coco.json` (its val and test are skipped and counted) or files of COCO ids, one per line, relative
to `root`. All other images are train, except for `params.val_fraction` of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    fills,
    get,
    get_id,
    get_sentence,
    get_size,
    get_text,
    image_row,
    is_number,
    join_id,
)
from vlp_models.data.formats.files import read_json, read_text, require_directory
from vlp_models.data.formats.splits import hold_out, read_karpathy, safe_name
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

IMAGES, REGIONS = "image_data.json", "region_descriptions.json"


@dataclass(frozen=True, kw_only=True)
class VisualGenomeParams(SourceParams):
    """Keys of the format visual_genome."""

    file_keys: ClassVar[tuple[str, ...]] = ("instances", "exclude")

    instances: dict[str, list[str]] = field(default_factory=dict)  # `all`: files with objects
    exclude: list[str] = field(default_factory=list)  # Karpathy files, or lists of COCO ids


@fills("captions")
def read(name: str, params: VisualGenomeParams, base: Path) -> Tables:
    """Read Visual Genome; `params.limit` keeps the first images.

    Raises:
        DataError: the folder or a file is missing, or a file is not in the format.
    """
    root = require_directory(base, params.root, f"get it from visualgenome.org and set data.{name}.root to its folder")
    for key in params.instances:
        if key != "all":
            raise DataError(f"params.yaml: data.{name}.instances.{key}: Visual Genome has no splits; use the key `all`")
    tables = Tables()
    cut = _read_images(name, params, root, tables)
    _read_regions(root / REGIONS, name, cut, tables)
    for file in params.instances.get("all", []):
        _read_objects(root / file, name, cut, tables)
    return tables


def _read_images(name: str, params: VisualGenomeParams, root: Path, tables: Tables) -> set[str]:
    """Add the images; return the ids of those that are listed but skipped."""
    excluded = _excluded(root, params, tables)
    folder = root / params.images if (root / params.images).is_dir() else root
    image_ids: set[str] = set()
    # regions and objects of these images are skipped
    cut: set[str] = set()
    for provenance, record in _list(root / IMAGES, "Visual Genome's images"):
        with tables.record("images", provenance):
            # older releases have `id`
            local = get_id(record, "image_id" if "image_id" in record else "id")
            with tables.record("images", provenance, join_id(name, local)):
                if local in image_ids:
                    raise RecordError(f"image {local} is listed again", rule="id_unique")
                # about half of the images are COCO's: its val and test must not be trained on
                if record.get("coco_id") is not None and get_id(record, "coco_id") in excluded:
                    cut.add(local)
                    tables.skipped["excluded COCO images"] += 1
                    continue
                if params.limit and len(image_ids) >= params.limit:
                    cut.add(local)
                    continue
                # .../VG_100K_2/1.jpg: folder and file name
                file = safe_name("/".join(_address(record).parts[-2:]))
                width, height = get_size(record)
                image_id = join_id(name, local)
                split, path = hold_out(tables, params, image_id, local), os.path.normpath(folder / file)
                about = {"source": name, "split": split, "path": path, "provenance": provenance}
                tables["images"].append(image_row(image_id, **about, width=width, height=height))
                image_ids.add(local)
    return cut


def _address(record: Any) -> PurePosixPath:
    """Return the path in an image's address."""
    url = get_text(record, "url")
    try:
        return PurePosixPath(urlsplit(url).path)
    except ValueError as error:
        raise RecordError(f"`url` is not an address: {url!r:.60} ({error})") from None


def _excluded(root: Path, params: VisualGenomeParams, tables: Tables) -> set[str]:
    """Return the COCO ids of excluded images."""
    coco_ids: set[str] = set()
    for file in params.exclude:
        if file.endswith(".json"):
            entries = read_karpathy(root / file, tables, sentences=False)
            coco_ids |= {local for local, entry in entries.items() if entry.split in ("val", "test")}
            continue
        for number, line in enumerate(read_text(root / file, "COCO's ids, one a line").split("\n"), start=1):
            local = line.strip()
            if local and not (local.isascii() and local.isdigit() and len(local) < 20):
                raise DataError(f"{root / file}:{number}: {local[:40]!r} is not a COCO id, which are numbers")
            # Ids in lists may have leading zeros, as in COCO's file names.
            coco_ids |= {str(int(local))} if local else set()
    return coco_ids


def _read_regions(path: Path, name: str, cut: set[str], tables: Tables) -> None:
    for provenance, record in _list(path, "Visual Genome's regions"):
        with tables.record("captions", provenance):
            owner = get_id(record, "id" if "id" in record else "image_id")
            if owner in cut:
                continue
            # of this image
            phrases: set[str] = set()
            for number, region in enumerate(get(record, "regions", list)):
                where = f"{provenance}.regions[{number}]"
                with tables.record("captions", where):
                    local = get_id(region, "region_id" if "region_id" in region else "id")
                    with tables.record("captions", where, join_id(name, local)):
                        text = get_sentence(region, "phrase")
                        # annotators of different regions wrote the same words
                        if text.casefold() in phrases:
                            tables.skipped["repeated phrases of an image"] += 1
                            continue
                        phrases.add(text.casefold())
                        tables.add_caption(join_id(name, local), join_id(name, owner), text, where)


def _read_objects(path: Path, name: str, cut: set[str], tables: Tables) -> None:
    for provenance, record in _list(path, "Visual Genome's objects"):
        with tables.record("objects", provenance):
            owner = get_id(record, "image_id" if "image_id" in record else "id")
            if owner in cut:
                continue
            listed = get(record, "attributes" if "attributes" in record else "objects", list)
            for number, item in enumerate(listed):
                where = f"{provenance}.objects[{number}]"
                with tables.record("objects", where):
                    local = get_id(item, "object_id")
                    with tables.record("objects", where, join_id(name, local)):
                        tables["objects"].append(_object(name, local, owner, item) | {"provenance": where})


def _object(name: str, local: str, owner: str, item: Any) -> Row:
    names = [word for word in get(item, "names", list) if isinstance(word, str) and word.strip()]
    if not names:
        raise RecordError("object without a name")
    # x, y, width, height -> corners
    box = [get(item, key, (int, float)) for key in ("x", "y", "w", "h")]
    if not all(map(is_number, box)):
        raise RecordError(f"invalid box {str(box)[:60]}")
    x, y, w, h = map(float, box)
    words = item.get("attributes")
    # null if unknown, not an empty list
    listed = isinstance(words, list) and all(isinstance(word, str) for word in words)
    attributes = {get_text({"attributes": word}, "attributes").strip().lower() for word in words} if listed else set()
    return {
        "object_id": join_id(name, local),
        "image_id": join_id(name, owner),
        "category": get_sentence({"names": names[0]}, "names").lower(),
        "x1": x,
        "y1": y,
        "x2": x + w,
        "y2": y + h,
        "attributes": sorted(attributes - {""}) if listed and words else None,
    }


def _list(path: Path, purpose: str) -> Iterator[tuple[str, Any]]:
    document = read_json(path, purpose)
    if not isinstance(document, list):
        raise DataError(f"{path}: not {purpose}: expected a list, found {type(document).__name__}")
    for index, record in enumerate(document):
        yield f"{path.name}[{index}]", record
