"""The Karpathy split files (dataset_coco.json, dataset_flickr30k.json): which image is in which split.

`restval`, the part of COCO's val2014 that is neither val nor test, is read as train, as every paper does.
Flickr30k's file has no `cocoid`: there an image's id is its file name without the ending, and the captions are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vlp_models.data.formats.base import RecordError, Tables, get, get_id, get_sentence, get_text, read_records


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One image of the split file. `sentences` are (id, text)."""

    split: str
    filepath: str  # folder below the images' directory: `val2014`, or empty
    filename: str
    sentences: tuple[tuple[str, str], ...]
    provenance: str


def read(path: Path, tables: Tables, sentences: bool) -> dict[str, Entry]:
    """Image id -> entry; `sentences=False` skips the captions, for datasets that have them in a file of their own.

    Raises:
        DataError: the file is missing or not a Karpathy split file.
    """
    entries: dict[str, Entry] = {}
    for provenance, record in read_records(path, "images", "a Karpathy split file"):
        with tables.record("images", provenance):
            filename = safe_name(get_text(record, "filename"))
            image_id = get_id(record, "cocoid") if "cocoid" in record else PurePosixPath(filename).stem
            split = get_text(record, "split")
            entry = Entry(
                split="train" if split == "restval" else split,
                filepath=safe_name(get_text(record, "filepath")) if record.get("filepath") else "",
                filename=filename,
                sentences=tuple(_sentences(record, tables, provenance)) if sentences else (),
                provenance=provenance,
            )
            if image_id in entries:
                first = entries[image_id]
                raise RecordError(
                    f"image {image_id} is listed again, as {entry.split}; {first.provenance} has it as {first.split}",
                    rule="id_unique",
                )
            entries[image_id] = entry
    return entries


def safe_name(name: str) -> str:
    """A relative path as an annotation file writes it; one that leaves the dataset's directory is refused."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise RecordError(f"{name!r} is not a path inside the dataset", rule="path_inside")
    return name


def _sentences(record: Any, tables: Tables, provenance: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for index, sentence in enumerate(get(record, "sentences", list)):
        with tables.record("captions", f"{provenance}.sentences[{index}]"):
            pairs.append((get_id(sentence, "sentid"), get_sentence(sentence, "raw")))
    return pairs
