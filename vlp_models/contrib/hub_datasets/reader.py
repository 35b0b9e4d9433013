"""Hugging Face datasets: folders as `hf download --local-dir` writes them, or names on the Hub (download.py).

    parquet      data/train-00000-of-00002.parquet: an image column (struct of bytes and path), a column of captions
    arrow        train/data-00000-of-00001.arrow, as `save_to_disk` writes them, with the same columns
    imagefolder  metadata.jsonl, .csv or .parquet with `file_name` and a caption column, next to the images
    webdataset   train/00000.tar: KEY.jpg with KEY.txt, or with KEY.json, in any order; `image_column: input.jpg` for
                 KEY.input.jpg, `caption_column: en.txt` for KEY.en.txt
    files        00000/KEY.jpg with KEY.txt or KEY.json: the same, unpacked

The folders that img2dataset writes are one of these, whatever its output format. Its tables of URLs next to tars or
folders are not read; rows that it could not download are left out and counted.

A caption is a string, or a list of them. Columns are guessed if there is exactly one candidate; `image_column` and
`caption_column` name others. The split is the column `split`, or the word (train, validation, test, ...) in the file's
name or its folder's. If all files name the same split, or none, images are divided 80/10/10 as in `pairs`, unless
`splits` names that split. The columns `group` and `lang` are those of `pairs`. `limit` keeps the first rows of each
split, of those that `splits` names.

Images inside parquet files and tars are copied to files, named by their content: rows with one image are joined. So are
the images of an imagefolder on the Hub: its files are in a cache, which later stages do not depend on.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.contrib.hub_datasets.download import METADATA, PARQUET, SUFFIXES, TAR, check_pinned, download, pin
from vlp_models.contrib.hub_datasets.tar import members, readable
from vlp_models.data.formats.base import (
    RecordError,
    Row,
    Tables,
    fills,
    get_sentence,
    is_utf8,
    join_id,
    printable,
)
from vlp_models.data.formats.files import PACKED, is_hidden, read_csv, read_lines, require_directory
from vlp_models.data.formats.pairs import join_mentions, read_group, read_image_name, read_language, read_split
from vlp_models.data.formats.splits import SplitsParams
from vlp_models.data.images import MAX_BYTES
from vlp_models.data.tables import SPLITS, TableWriter, standard_split
from vlp_models.errors import DataError

FILE_NAME = "file_name"
CAPTIONS = ("caption", "captions", "text", "texts", "sentence", "sentences", "description", "alt_text", "txt")
OPTIONAL = ("split", "group", "lang")
TEXT, JSON = "txt", "json"
MAX_TEXT = {TEXT: 2**20, JSON: 16 * 2**20}  # bytes, as in our own shards
TEXT_SUFFIXES = (TEXT, "text", "caption", "captions", "cap")
ARROW, FILES = ".arrow", "files"
# Images that `prepare` refuses, each with the reason, unless there is another one.
UNSUPPORTED = ("avif", "heic", "heif", "jxl", "jp2", "tif", "tiff", "svg")
IMG2DATASET = {"key", "status", "error_message"}  # columns of its tables
BATCH = 16  # rows of a parquet file that are in memory at once, with their images
BUFFER = 2**20  # bytes of a column that are read at once
# Words are runs of ASCII letters: `train-00000-of-00002` has `train` and `of`.
_WORD = re.compile(r"[a-z]+")
Find = Callable[[Row], tuple[str, Path]]  # id and file of a row's image
Member = tuple[str, int, int]  # suffix, offset and size of a file in a tar


@dataclass(frozen=True, kw_only=True)
class HuggingFaceParams(SplitsParams):
    """Keys of the format hf."""

    image_column: str = ""  # the column, or in tars the suffix, of the image; empty: the only one
    caption_column: str = ""  # the column, or in tars the suffix or JSON key, of the caption or captions


@fills(
    "captions",
    way_to_get="get it with `hf download OWNER/NAME --repo-type dataset --local-dir {root}`, or name a dataset of "
    "the Hub with `vlp use --set data.{name}.root=hf://OWNER/NAME`",
    check_root=check_pinned,
    pin_root=pin,
)
def read(name: str, params: HuggingFaceParams, base: Path) -> Tables:
    """Read a folder of parquet files, of tars, or of images with their metadata.

    `params.limit` keeps the first rows of each split; if no row names a split, of the dataset.

    Raises:
        DataError: the dataset cannot be downloaded (`download.download`), the folder has none of these, a file is
            damaged or its path is not UTF-8, columns are missing or could be several, or a tar has links or paths that
            lead out of it.
    """
    if params.is_remote:
        root = download(name, params.root)
    else:
        root = require_directory(base, params.root, "name the folder of a Hugging Face dataset")
    layout, used, incomplete = _find_files(root)
    for path in used:
        if not is_utf8(str(path.relative_to(root))):
            raise DataError(f"{printable(str(path))}: the name of the file or of a folder is not UTF-8; rename it")
    # one split in all names does not divide the rows
    named = {_split_of(path.relative_to(root).as_posix()) for path in used}

    def write(tables: Tables, mentions: TableWriter) -> None:
        reader = _Reader(name, params, root, tables, mentions, split_by_files=len(named) > 1 or bool(params.splits))
        read = {
            PARQUET: reader.read_parquet,
            ARROW: reader.read_arrow,
            TAR: reader.read_tar,
            METADATA[0]: reader.read_metadata,
            FILES: reader.read_folder,
        }[layout]
        for path in used:
            read(path)
        if incomplete:
            tables.skipped["shards of img2dataset without their images"] += incomplete

    return join_mentions(name, params, write)


def _find_files(root: Path) -> tuple[str, list[Path], int]:
    """Return the layout of a folder, its files in order, and the number of img2dataset's shards without images.

    The other files are not kept: an imagefolder may have a million images.
    """
    paths: dict[str, list[Path]] = {PARQUET: [], ARROW: [], TAR: [], METADATA[0]: []}
    with_images, with_texts = set[Path](), set[Path]()  # folders
    suffixes = set[str]()
    for path in root.rglob("*"):
        # Metadata is known by its name, the other layouts by their suffix.
        layout = METADATA[0] if path.stem == "metadata" and path.suffix in (".jsonl", ".csv", PARQUET) else path.suffix
        # hidden: the Hub's cache and git
        if is_hidden(path.relative_to(root)) or not path.is_file():
            continue
        if layout in paths:
            paths[layout].append(path)
            continue
        suffixes.add(path.suffix or path.name)
        kind = path.suffix[1:].lower()
        if kind in (*SUFFIXES, *UNSUPPORTED):
            with_images.add(path.parent)
        elif kind in (*TEXT_SUFFIXES, JSON):
            with_texts.add(path.parent)
    # `datasets` keeps results of `map` next to the data
    paths[ARROW] = [path for path in paths[ARROW] if not path.name.startswith("cache-")]
    paths[FILES] = list(with_images & with_texts)
    incomplete = 0
    if paths[PARQUET] and _is_url_table(min(paths[PARQUET])):
        tables, paths[PARQUET] = paths[PARQUET], []
        incomplete = sum(not path.with_suffix(TAR).exists() and not path.with_suffix("").is_dir() for path in tables)
        if not paths[TAR] and not paths[FILES]:
            raise DataError(
                f"{root}: img2dataset's tables of URLs without images; run it with `--output_format webdataset`, or "
                "copy the tars or folders that it wrote next to them"
            )
    for layout, files in paths.items():
        if files:
            return layout, sorted(files), incomplete
    packed = f"; unpack {', '.join(sorted(suffixes & set(PACKED)))}" if suffixes & set(PACKED) else ""
    lists = "; write a JSON list of rows as metadata.jsonl: `jq -c '.[]' FILE`" if ".json" in suffixes else ""
    listed = ", ".join(sorted(suffixes)) or "nothing"
    raise DataError(
        f"{root}: no {PARQUET}, no {TAR} and no {' or '.join(METADATA)}; found {listed}, and no images next to texts "
        f"of the same name{packed}{lists}"
    )


def _is_url_table(path: Path) -> bool:
    """Return whether a parquet file is img2dataset's table of the files in a tar or folder."""
    with readable(path, "a parquet file"):
        schema = pq.read_schema(path)
    return set(schema.names) >= IMG2DATASET and not any(_is_image(field.type) for field in schema)


