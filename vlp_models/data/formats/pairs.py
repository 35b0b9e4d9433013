"""Your own data: image-text pairs, or texts without images.

Pairs are a CSV (or TSV) with a header, or JSON lines, with `image`, `caption` and optionally `split`, `group` and
`lang`. An image may be in several rows, one caption each. Image paths are relative to the file. If no row names a
split, images are divided 80/10/10 by a hash of their path: the same file gives the same split on every machine, and new
images do not move old ones (except if a split of a handful of images would be empty). Images with the same `group` are
divided by the hash of their group, so they stay together. If rows name splits, `params.val_fraction` of train becomes
val, by the same hash. `lang` is a caption's language code (de, pt-BR); anything else is unknown.

`pairs` may be a pattern (`*/pairs.jsonl`): matching files are read in the order of their names, and ids start with the
folder of the file. So a dataset of batches grows without rewriting a file. If several matching files are in one folder
(`*.csv`), ids of captions have the name of their file too. Memory does not grow with the rows: they are read one by
one, and a join on disk finds the rows of the same image.

Texts are for pretraining on text alone, files with one text per line, by split:
`data.books: {format: texts, root: data/raw/books, texts: {train: [part-1.txt, part-2.txt], val: [held-out.txt]}}`.
"""

from __future__ import annotations

import os
import posixpath
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from vlp_models.data.batches import MEASURED
from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    fills,
    get_id,
    get_sentence,
    get_text,
    image_row,
    is_utf8,
    join_id,
)
from vlp_models.data.formats.files import (
    PACKED,
    is_hidden,
    list_command,
    open_lines,
    read_csv,
    read_lines,
    require_directory,
)
from vlp_models.data.formats.splits import Division, check_splits, hold_out
from vlp_models.data.joins import Database
from vlp_models.data.tables import (
    BATCH_ROWS,
    UNKNOWN,
    TableWriter,
    read_batches,
    standard_language,
    standard_split,
)
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

DELIMITERS = {".csv": ",", ".tsv": "\t"}
NO_LANGUAGE = "captions whose `lang` is blank or no language code: unknown"
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
NEEDED, OPTIONAL = ("image", "caption"), ("split", "group", "lang")  # columns
LABELED = ("labeled_by", "labeled_at", "label_draft")  # who wrote a caption, when and from what; training reads none

MENTIONS = pa.schema(
    [
        ("number", pa.int64()),
        ("key", pa.string()),  # the image's id without the dataset
        ("split", pa.string()),
        *((name, pa.string()) for name in ("together", "language", "path", "caption_id", "text", "provenance")),
    ]
)
# the first mention of each image, with the first group that one names; and each mention with the image's first one
_FIRST = """
    SELECT key, min(number) AS number, arg_min(together, number) FILTER (WHERE together <> '') AS together
    FROM mentions GROUP BY key
"""
_IMAGES = f"""
    SELECT m.* EXCLUDE together, coalesce(f.together, '') AS together
    FROM mentions m JOIN ({_FIRST}) f ON m.number = f.number ORDER BY m.number
"""
_CAPTIONS = f"""
    SELECT m.*, f.split AS first_split, f.together AS first_group, f.provenance AS first_provenance
    FROM mentions m JOIN ({_IMAGES}) f ON m.key = f.key ORDER BY m.number
"""


@dataclass(frozen=True, kw_only=True)
class PairsParams(SourceParams):
    """Keys of the format pairs."""

    pairs: str = ""  # CSV, TSV or JSONL of image,caption[,split][,group][,lang]; a glob pattern for several files


@dataclass(frozen=True, kw_only=True)
class TextsParams(SourceParams):
    """Keys of the format texts."""

    file_keys: ClassVar[tuple[str, ...]] = ("texts",)

    texts: dict[str, list[str]] = field(default_factory=dict)  # files with one text per line, by split


@fills("captions")
def read(name: str, params: PairsParams, base: Path) -> Tables:
    """Read files of pairs; `params.limit` keeps the first rows.

    Raises:
        DataError: the file is missing, of an unknown kind, or lacks the columns `image` and `caption`.
    """
    if not params.pairs:
        raise DataError(f"params.yaml: data.{name}.pairs: name the CSV or JSONL file, relative to data.{name}.root")

    def write(tables: Tables, mentions: TableWriter) -> None:
        # `limit` counts rows, also those that are quarantined.
        rows = islice(read_records(name, params, base, tables), params.limit or None)
        for number, (path, prefix, local, line, record) in enumerate(rows, start=1):
            row_id, provenance = join_id(name, local), prefix + line
            with tables.record("captions", provenance, row_id):
                mention = read_mention(record, path, prefix)
                mentions.append({"number": number, **mention, "caption_id": row_id, "provenance": provenance})

    return join_mentions(name, params, write)


