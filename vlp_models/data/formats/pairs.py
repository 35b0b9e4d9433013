"""One's own image-text pairs: a CSV (or TSV) with a header, or JSON lines, of `image`, `caption` and perhaps `split`.

An image may stand in several rows, one caption each. Image paths are relative to the file. Where no row names a
split, images are divided 80/10/10 by a hash of their path: the same file gives the same split on every machine, and
new images do not move old ones (except where a handful would leave a split empty).

`pairs` may be a pattern (`*/pairs.jsonl`): the files it matches are read in the order of their names, and ids begin
with the folder of the file. A dataset in batches grows without a file being rewritten.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    get_sentence,
    get_text,
    image_row,
    join_id,
    read_lines,
    read_text,
)
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_RECORD_LINES = 50  # of a text that has line breaks
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")


def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads a file of pairs; `params.limit` keeps the first rows.

    Raises:
        DataError: the file is missing, of an unknown kind, or lacks the columns `image` and `caption`.
    """
    if not params.pairs:
        raise DataError(f"params: data.{name}.pairs: name the CSV or JSONL file, relative to data.{name}.root")
    tables = Tables()
    images: dict[str, Row] = {}
    files = _files(name, base / params.root, params.pairs)
    rows = ((path, prefix, *found) for path, prefix in files for found in read_pairs(path, tables))
    for number, (path, prefix, provenance, record) in enumerate(rows, start=1):
        if params.limit and number > params.limit:
            break
        row_id = join_id(name, prefix + provenance.rpartition(":")[2])
        provenance = prefix + provenance
        with tables.record("captions", provenance, row_id):
            image = get_text(record, "image").strip()
            if not image or "\0" in image:
                raise RecordError(f"`image` is not a path: {image!r}")
            text = get_sentence(record, "caption")
            split = get_text(record, "split").strip().lower() if record.get("split") is not None else ""
            key = prefix + image.lstrip("/") if prefix else image
            if key not in images:
                images[key] = image_row(
                    join_id(name, key.lstrip("/")),
                    source=name,
                    split=split,
                    path=os.path.normpath(path.parent / image),
                    provenance=provenance,
                )
            elif images[key]["split"] != split:
                first = images[key]
                raise RecordError(
                    f"the image is {split or 'of no split'} here and {first['split'] or 'of none'} in "
                    f"{first['provenance']}",
                    rule="split_disjoint",
                )
            tables["captions"].append(
                {
                    "caption_id": row_id,
                    "image_id": images[key]["image_id"],
                    "text": text,
                    "provenance": provenance,
                }
            )
    if not any(row["split"] for row in images.values()):
        for image, split in split_by_hash(list(images)).items():
            images[image]["split"] = split
    tables["images"].extend(images.values())
    return tables


def split_by_hash(names: list[str]) -> dict[str, str]:
    """name -> train (80%), val (10%) or test (10%). Three names or more give at least one of each."""
    order = sorted(names, key=_bucket)
    splits = {name: "train" if _bucket(name) < 0.8 else "val" if _bucket(name) < 0.9 else "test" for name in order}
    # val twice: what is taken for train may have been the only one of val.
    for wanted, candidate in (("test", -1), ("val", -2), ("train", 0), ("val", -2)):
        if len(order) >= 3 and wanted not in splits.values():
            splits[order[candidate]] = wanted
    return splits


def _bucket(name: str) -> float:
    """In [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def _files(name: str, root: Path, pattern: str) -> list[tuple[Path, str]]:
    """The files of pairs, each with what its ids begin with."""
    if "*" not in pattern:
        return [(root / pattern, "")]
    found = sorted(path for path in root.glob(pattern) if path.is_file() and not _hidden(path.relative_to(root)))
    if not found:
        raise DataError(f"{root / pattern}: no file matches data.{name}.pairs; `vlp ingest` makes the first batch")
    return [(path, f"{path.parent.relative_to(root).as_posix()}/".removeprefix("./")) for path in found]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_pairs(path: Path, tables: Tables) -> Iterator[tuple[str, Row]]:
    """(provenance, record) of each row, fields as written; lines that can't be read go to `tables["quarantine"]`.

    Raises:
        DataError: the file is missing, of an unknown kind, or lacks the columns `image` and `caption`.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return _read_csv(path, DELIMITERS[suffix], tables)
    if suffix in JSON_LINES:
        return read_lines(path, tables, "captions", "image-caption pairs as JSON lines")
    raise DataError(
        f"{path}: pairs are read from {', '.join((*DELIMITERS, *JSON_LINES))}; save the file as one of them"
    )


def _read_csv(path: Path, delimiter: str, tables: Tables) -> Iterator[tuple[str, Row]]:
    """(provenance, row) of each record; the line is the record's first."""
    text = read_text(path, "image-caption pairs").replace("\r\n", "\n").replace("\r", "\n")
    lines = [line + "\n" for line in text.split("\n")]
    header: list[str] = []
    for number, row in _parse(lines, delimiter, path, tables):
        provenance = f"{path.name}:{number}"
        if not any(cell.strip() for cell in row):
            continue
        if not header:
            header = [cell.strip().lower() for cell in row]
            if not {"image", "caption"} <= set(header):
                raise DataError(
                    f"{path}:{number}: the first line must name the columns image and caption (and may name split), "
                    f"separated by {delimiter!r}; found {', '.join(map(repr, row))[:200]}"
                )
        elif len(row) != len(header):
            reason = f"{len(row)} fields, the header has {len(header)}; a text that holds {delimiter!r} needs quotes"
            tables.set_aside("captions", "", "record_readable", reason, provenance)
        else:
            yield provenance, dict(zip(header, row, strict=True))
    if not header:
        raise DataError(f"{path}: empty; expected a header line and one line per pair")


def _parse(lines: list[str], delimiter: str, path: Path, tables: Tables) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of each record. A line with broken quoting costs that line, not those its quote swallows."""
    start = consumed = 0

    def ahead() -> Iterator[str]:
        """From `start` on; a record that reaches too far is broken, or each open quote would cost all that follows."""
        for place in range(start, len(lines)):
            if place - start - consumed >= MAX_RECORD_LINES:
                raise csv.Error(f"a quote is open for {MAX_RECORD_LINES} lines")
            yield lines[place]

    while start < len(lines):
        consumed = 0
        reader = csv.reader(ahead(), delimiter=delimiter, strict=True)
        try:
            for row in reader:
                first, consumed = consumed, reader.line_num
                yield start + first + 1, row
            return
        except csv.Error as error:
            bad = start + consumed + 1
            tables.set_aside("captions", "", "record_readable", f"broken quoting: {error}", f"{path.name}:{bad}")
            start = bad