class _Reader:
    """Writes a mention for each caption of each row."""

    def __init__(
        self,
        name: str,
        params: HuggingFaceParams,
        root: Path,
        tables: Tables,
        mentions: TableWriter,
        *,
        split_by_files: bool,
    ) -> None:
        self.name, self.params, self.root, self.tables, self.mentions = name, params, root, tables, mentions
        self._split_by_files = split_by_files
        self._splits = {standard_split(split) for split in params.splits}
        self._caption = ""  # column of JSON records: that of the first one
        self._rows: Counter[str] = Counter()  # split -> rows taken

    def _is_full(self, split: str) -> bool:
        return bool(self.params.limit) and self._rows[split] >= self.params.limit

    def read_parquet(self, path: Path) -> None:
        # By default Arrow keeps all that it has read, and reads a whole column of a row group at once.
        with readable(path, "a parquet file"), pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as file:
            self._read_table(path, file.schema_arrow, lambda columns: file.iter_batches(BATCH, columns=columns))

    def read_arrow(self, path: Path) -> None:
        with readable(path, "an Arrow stream"), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            self._read_table(path, stream.schema, lambda columns: (batch.select(columns) for batch in stream))

    def _read_table(self, path: Path, schema: pa.Schema, read: Callable[[list[str]], Iterator[pa.RecordBatch]]) -> None:
        # candidates by type; an option in params.yaml may name another column
        images = [field.name for field in schema if _is_image(field.type)]
        texts = [field.name for field in schema if _is_text(field.type) and field.name not in OPTIONAL]
        image = self._choose("image", path, images, schema.names)
        caption = self._choose("caption", path, texts, schema.names)
        is_img2dataset = set(schema.names) >= IMG2DATASET
        columns = [image, caption, *(key for key in OPTIONAL if key in schema.names), *(["status"] * is_img2dataset)]
        number = -1
        for batch in read(columns):
            for row_in_batch in range(len(batch)):  # one at a time: a row in Python is another copy of its image
                (row,) = batch.slice(row_in_batch, 1).to_pylist()
                number += 1
                if is_img2dataset and row.pop("status") != "success":
                    self.tables.skipped["rows that img2dataset could not download"] += 1
                elif not self._add(path, number, row, caption, lambda row: self._extract(row[image])):
                    return

    def read_metadata(self, path: Path) -> None:
        column = self.params.image_column or FILE_NAME
        records: Iterator[tuple[str, Row]]
        if path.suffix == PARQUET:
            with readable(path, "a parquet file"):
                rows = pq.read_table(path).to_pylist()
            records = ((f"{path.name}:{number}", row) for number, row in enumerate(rows))
        elif path.suffix == ".csv":
            named = (self.params.caption_column,) if self.params.caption_column else CAPTIONS
            # no column is a typo: datasets of others may have a `language`, or any other name
            records = read_csv(path, self.tables, "captions", (column,), (*named, *OPTIONAL), refuse_typos=False)
        else:
            records = read_lines(path, self.tables, "captions", "metadata of images, one object per line")
        for provenance, row in records:
            if not self._caption:
                texts = [key for key in _texts(row) if key != column]
                self._caption = self._choose("caption", path, texts, list(row))
            number = provenance.rpartition(":")[2]
            if not self._add(path, number, row, self._caption, lambda row: self._locate(path, row, column)):
                break
        self.tables.ignored.discard(self._caption)

    def read_tar(self, path: Path) -> None:
        with path.open("rb") as file:
            for number, (key, members) in enumerate(self._index_tar(path).items()):
                files: dict[str, list[bytes | None]] = {}
                for suffix, offset, size in members:
                    # of a repeated file only the first content is read
                    several = files.setdefault(suffix, [])
                    content = None
                    if not several and self._limit_of(suffix) is not None:
                        file.seek(offset)
                        content = file.read(size)
                    several.append(content)
                if not self._add_record(path, number, key, files, lambda suffix: self._extract(files[suffix][0])):  # noqa: B023
                    return

    def read_folder(self, folder: Path) -> None:
        """Read images that are next to texts of the same name; the images stay where they are."""
        keys: dict[str, dict[str, Path]] = {}
        for path in sorted(folder.iterdir()):
            base, _, suffix = path.name.partition(".")
            if base and path.is_file():
                keys.setdefault(base, {})[suffix.lower()] = path
        for number, (key, paths) in enumerate(keys.items()):
            files: dict[str, list[bytes | None]] = {}
            for suffix, path in paths.items():
                # JSON and texts; the content of an image is not needed
                limit = MAX_TEXT[JSON] if self._is_text(suffix) else 0
                with path.open("rb") as file:
                    files[suffix] = [file.read(limit)]

            def find(suffix: str, paths: Mapping[str, Path] = paths) -> tuple[str, Path]:
                return paths[suffix].relative_to(self.root).as_posix(), paths[suffix]

            if not self._add_record(folder, number, key, files, find):
                return

    def _add_record(
        self,
        path: Path,
        number: int,
        key: str,
        files: Mapping[str, Sequence[bytes | None]],
        find: Callable[[str], tuple[str, Path]],
    ) -> bool:
        """Write the mentions of the files of one key; `find` returns id and file of the image with a suffix."""
        provenance = f"{path.relative_to(self.root).as_posix()}:{number}"
        with self.tables.record("captions", provenance, join_id(self.name, provenance)):
            image, row = self._parts_of(f"{path}, {key}", key, files)
            if not self._caption:
                texts = [TEXT] if TEXT in row else _texts(row)
                self._caption = self._choose("caption", f"{path}, {key}", texts, list(row))
            text = row.get(self._caption)
            if self._caption in files and isinstance(text, str) and not is_utf8(text):
                where = "in the tar" if path.suffix == TAR else f"in {path}"
                raise RecordError(f"{key}.{self._caption} {where} is not UTF-8: {text!r:.60}", rule="text_utf8")
            return self._add(path, number, row, self._caption, lambda row: find(image))
        return True

    def _is_text(self, suffix: str) -> bool:
        return suffix == self.params.caption_column or suffix.rpartition(".")[2] in (*TEXT_SUFFIXES, JSON)

    def _limit_of(self, suffix: str) -> int | None:
        """Return how many bytes a file with this suffix may have; None for those that are not read."""
        if suffix in (*SUFFIXES, *UNSUPPORTED, self.params.image_column):
            return MAX_BYTES
        return MAX_TEXT.get(suffix.rpartition(".")[2], MAX_TEXT[TEXT]) if self._is_text(suffix) else None

    def _index_tar(self, path: Path) -> dict[str, list[Member]]:
        """Return the files of each key, in the order of the first ones: writers differ in how they order the others."""
        index: dict[str, list[Member]] = {}
        for key, suffix, info in members(path):
            limit = self._limit_of(suffix)
            if limit is not None and info.size > limit:
                raise DataError(f"{path}: {info.name!r:.80} has {info.size:,} bytes; .{suffix} may have {limit:,}")
            index.setdefault(key, []).append((suffix, info.offset_data, info.size))
        return index

    def _parts_of(self, where: str, key: str, files: Mapping[str, Sequence[bytes | None]]) -> tuple[str, Row]:
        """Return the suffix of the image of the files of one key, and the fields of their JSON and texts.

        Args:
            files: by suffix; of files with the same name only the first has its content.
        """
        contents, row = {suffix: several[0] for suffix, several in files.items()}, Row()
        listed = ", ".join(f".{suffix}" for suffix in files)
        # The fields of KEY.json and the texts are one row; a list of captions may be alone in the JSON.
        for suffix in sorted(filter(self._is_text, contents), key=lambda suffix: not suffix.endswith(JSON)):
            if not suffix.endswith(JSON):
                row[suffix] = (contents[suffix] or b"").decode("utf-8-sig", "surrogateescape")
            elif isinstance(record := _parse(contents[suffix]), dict):
                row |= record
            elif isinstance(record, list):
                row[suffix] = record
        column = self.params.image_column
        images = [suffix for suffix in contents if suffix in ((column,) if column else SUFFIXES)]
        images = images or [suffix for suffix in contents if suffix in UNSUPPORTED]
        if twice := [suffix for suffix, several in files.items() if len(several) > 1]:
            raise RecordError(f"{len(files[twice[0]])} files with the key {key} and the suffix .{twice[0]}")
        if not images or not row:
            missing, kind = ("no caption (.txt or .json)", "caption") if images else ("no image", "image")
            others = [suffix for suffix in files if self._limit_of(suffix) is None]
            option = f"; `data.{self.name}.{kind}_column` may name another suffix" if others else ""
            raise RecordError(f"{missing} with the key {key}; it has {listed}{option}")
        return self._choose("image", where, images, list(contents)), row

    def _choose(self, kind: str, where: object, candidates: Sequence[str], columns: Sequence[str]) -> str:
        """Return the column that params.yaml names, or the only candidate; a DataError names the columns."""
        option = f"data.{self.name}.{kind}_column"
        named = self.params.image_column if kind == "image" else self.params.caption_column
        listed = ", ".join(columns) or "none"
        if named:
            if named not in columns:
                raise DataError(f"{where}: no column `{named}` (`{option}`); it has: {listed}")
            return named
        # of several columns with texts, the one with a usual name is the caption
        usual = [name for name in candidates if name.lower() in CAPTIONS] if kind == "caption" else []
        if len(usual) == 1:
            return usual[0]
        if len(candidates) == 1:
            return candidates[0]
        reason = f"{len(candidates)} could be: {', '.join(candidates)}" if candidates else f"it has: {listed}"
        way_out = f"set `{option}` in params.yaml"
        if kind == "image" and not candidates and (urls := [name for name in columns if "url" in name.lower()]):
            way_out = (
                f"`{urls[0]}` has addresses: download the images, for example with img2dataset, and name its output"
            )
        raise DataError(f"{where}: which column is the {kind}? {reason}; {way_out}")

    def _extract(self, value: Any) -> tuple[str, Path]:
        """Return id and file of an image that is inside another file."""
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            path = value.get("path") if isinstance(value, dict) else None
            reason = f"only the path {path!r}, not the image" if path else "no image"
            raise RecordError(f"the row has {reason}", rule="image_present")
        file = self.tables.extract(content)
        return file.stem, file

    def _locate(self, metadata: Path, row: Row, column: str) -> tuple[str, Path]:
        """Return id and file of an image that the metadata names, relative to their folder."""
        image = read_image_name(row, column)
        # ids are paths from the root: metadata in several folders may name equal files
        folder = metadata.parent.relative_to(self.root).as_posix()
        key = posixpath.normpath(posixpath.join(folder, image.replace("\\", "/")))
        # a local folder stays where it is; the Hub's cache may be deleted
        if not self.params.is_remote:
            return key, Path(os.path.normpath(metadata.parent / image))
        file = self.root / key
        # a dataset of others must not read files of this machine
        if key.startswith(("../", "/")):
            raise RecordError(f"`{column}` leads out of the dataset: {image!r}", rule="image_inside")
        if not file.is_file():
            raise RecordError(f"no such file in {self.params.root}: {key}", rule="image_present")
        with file.open("rb") as content:
            return key, self.tables.extract(content.read(MAX_BYTES + 1))

    def _add(self, path: Path, number: int | str, row: Row, caption: str, find: Find) -> bool:
        """Write the mentions of one row; `find` returns id and file of its image.

        Returns:
            False if `limit` allows no further row of the file: the split of its name is full, or all splits are.
        """
        relative = path.relative_to(self.root).as_posix()
        provenance = f"{relative}:{number}"
        with self.tables.record("captions", provenance, join_id(self.name, provenance)):
            if caption not in row:
                raise RecordError(f"no `{caption}`; it has {', '.join(row)}")
            texts = row[caption]
            several = texts if isinstance(texts, list) else [texts]
            if not several:
                raise RecordError(f"`{caption}` is an empty list")
            # the column `split` wins over the file's name
            split, is_named = read_split(row), row.get("split") is not None
            if not is_named and self._split_by_files:
                split = _split_of(relative)
            if self._splits and split not in self._splits:
                self.tables.skipped["rows of splits that `splits` does not name"] += 1
                return True
            # a file with a column `split` may have rows of other splits behind it
            if self._is_full(split):
                return is_named and not all(self._is_full(name) for name in self._splits or SPLITS)
            self._rows[split] += 1
            # one mention per caption of the image
            key, file = find(row)
            shared = {
                "key": key,
                "split": split,
                "together": read_group(row),
                "language": read_language(row),
                "path": str(file),
                "provenance": provenance,
            }
            for number_in_row, text in enumerate(several):
                suffix = f"#{number_in_row}" if isinstance(texts, list) else ""
                caption_id = join_id(self.name, provenance + suffix)
                with self.tables.record("captions", provenance, caption_id):
                    text = get_sentence({caption: text}, caption)
                    about = {"number": len(self.mentions) + 1, "caption_id": caption_id, "text": text}
                    self.mentions.append(shared | about)
        return True


def _parse(content: bytes | None) -> Any:
    try:
        return json.loads(content) if content else None
    except (ValueError, RecursionError):
        return None


def _texts(row: Row) -> list[str]:
    """Return the fields of a JSON record that may be captions."""
    return [key for key, value in row.items() if isinstance(value, str | list) and key not in OPTIONAL]


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _is_binary(field.type) for field in kind)
    return _is_binary(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _split_of(relative: str) -> str:
    """Return the split that a file's name, or else a folder's, has as a word; empty if none does.

    `data/train-00000-of-00002.parquet` is train, and so is `train/00000.tar`.
    """
    # the file's name before its folders
    for part in reversed(PurePosixPath(relative).parts):
        for word in _WORD.findall(part.lower()):
            if (split := standard_split(word)) in SPLITS:
                return split
    return ""