def join_mentions(name: str, params: SourceParams, write: Callable[[Tables, TableWriter], None]) -> Tables:
    """Return the tables of image-caption pairs: mentions of one image are joined, and splits are chosen.

    Args:
        write: writes a row of `MENTIONS` for each pair.
    """
    tables = Tables()
    with tempfile.TemporaryDirectory(prefix=".pairs-", dir=tables.directory) as folder:
        with TableWriter("mentions", Path(folder), MENTIONS) as mentions:
            write(tables, mentions)
        with Database.within(Path(folder)) as database:
            database.load("mentions", read_batches([mentions.path], BATCH_ROWS), MENTIONS)
            # the database has a copy of it
            mentions.path.unlink()
            _add_images(name, params, tables, database)
            _add_captions(name, tables, database)
    return tables


def read_records(
    name: str, params: PairsParams, base: Path, tables: Tables
) -> Iterator[tuple[Path, str, str, str, Row]]:
    """Yield (file, prefix of its images' ids, id of the caption, provenance, record) of each row."""
    files = _files(name, base / params.root, params.pairs)
    # rows of two files in one folder may have one number, so ids have the file's name
    in_folder = Counter(path.parent for path, _ in files)
    for path, prefix in files:
        captions = f"{prefix}{path.name}:" if in_folder[path.parent] > 1 else prefix
        for provenance, record in read_pairs(path, tables):
            yield path, prefix, captions + provenance.rpartition(":")[2], provenance, record
        tables.ignored.difference_update(LABELED)


def read_mention(record: Row, path: Path, prefix: str) -> Row:
    """Return the fields of a row of the file `path`."""
    image = read_image_name(record)
    # ./a.jpg and a.jpg are one image, and so are x\\a.jpg and x/a.jpg
    slashes = image.replace("\\", "/")
    # With a prefix, an absolute path becomes relative to it.
    key = prefix + slashes.lstrip("/") if prefix else slashes
    text = get_sentence(record, "caption")
    return {
        "text": text,
        "split": read_split(record),
        "key": posixpath.normpath(key),
        "together": read_group(record),
        "language": read_language(record),
        "path": os.path.normpath(path.parent / image),
    }


def read_image_name(record: Row, key: str = "image") -> str:
    """Return the path of a row's image as written, without white space around it."""
    image = get_text(record, key).strip()
    if not image or "\0" in image:
        raise RecordError(f"`{key}` is not a path: {image!r}")
    if image.startswith(("http://", "https://")):
        raise RecordError(f"`{key}` is an address, {image:.80}; download the images and name their files")
    return image


def read_split(record: Row) -> str:
    """Return a row's split, standardized; empty if it names none."""
    return standard_split(get_text(record, "split")) if record.get("split") is not None else ""


def read_group(record: Row) -> str:
    """Return the group of a row's image with composed characters, empty if it names none."""
    named = record.get("group") not in (None, "")
    return unicodedata.normalize("NFC", get_id(record, "group").strip()) if named else ""


def read_language(record: Row) -> str:
    """Return the language code of a row's caption: `unknown` if it is none, empty if there is no field `lang`."""
    return standard_language(record["lang"]) if "lang" in record else ""


def _add_images(name: str, params: SourceParams, tables: Tables, database: Database) -> None:
    def image_rows() -> Iterator[Row]:
        for piece in database.stream(_IMAGES):
            yield from piece.to_pylist()

    # divide the images if no row names a split
    named = database.value(f"SELECT count(*) FROM ({_IMAGES}) WHERE split <> ''")
    division = None if named else Division(row["together"] or row["key"] for row in image_rows())
    if division and params.group_near_duplicates:
        for row in image_rows():
            tables.divided[join_id(name, row["key"].lstrip("/"))] = row["together"] or row["key"]
    for row in image_rows():
        image_id = join_id(name, row["key"].lstrip("/"))
        # Images of one group are divided together; without a group an image is its own unit.
        unit = row["together"] or row["key"]
        split = division.split_of(unit) if division else hold_out(tables, params, image_id, unit, row["split"])
        image = image_row(image_id, source=name, split=split, path=row["path"], provenance=row["provenance"])
        tables["images"].append(image)


