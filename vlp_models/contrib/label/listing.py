"""The listing of a dataset of pairs (pairs.csv), as `vlp label` extends it: each answer replaces the file atomically.

A label is one more row, and who wrote it, when and from which draft are columns of that row. So there is a single file
to write: a kill leaves the file before or after an answer, and there is no second one to reconcile. The file is always
replaced, never written in place, since DVC may have hard-linked it with its cache. Rows that are in the file stay as
they are, bytes that are not UTF-8 included.
"""

from __future__ import annotations

import csv
import io
import json
import posixpath
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vlp_models.common.io import atomic_write, stat_file
from vlp_models.common.lock import file_lock
from vlp_models.common.workspace import dvc_files
from vlp_models.curation.validation.rules import broken_rule, caption_rules
from vlp_models.curation.validation.text import caption_key
from vlp_models.data.formats.base import RecordError, Tables, get_sentence
from vlp_models.data.formats.files import delimiter_of
from vlp_models.data.formats.pairs import DELIMITERS, JSON_LINES, LABELED, NEEDED, read_image_name, read_pairs
from vlp_models.errors import DataError, VLPError
from vlp_models.params import ValidateParams

WAIT = 30.0  # seconds for another process that writes the file
BOM = "\ufeff"


class LabelError(VLPError):
    """A label that is refused, with the reason for the person who wrote it."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """One answer. image: relative to the listing; at: UTC, ISO 8601; draft: its origin and what became of it."""

    image: str
    caption: str
    by: str
    at: str
    draft: str


class _Layout(NamedTuple):
    """How rows are written, by the first line of a listing."""

    header: list[str]
    delimiter: str
    newline: str

    @property
    def names(self) -> list[str]:
        """Return the columns' names as the reader takes them: without case, and white space around them."""
        return [name.strip().lower() for name in self.header]

    def format(self, cells: Sequence[str]) -> str:
        buffer = io.StringIO(newline="")
        csv.writer(buffer, delimiter=self.delimiter, lineterminator=self.newline).writerow(cells)
        return buffer.getvalue()


