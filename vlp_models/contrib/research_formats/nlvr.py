"""NLVR v1 (Suhr et al. 2017) and NLVR2 (Suhr et al. 2019): statements about images, true or false.

NLVR: `<root>/<split>/<split>.json`, JSON lines, and `<split>/images/<directory>/*.png`. A line has one sentence, one
label and three boxes of items; it has six images `<split>-n-m-k.png`, one for each order k of the boxes. Each image
becomes a row and a statement of its own: the official accuracy counts all six. Sentences that are true of a training
image become its captions, the pairs for pretraining. Official train is train here, except for the directories in
`validation_directories`, which are val (no sentence spans two directories); dev, test and hidden are all test, and ids
keep the official name: `nlvr/dev-1373-0-0`. The synthetic boxes (contrib/boxes/dataset.py) have the same layout and a
val of their own.

NLVR2: `<root>/data/<split>.json`, JSON lines: a sentence about two photographs, and its label. A line is `{"sentence":
..., "left_url": ..., "right_url": ..., "label": "True", "identifier": "dev-850-0-0", ...}`, with `directory` in train.
Without a label it is hidden. The identifier is `split-set-pair-sentence`: the pair's images are
`split-set-pair-img0.png` (left) and `-img1.png` (right), shared by all sentences about the pair, and a sentence is
about several pairs of its set, which are its group. The photographs are handed out on request. They are below
`params.images`, in `train/<directory>/`, `dev/`, `test1/` and `test2/`, or, as they come, the last three next to that
folder. `prepare` finds missing files; the statements about them then go to quarantine too. Splits are as in NLVR, with
dev, test1 and test2 as test.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from vlp_models.contrib.research_formats.lists import check_unused, select_splits
from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    fills,
    get,
    get_id,
    get_sentence,
    image_row,
    join_id,
)
from vlp_models.data.formats.files import read_lines, require_directory
from vlp_models.data.formats.splits import SplitsParams, safe_name
from vlp_models.data.names import Names

SPLITS = {"train": "train", "val": "val", "dev": "test", "test": "test", "hidden": "test"}
ORDERS = tuple(itertools.permutations(range(3)))  # image k shows box ORDERS[k][0] leftmost
BOX_STRIDE = 150  # pixels from one box's left edge to the next one's
COLORS = {"yellow": "yellow", "black": "black", "#0099ff": "blue", "blue": "blue"}
SHAPES = ("square", "circle", "triangle")
SIZES = {10: "small", 20: "medium", 30: "big"}
SLOTS = ("left", "middle", "right")
BOX = 100  # pixels per side
ORIGIN_OF_VAL = "name directories of train for val in data.{name}.validation_directories"


@dataclass(frozen=True, kw_only=True)
class NLVRParams(SplitsParams):
    """Keys of the formats nlvr and nlvr2."""

    validation_directories: list[str] = field(default_factory=list)  # train directories used as val


@fills(
    "captions",
    "statements",
    origin_of_val=ORIGIN_OF_VAL,
    way_to_get=(
        "clone https://github.com/lil-lab/nlvr and name its `nlvr` folder with `vlp use --set data.{name}.root=FOLDER`"
    ),
)
def read(name: str, params: NLVRParams, base: Path) -> Tables:
    """Read NLVR's splits: `params.splits`, or all that exist; `params.limit` keeps the first lines of each.

    Raises:
        DataError: the directory or a requested split is missing, or a file is not JSON lines.
    """
    root = require_directory(
        base, params.root, "clone github.com/lil-lab/nlvr and set data.<name>.root to its folder nlvr/"
    )
    files = {split: root / split / f"{split}.json" for split in SPLITS}
    tables = Tables()
    for split in select_splits(name, "NLVR", params, SPLITS, files):
        _read_split(tables, name, split, root / split, params)
    return tables


def _read_split(tables: Tables, name: str, split: str, directory: Path, params: NLVRParams) -> None:
    held_out = {str(d) for d in params.validation_directories}
    used_in: dict[str, str] = {}
    unreadable: dict[str, list[tuple[str, int]]] = {}  # identifier without a readable sentence -> its images
    # by name, not by `directory`: hidden.json has none, and a path in a record could point anywhere
    files = {path.name: path for path in (directory / "images").rglob("*") if path.suffix.lower() == ".png"}
    names = Names(files)
    lines = read_lines(directory / f"{split}.json", tables, "statements", f"NLVR's {split} split, JSON lines")
    for number, (provenance, record) in enumerate(lines):
        if params.limit and number >= params.limit:
            break
        provenance = f"{split}/{provenance}"
        with tables.record("statements", provenance):
            identifier = get_id(record, "identifier")
            check_unused("identifier", identifier, used_in)
            image_split = SPLITS[split]
            folder = str(record.get("directory", ""))
            if split == "train" and folder in held_out:
                image_split = "val"
            # synthetic files may have fewer images than one per order
            orders = record.get("permutations", len(ORDERS))
            if not isinstance(orders, int) or not 1 <= orders <= len(ORDERS):
                raise RecordError(f"`permutations` is {orders!r}, expected 1 to {len(ORDERS)}")
            # a repeated identifier has the same images: they are added once
            repeated = identifier in unreadable
            if not repeated:
                stem = f"{split}-{identifier}"
                unreadable[identifier] = _images(tables, name, image_split, files, names, stem, orders, provenance)
            images = unreadable[identifier]
            has_captions = image_split != "test"
            source = f"{name}/{split}"
            if _statements(tables, images, source, identifier, record, provenance, captions=has_captions):
                used_in[identifier] = provenance  # of a repeated identifier the first readable record is kept
            if repeated:
                continue
            if has_captions:
                _descriptions(tables, images, record, provenance)
            _objects(tables, images, record, provenance)


def _images(
    tables: Tables,
    name: str,
    split: str,
    files: dict[str, Path],
    names: Names,
    stem: str,
    orders: int,
    provenance: str,
) -> list[tuple[str, int]]:
    """Return (image id, k) of the example's images that exist; the others are quarantined."""
    images = []
    for k in range(orders):
        image_id = join_id(name, f"{stem}-{k}")
        file = f"{stem}-{k}.png"
        # names may differ in letter case or Unicode form
        matched = names.match(file)
        if matched is None:
            reason = f"no file {file} under images/{names.nearest(file)}"
            tables.quarantine("images", image_id, "image_exists", reason, provenance)
            continue
        path = files[matched]
        tables["images"].append(
            image_row(image_id, source=name, split=split, path=os.path.normpath(path), provenance=provenance)
        )
        images.append((image_id, k))
    return images