def _add_captions(name: str, tables: Tables, database: Database) -> None:
    for piece in database.stream(_CAPTIONS):
        for row in piece.to_pylist():
            with tables.record("captions", row["provenance"], row["caption_id"]):
                # an image in two splits would leak: its first mention decides
                if row["split"] != row["first_split"]:
                    raise RecordError(
                        f"the image is {row['split'] or 'of no split'} here and {row['first_split'] or 'of none'} in "
                        f"{row['first_provenance']}",
                        rule="split_disjoint",
                    )
                # an image in two groups would join them
                if row["together"] not in ("", row["first_group"]):
                    raise RecordError(
                        f"the image is of group {row['together']!r} here and of {row['first_group']!r} elsewhere",
                        rule="group_unique",
                    )
                image_id = join_id(name, row["key"].lstrip("/"))
                # empty: the file has no column `lang`
                if row["language"] == UNKNOWN:
                    tables.notes[NO_LANGUAGE] += 1
                elif row["language"]:
                    ids = {"image_id": image_id, "caption_id": row["caption_id"]}
                    tables["languages"].append({**ids, "language": row["language"]})
                tables.add_caption(row["caption_id"], image_id, row["text"], row["provenance"])


def _files(name: str, root: Path, pattern: str) -> list[tuple[Path, str]]:
    """Return the files of pairs, each with the prefix of its images' ids."""
    if "*" not in pattern:
        return [(root / pattern, "")]
    paths = sorted(path for path in root.glob(pattern) if path.is_file() and not is_hidden(path.relative_to(root)))
    if not paths:
        raise DataError(f"{root / pattern}: no file matches data.{name}.pairs; `vlp ingest` makes the first batch")
    return [(path, f"{path.parent.relative_to(root).as_posix()}/".removeprefix("./")) for path in paths]


def read_pairs(path: Path, tables: Tables) -> Iterator[tuple[str, Row]]:
    """Yield (provenance, record) of each row, fields as written; unreadable lines go to quarantine.

    Raises:
        DataError: the file is missing, of an unknown kind, or lacks the columns `image` and `caption`.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return read_csv(path, tables, "captions", NEEDED, OPTIONAL, delimiter=DELIMITERS[suffix])
    if suffix in JSON_LINES:
        keys = (*NEEDED, *OPTIONAL, *MEASURED)
        return read_lines(path, tables, "captions", "image-caption pairs as JSON lines", keys)
    way_out = "unpack the file" if suffix in PACKED else "save the file as one of them"
    if suffix == ".json":
        way_out = list_command(path.name)
    raise DataError(f"{path}: pairs are read from {', '.join((*DELIMITERS, *JSON_LINES))}; {way_out}")


@fills("texts", origin_of_val="name the files of val in data.{name}.texts")
def read_texts(name: str, params: TextsParams, base: Path) -> Tables:
    """Read one text per line and skip empty lines; `params.limit` keeps the first texts of each split.

    Raises:
        DataError: the directory or a file is missing, a split is unknown, or no file is named.
    """
    root = require_directory(base, params.root, f"put the text files there, or set data.{name}.root to where they are")
    if not params.texts:
        raise DataError(f"params.yaml: data.{name}.texts names no file; e.g. texts: {{train: [sentences.txt]}}")
    tables = Tables()
    check_splits(f"data.{name}.texts", params.texts)
    for split, files in params.texts.items():
        count = 0
        for file in files:
            for number, line in enumerate(open_lines(root / file, "texts, one a line"), start=1):
                # white space is collapsed, as in captions
                text = " ".join(line.split())
                if not text or (params.limit and count >= params.limit):
                    continue
                text_id, provenance = join_id(name, f"{file}:{number}"), f"{file}:{number}"
                if not is_utf8(text):
                    tables.quarantine("texts", text_id, "text_utf8", f"not UTF-8: {text[:40]!r}", provenance)
                    continue
                count += 1
                row = {"text_id": text_id, "source": name, "split": split, "text": text, "provenance": provenance}
                tables["texts"].append(row)
    return tables