class Listing:
    """A CSV, TSV or JSON lines file of pairs; it is created with the first label.

    Args:
        lock: a lock file outside the dataset, which DVC may track as a whole.
        split: of labels, if the rows name splits (`names_splits`).
        language: of labels; empty: they name none.

    Raises:
        DataError: the file is not a listing that can be extended.
    """

    def __init__(self, path: Path, lock: Path, rules: ValidateParams, *, split: str = "train", language: str = ""):
        if path.suffix.lower() not in (*DELIMITERS, *JSON_LINES):
            raise DataError(f"{path}: labels are written to {', '.join((*DELIMITERS, *JSON_LINES))}")
        self.path = path
        self._lock_file, self._split, self._language = lock, split, language
        self._is_json = path.suffix.lower() in JSON_LINES
        # the columns of labels besides those that every listing has
        self._columns = (*LABELED, "lang") if language else LABELED
        self._rules = caption_rules(rules)
        self._thread_lock = threading.RLock()
        self._state: tuple[int, ...] = ()
        self._captions: dict[str, list[str]] = {}
        self.names_splits = False
        self.captions()

    def captions(self) -> Mapping[str, Sequence[str]]:
        """Return image -> its captions, also those that another process has added since.

        Raises:
            DataError: the file lacks the columns `image` and `caption`.
        """
        with self._thread_lock:
            state = stat_file(self.path.stat()) if self.path.exists() else ()
            if state != self._state:
                self._captions, self.names_splits = {}, False
                # An empty file has no header yet.
                has_rows = state and self.path.stat().st_size
                for _, row in read_pairs(self.path, Tables(directory=None)) if has_rows else ():
                    self.names_splits = self.names_splits or bool(row.get("split"))
                    try:
                        # the path as in ids: ./a.jpg and a.jpg are one image, and so are x\\a.jpg and x/a.jpg
                        image = posixpath.normpath(read_image_name(row).replace("\\", "/"))
                        self._captions.setdefault(image, []).append(get_sentence(row, "caption"))
                    except RecordError:  # `validate` reports it
                        continue
                self._state = state
            return self._captions

    def check(self, caption: str) -> str:
        """Return the caption as it is written: white space collapsed.

        Raises:
            LabelError: `validate` would refuse it.
        """
        try:
            text = get_sentence({"caption": caption}, "caption")
        except RecordError as error:
            raise LabelError(str(error)) from None
        if not text:
            raise LabelError("The caption is empty.")
        if broken := broken_rule(text, self._rules):
            raise LabelError(f"{broken[1]}.")
        return text

    def add(self, label: Label) -> bool:
        """Write a label; return False if the image has this caption already, as after a repeated request.

        Raises:
            DataError: the file cannot be extended.
        """
        with self._writing() as text:
            captions = self._captions.get(label.image, [])
            if caption_key(label.caption) in map(caption_key, captions):
                return False
            if text.strip(BOM).strip():
                text = self._with_columns(text)
            elif not self._is_json:
                text += self._layout(text).format([*NEEDED, *self._columns])
            self._replace(text + self._row(label, self._layout(text)))
            # Reading 100,000 rows takes seconds. A new dictionary, since readers may iterate over the old one.
            self._captions = {**self._captions, label.image: [*captions, label.caption]}
            self._state = stat_file(self.path.stat())
            return True

    def remove(self, label: Label) -> bool:
        """Remove a label that `add` wrote; return False if its row is no longer in the file."""
        with self._writing() as text:
            layout = self._layout(text)
            before, match, after = text.rpartition(layout.newline + self._row(label, layout))
            if match:
                self._replace(before + layout.newline + after)
            return bool(match)

    @contextmanager
    def _writing(self) -> Iterator[str]:
        """Yield the file's text while no other thread or process writes it; `_captions` is that of the text."""
        # One thread at a time waits for the file lock, which excludes processes.
        with self._thread_lock, file_lock(self._lock_file, "`vlp label`", wait=WAIT):
            self.captions()
            # From bytes: line ends stay as they are.
            yield self.path.read_bytes().decode("utf-8", "surrogateescape") if self.path.exists() else ""

    def _replace(self, text: str) -> None:
        target = self.path
        # A link into DVC's cache is replaced by a file; another link of the user's stays, and its target is replaced.
        if target.is_symlink() and not target.resolve().is_relative_to(dvc_files(Path.cwd()).resolve()):
            target = target.resolve()
        with atomic_write(target, sync=True) as temporary:
            temporary.write_bytes(text.encode("utf-8", "surrogateescape"))

    # ---- Rows ----------------------------------------------------------------------------------------------------

    def _layout(self, text: str) -> _Layout:
        first = text.removeprefix(BOM).partition("\n")[0]
        newline = "\r\n" if first.endswith("\r") else "\n"
        delimiter = delimiter_of(first.strip(), NEEDED, DELIMITERS.get(self.path.suffix.lower(), ","))
        header = [] if self._is_json else next(csv.reader([first.removesuffix("\r")], delimiter=delimiter), [])
        return _Layout(header, delimiter, newline)

    def _row(self, label: Label, layout: _Layout) -> str:
        provenance = dict(zip(LABELED, (label.by, label.at, label.draft), strict=True))
        values = {"image": label.image, "caption": label.caption, **provenance}
        if self._language:
            values["lang"] = self._language
        if self.names_splits:
            values["split"] = self._split
        if self._is_json:
            return json.dumps(values, ensure_ascii=False) + layout.newline
        return layout.format([values.get(name, "") for name in layout.names])

    def _with_columns(self, text: str) -> str:
        """Return the listing with the columns of labels, empty in the rows that are there, and a line end."""
        layout = self._layout(text)
        if not text.endswith(("\n", "\r")):
            text += layout.newline
        missing = [name for name in self._columns if name not in layout.names]
        if self._is_json or not missing:
            return text
        lines = io.StringIO(text.removeprefix(BOM), newline="")
        rows = csv.reader(lines, delimiter=layout.delimiter, strict=True)
        extended = [BOM if text.startswith(BOM) else ""]
        try:
            for row in rows:
                if row and len(row) != len(layout.header):
                    raise csv.Error(f"{len(row)} fields, the header has {len(layout.header)}")
                # The header may be repeated, as in joined files.
                cells = missing if row == layout.header else [""] * len(missing)
                extended.append(layout.format([*row, *cells]) if row else layout.newline)
        except csv.Error as error:
            raise DataError(
                f"{self.path}:{rows.line_num}: {error}; fix this line first: the first label adds the columns "
                f"{', '.join(missing)} to each row"
            ) from None
        return "".join(extended)