def _statements(
    tables: Tables,
    images: list[tuple[str, int]],
    source: str,
    identifier: str,
    record: Row,
    provenance: str,
    *,
    captions: bool,
) -> bool:
    """Add the line's sentence, and those under `more` (synthetic files only), for each of its images.

    Returns:
        Whether the line's own sentence can be read.
    """
    more = record.get("more", [])
    if not isinstance(more, list):
        raise RecordError(f"`more` is {more!r}, expected a list")
    # statements of a presentation are one group, or each `number` of it
    presentation, readable = identifier.partition("-")[0], False
    for index, statement in enumerate([record, *more]):
        suffix = f"-s{index}" if index else ""
        with tables.record("statements", provenance, f"{source}-{identifier}{suffix}"):
            text, label = get_sentence(statement, "sentence"), _label(statement)
            # the line's own sentence, not one of `more`
            readable = readable or statement is record
            number = f".{statement['number']}" if "number" in statement else ""
            for image_id, _ in images:
                tables["statements"].append(
                    {
                        "statement_id": f"{image_id}{suffix}",
                        "image_id": image_id,
                        "text": text,
                        "label": label,
                        "group": f"{source}-{presentation}{number}",
                        "provenance": provenance,
                    }
                )
                # a true sentence describes the image
                if captions and label:
                    tables.add_caption(f"{image_id}{suffix}", image_id, text, provenance)
    return readable


def _descriptions(tables: Tables, images: list[tuple[str, int]], record: Row, provenance: str) -> None:
    """Add captions that list the content of image k, `descriptions[k]` (synthetic files only)."""
    described = record.get("descriptions", [])
    if not isinstance(described, list) or not all(isinstance(texts, list) for texts in described):
        raise RecordError("`descriptions` is not a list of lists")
    for image_id, k in images:
        for index, text in enumerate(described[k] if k < len(described) else []):
            with tables.record("captions", provenance, f"{image_id}-d{index}"):
                if not isinstance(text, str):
                    raise RecordError(f"a description is {text!r}, expected a text")
                tables.add_caption(f"{image_id}-d{index}", image_id, text, provenance)


def _label(record: Row) -> bool | None:
    """Return the label, text or a JSON boolean; None if the split hides it."""
    if record.get("label") is None:
        return None
    # NLVR has "true", NLVR2 has "True" and some copies have JSON booleans
    label = str(record["label"]).strip().lower()
    if label not in ("true", "false"):
        raise RecordError(f'`label` is {record["label"]!r}, expected "true" or "false"', rule="label_known")
    return label == "true"


def _objects(tables: Tables, images: list[tuple[str, int]], record: Row, provenance: str) -> None:
    if not images:
        return
    with tables.record("objects", provenance, images[0][0]):
        boxes = get(record, "structured_rep", list)
        if len(boxes) != 3 or not all(isinstance(box, list) for box in boxes):
            raise RecordError("`structured_rep` does not have three boxes")
        items = []  # box, category, and x, y and size in pixels within the box
        for index, box in enumerate(boxes):
            for item in box:
                with tables.record("objects", provenance, images[0][0]):
                    color, shape = str(get(item, "color", str)).lower(), str(get(item, "type", str)).lower()
                    if color not in COLORS or shape not in SHAPES:
                        raise RecordError(f"unknown item {color!r} {shape!r}", rule="category_known")
                    x, y, size = (get(item, key, (int, float)) for key in ("x_loc", "y_loc", "size"))
                    items.append((index, f"{COLORS[color]} {shape}", x, y, size))
        # image k shows the same items, with the boxes in another order
        for image_id, k in images:
            for number, (index, category, x, y, size) in enumerate(items):
                # Where box `index` is drawn in image k.
                slot = ORDERS[k].index(index)
                x1 = slot * BOX_STRIDE + x
                tables["objects"].append(
                    {
                        "object_id": f"{image_id}#{number}",
                        "image_id": image_id,
                        "category": category,
                        "attributes": [SLOTS[slot], *_attributes(x, y, size)],
                        "x1": x1,
                        "y1": y,
                        "x2": x1 + size,
                        "y2": y + size,
                        "provenance": provenance,
                    }
                )


