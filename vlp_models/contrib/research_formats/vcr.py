"""VCR (Zellers et al. 2019): `<root>/<split>.jsonl`, one question per line, and images with a metadata JSON each.

A line names its image, the objects in it, a question, four answers and four rationales. Texts are lists of tokens; a
token that is a list of numbers, a tag, refers to objects: `["Why", "is", [0], "near", [1, 2], "?"]`. Tags are replaced
by names: a person gets a gender-neutral name, anything else its category, several are joined by "and". The n-th person
of an image has the n-th name, so that one person has the same name in all of an image's texts (r2c counts all objects
for this; the public TDEN code runs one counter over the whole file). Test lines hide their labels.

The metadata (`names`, `boxes` as x1 y1 x2 y2 and a confidence, `width`, `height`) has the objects' boxes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.contrib.research_formats.lists import check_unused, select_splits
from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    fills,
    get,
    get_id,
    get_size,
    get_text,
    image_row,
    is_number,
    is_utf8,
    join_id,
)
from vlp_models.data.formats.files import read_json, read_lines, require_directory
from vlp_models.data.formats.splits import SplitsParams, safe_name
from vlp_models.data.names import FileNames
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError

CHOICES = 4
PERSON = "person"
NAMES = (
    "Alex",
    "Blake",
    "Casey",
    "Drew",
    "Emery",
    "Finley",
    "Jamie",
    "Kerry",
    "Logan",
    "Morgan",
    "Quinn",
    "Riley",
    "Taylor",
)


@fills("choices", origin_of_val="its val is val.jsonl")
def read(name: str, params: SplitsParams, base: Path) -> Tables:
    """Read VCR's splits: `params.splits`, or all that exist; `params.limit` keeps the first lines of each.

    Raises:
        DataError: the directory or a requested split is missing, or a file is not JSON lines.
    """
    root = require_directory(
        base, params.root, "get VCR from visualcommonsense.com and set data.<name>.root to the folder of train.jsonl"
    )
    files = {split: root / f"{split}.jsonl" for split in SPLITS}
    splits = select_splits(name, "VCR", params, SPLITS, files)
    tables = Tables()
    images = _Images(name=name, directory=root / params.images, tables=tables)
    used_in: dict[str, str] = {}
    for split in splits:
        lines = read_lines(files[split], tables, "choices", f"VCR's {split} split, JSON lines")
        for number, (provenance, record) in enumerate(lines):
            if params.limit and number >= params.limit:
                break
            # first errors without an id, then those of a row with one
            with tables.record("choices", provenance):
                local = get_id(record, "annot_id")
                with tables.record("choices", provenance, join_id(name, local)):
                    check_unused("annot_id", local, used_in)
                    image = images.find(record, split, provenance)
                    tables["choices"].append(_row(join_id(name, local), image, record, provenance))
                    used_in[local] = provenance  # only now: of a repeated id the first readable record is kept
    return tables


@dataclass(frozen=True, kw_only=True)
class _Image:
    image_id: str
    objects: list[str]
    boxes: list[list[float]]  # pixels: x1, y1, x2, y2


@dataclass(kw_only=True)
class _Images:
    """The images read so far. Metadata is read once per image; its errors are reported for each of its lines."""

    name: str
    directory: Path
    tables: Tables
    names: FileNames = field(default_factory=FileNames)
    images: dict[str, tuple[str, _Image | RecordError]] = field(default_factory=dict)  # img_id -> file, image

    def find(self, record: Row, split: str, provenance: str) -> _Image:
        """Return the line's image; for its first line, add its rows to the tables."""
        local = get_id(record, "img_id")
        file_name = safe_name(get_text(record, "img_fn"))
        if local not in self.images:
            image_or_error: _Image | RecordError
            try:
                image_or_error = self._add(record, local, file_name, split, provenance)
            except RecordError as error:
                image_or_error = error
            self.images[local] = (file_name, image_or_error)
        first_file, image = self.images[local]
        if first_file != file_name:
            raise RecordError(f"img_id {local} is {file_name} here and {first_file} before", rule="image_id_unique")
        if isinstance(image, RecordError):
            raise RecordError(str(image), rule=image.rule)
        # the lines of an image share its objects, to which their tags refer
        if _objects(record) != image.objects:
            raise RecordError(f"objects differ from the first line of image {local}", rule="objects_match")
        return image

    def _add(self, record: Row, local: str, file_name: str, split: str, provenance: str) -> _Image:
        # an archive may have been unpacked with other letter case
        metadata_file = safe_name(get_text(record, "metadata_fn"))
        path = self.directory / metadata_file
        if not path.exists():
            candidates = self.names.find(self.directory, metadata_file)
            if len(candidates) != 1:
                explained = self.names.explain(self.directory, metadata_file, candidates)
                raise RecordError(f"{path}: no such file{explained}", rule="metadata_readable")
            path = candidates[0]
        try:
            metadata = read_json(path, "the metadata of a VCR image")
        except DataError as error:
            raise RecordError(str(error), rule="metadata_readable") from None
        objects, names, boxes = _objects(record), get(metadata, "names", list), get(metadata, "boxes", list)
        # the metadata of another image: tags would point to the wrong boxes
        if names != objects or len(boxes) != len(objects):
            raise RecordError(
                f"{metadata_file} has {len(names)} names and {len(boxes)} boxes for the line's {len(objects)} objects, "
                "or different names",
                rule="objects_match",
            )
        image_id, (width, height) = join_id(self.name, local), get_size(metadata)
        image = _Image(image_id=image_id, objects=objects, boxes=[_corners(box, metadata_file) for box in boxes])
        self.tables["images"].append(
            image_row(
                image_id,
                source=self.name,
                split=split,
                path=os.path.normpath(self.directory / file_name),
                provenance=provenance,
                width=width,
                height=height,
            )
        )
        for number, (category, box) in enumerate(zip(objects, image.boxes, strict=True)):
            self.tables["objects"].append(
                {
                    "object_id": f"{image_id}#{number}",
                    "image_id": image_id,
                    "category": category,
                    **dict(zip(("x1", "y1", "x2", "y2"), box, strict=True)),
                    "attributes": None,
                    "provenance": f"{provenance}, {metadata_file}#boxes[{number}]",
                }
            )
        return image


def _objects(record: Row) -> list[str]:
    objects = get(record, "objects", list)
    if not all(isinstance(name, str) and name and is_utf8(name) for name in objects):
        raise RecordError("`objects` is not a list of names")
    return objects


def _corners(box: Any, where: str) -> list[float]:
    if not isinstance(box, list) or len(box) not in (4, 5) or not all(map(is_number, box)):
        raise RecordError(
            f"{where}: a box is {str(box)[:60]}, expected x1, y1, x2, y2, confidence", rule="box_readable"
        )
    return [float(v) for v in box[:4]]


def _row(choice_id: str, image: _Image, record: Row, provenance: str) -> Row:
    names = name_objects(image.objects)
    question = get(record, "question", list)
    answers, rationales = _choices(record, "answer_choices"), _choices(record, "rationale_choices")
    # Objects of the question and the answers come first, then all others in their order: which objects only a
    # rationale mentions must not leak to a model that chooses an answer.
    first = {tag for text in (question, *answers) for tag in _tags(text, len(names))}
    for text in rationales:
        _tags(text, len(names))  # checks them
    order = sorted(first)
    order += [number for number in range(len(names)) if number not in first]
    answer_texts = [write_out(text, names) for text in answers]
    rationale_texts = [write_out(text, names) for text in rationales]
    return {
        "choice_id": choice_id,
        "image_id": image.image_id,
        "text": write_out(question, names),
        "answers": answer_texts,
        "answer_label": _label(record, "answer_label"),
        "rationales": rationale_texts,
        "rationale_label": _label(record, "rationale_label"),
        "boxes": [image.boxes[number] for number in order],
        "provenance": provenance,
    }


def name_objects(objects: list[str]) -> list[str]:
    """Return the name of each object in a text."""
    # by the number of the person, so that one person has one name in all texts of the image
    names, persons = [], 0
    for category in objects:
        if category == PERSON:
            # With more persons than names, names repeat: the texts then become ambiguous, but stay readable.
            names.append(NAMES[persons % len(NAMES)])
            persons += 1
        else:
            names.append(category)
    return names


def write_out(tokens: list[Any], names: list[str]) -> str:
    """Return the tokens as text with tags replaced; `_tags` must have accepted them."""
    words = []
    for token in tokens:
        words.append(token if isinstance(token, str) else " and ".join(names[number] for number in token))
    return " ".join(words)


def _choices(record: Row, key: str) -> list[list[Any]]:
    choices = get(record, key, list)
    if len(choices) != CHOICES or not all(isinstance(choice, list) for choice in choices):
        raise RecordError(f"`{key}` does not have {CHOICES} lists of tokens", rule="four_choices")
    return choices


def _tags(tokens: list[Any], objects: int) -> set[int]:
    """Return the objects that a text refers to."""
    tags: set[int] = set()
    for token in tokens:
        # a word, or else a tag: a list of object numbers
        if isinstance(token, str):
            if not is_utf8(token):
                raise RecordError(f"a token is not UTF-8: {token!r}", rule="text_utf8")
            continue
        if not isinstance(token, list) or not token or not all(type(number) is int for number in token):
            raise RecordError(f"a token is {str(token)[:60]}, expected a word or a list of object numbers")
        for number in token:
            if not 0 <= number < objects:
                raise RecordError(f"the tag {number} has no object: the line has {objects}", rule="tag_known")
        tags.update(token)
    return tags


def _label(record: Row, key: str) -> int | None:
    """Return the label; None if the split hides it."""
    if record.get(key) is None:
        return None
    label: int = get(record, key, int)
    if not 0 <= label < CHOICES:
        raise RecordError(f"`{key}` is {label}, expected 0 to {CHOICES - 1}", rule="label_known")
    return label