def _attributes(x: float, y: float, size: float) -> list[str]:
    """Return its size and the walls of its box that it touches: what sentences mention and a pixel decides."""
    # distance to each wall of the box, in pixels
    walls = {"wall-left": x, "wall-right": BOX - x - size, "roof": y, "base": BOX - y - size}
    touched = [name for name, distance in walls.items() if distance <= 0]
    sizes = [word for pixels, word in SIZES.items() if pixels == size]
    return [*sizes, *(["wall", *touched] if touched else [])]


NLVR2_SPLITS = {"train": "train", "dev": "test", "test1": "test", "test2": "test"}
FOLDERS = ("data", "nlvr2/data")  # of annotations: root is the repository's folder nlvr2/ or its parent
IDENTIFIER = re.compile(r"(train|dev|test1|test2)-([0-9]+)-([0-9]+)-([0-9]+)")


@fills("image_pairs", origin_of_val=ORIGIN_OF_VAL)
def read_nlvr2(name: str, params: NLVRParams, base: Path) -> Tables:
    """Read NLVR2's splits: `params.splits`, or all that exist; `params.limit` keeps the first lines of each.

    Raises:
        DataError: the directory or a requested split is missing, or a file is not JSON lines.
    """
    root = require_directory(
        base, params.root, "clone github.com/lil-lab/nlvr and set data.<name>.root to its folder nlvr2/"
    )
    folder = next((root / folder for folder in FOLDERS if (root / folder).is_dir()), root / FOLDERS[0])
    files = {split: folder / f"{split}.json" for split in NLVR2_SPLITS}
    tables = Tables()
    for split in select_splits(name, "NLVR2", params, NLVR2_SPLITS, files):
        _read_nlvr2_split(tables, name, split, files[split], root, params)
    return tables


def _read_nlvr2_split(tables: Tables, name: str, split: str, file: Path, root: Path, params: NLVRParams) -> None:
    held_out = {str(directory) for directory in params.validation_directories}
    used_in: dict[str, str] = {}
    images: set[str] = set()
    lines = read_lines(file, tables, "image_pairs", f"NLVR2's {split} split, JSON lines")
    for number, (provenance, record) in enumerate(lines):
        if params.limit and number >= params.limit:
            break
        with tables.record("image_pairs", provenance):
            identifier = get_id(record, "identifier")
            with tables.record("image_pairs", provenance, join_id(name, identifier)):
                check_unused("identifier", identifier, used_in)
                # The set, the pair in the set and the sentence; the first two name the images.
                of_set, pair, sentence = _parts(identifier, split)
                directory = safe_name(get_id(record, "directory")) if split == "train" else ""
                stem = f"{split}-{of_set}-{pair}"
                left_id, right_id = (join_id(name, f"{stem}-img{side}") for side in (0, 1))
                row = {
                    "pair_id": join_id(name, identifier),
                    "image_id": left_id,
                    "other_image_ids": [right_id],
                    "text": get_sentence(record, "sentence"),
                    "label": _label(record),
                    # A sentence is about several pairs of its set: they are scored as one group.
                    "group": join_id(name, f"{split}-{of_set}-{sentence}"),
                    "provenance": provenance,
                }
                image_split = "val" if split == "train" and directory in held_out else NLVR2_SPLITS[split]
                tables["image_pairs"].append(row)
                used_in[identifier] = provenance  # only now: of a repeated id the first readable record is kept
                # images are shared by all sentences about the pair
                for image_id in (left_id, right_id):
                    if image_id not in images:
                        images.add(image_id)
                        path = _path(root, params.images, split, directory, f"{image_id.partition('/')[2]}.png")
                        tables["images"].append(
                            image_row(image_id, source=name, split=image_split, path=path, provenance=provenance)
                        )


def _parts(identifier: str, split: str) -> tuple[str, str, str]:
    """Return the numbers of the set, of the pair in it, and of the sentence."""
    match = IDENTIFIER.fullmatch(identifier)
    if match is None or match[1] != split:
        raise RecordError(f"identifier {identifier!r} is not {split}-SET-PAIR-SENTENCE", rule="identifier_form")
    return match[2], match[3], match[4]


def _path(root: Path, images: str, split: str, directory: str, file: str) -> str:
    """Return the first path where the file exists; if none, the first possible one."""

    candidates = [root / images / split / directory / file]
    if split != "train":
        candidates.append(root / split / file)
    path = next((candidate for candidate in candidates if candidate.is_file()), candidates[0])
    return os.path.normpath(path)
