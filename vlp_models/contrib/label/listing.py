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

    @property
    def values(self) -> dict[str, str]:
        """Return the columns of the label's row."""
        return {"image": self.image, "caption": self.caption, **dict(zip(LABELED, self.provenance, strict=True))}

    @property
    def provenance(self) -> tuple[str, str, str]:
        return self.by, self.at, self.draft


class Listing:
    """A CSV, TSV or JSON lines file of pairs; it is created with the first label.

    Args:
        lock: a lock file outside the dataset, which DVC may track as a whole.
        split: of labels, if the rows name splits.
        language: of labels; empty: they name none.

    Raises:
        DataError: the file is not a listing that can be extended.
    """

    def __init__(self, path: Path, lock: Path, rules: ValidateParams, *, split: str = "train", language: str = ""):
        if path.suffix.lower() not in (*DELIMITERS, *JSON_LINES):
            raise DataError(f"{path}: labels are written to {', '.join((*DELIMITERS, *JSON_LINES))}")
        self.path, self.split = path, split
        self._lock_file, self._language = lock, language
        self._rules = caption_rules(rules)
        self._thread_lock = threading.RLock()
        self._state: tuple[int, ...] = ()
        self._captions: dict[str, list[str]] = {}
        self._names_splits = False
        self.captions()

    @property
    def names_splits(self) -> bool:
        """Return whether the rows name splits, so that labels are of `split`."""
        self.captions()
        return self._names_splits

    def captions(self) -> Mapping[str, Sequence[str]]:
        """Return image -> its captions, also those that another process has added since.

        Raises:
            DataError: the file lacks the columns `image` and `caption`.
        """
        with self._thread_lock:
            state = stat_file(self.path.stat()) if self.path.exists() else ()
            if state != self._state:
                captions: dict[str, list[str]] = {}
                named = False
                # An empty file has no header yet.
                is_empty = not state or self.path.stat().st_size == 0
                for _, row in () if is_empty else read_pairs(self.path, Tables(directory=None)):
                    named = named or bool(row.get("split"))
                    try:
                        captions.setdefault(image_key(read_image_name(row)), []).append(get_sentence(row, "caption"))
                    except RecordError:  # `validate` reports it
                        continue
                self._captions, self._names_splits, self._state = captions, named, state
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
            if any(caption_key(label.caption) == caption_key(other) for other in self._captions.get(label.image, ())):
                return False
            newline = _line_end(text)
            if text.strip(BOM).strip():
                text += "" if text.endswith(("\n", "\r")) else newline
                text = self._with_columns(text, newline)
            else:
                text += "" if self._is_json else self._format([*NEEDED, *self._columns], ",", newline)
            self._replace(text + self._row(text, label, newline), label.image, label.caption)
            return True

    def remove(self, label: Label) -> bool:
        """Remove a label that `add` wrote; return False if its row is no longer in the file."""
        with self._writing() as text:
            newline = _line_end(text)
            row = self._row(text, label, newline)
            before, match, after = text.rpartition(newline + row)
            if not match:
                return False
            self._replace(before + newline + after)
            return True

    @contextmanager
    def _writing(self) -> Iterator[str]:
        """Yield the file's text while no other thread or process writes it; `_captions` is that of the text."""
        # One thread at a time waits for the file lock, which excludes processes.
        with self._thread_lock, file_lock(self._lock_file, "`vlp label`", wait=WAIT):
            self.captions()
            # From bytes: line ends stay as they are.
            yield self.path.read_bytes().decode("utf-8", "surrogateescape") if self.path.exists() else ""

    def _replace(self, text: str, image: str = "", caption: str = "") -> None:
        """Write the file. image, caption: the row that was added; without one, the file is read again."""
        target = self.path
        # A link into DVC's cache is replaced by a file; another link of the user's stays, and its target is replaced.
        if target.is_symlink() and not target.resolve().is_relative_to(dvc_files(Path.cwd()).resolve()):
            target = target.resolve()
        with atomic_write(target, sync=True) as temporary:
            temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
        if image:
            # Reading 100,000 rows takes seconds. A new dictionary, since readers may iterate over the old one.
            self._captions = {**self._captions, image: [*self._captions.get(image, ()), caption]}
            self._state = stat_file(self.path.stat())
        self.captions()

    # ---- Rows ----------------------------------------------------------------------------------------------------

    @property
    def _is_json(self) -> bool:
        return self.path.suffix.lower() in JSON_LINES

    @property
    def _columns(self) -> tuple[str, ...]:
        """Return the columns of labels besides those that every listing has."""
        return (*LABELED, "lang") if self._language else LABELED

    def _delimiter(self, text: str) -> str:
        return delimiter_of(_first_line(text), NEEDED, DELIMITERS[self.path.suffix.lower()])

    def _row(self, text: str, label: Label, newline: str) -> str:
        """Return the text of a label's row in the listing `text`, which has its columns."""
        values = label.values
        if self._language:
            values["lang"] = self._language
        if self._names_splits:
            values["split"] = self.split
        if self._is_json:
            return json.dumps(values, ensure_ascii=False) + newline
        delimiter = self._delimiter(text)
        header = next(csv.reader([_first_line(text)], delimiter=delimiter), [])
        # The reader ignores the case of names and white space around them.
        return self._format([values.get(name.strip().lower(), "") for name in header], delimiter, newline)

    def _with_columns(self, text: str, newline: str) -> str:
        """Return the listing with the columns of labels, empty in the rows that are there."""
        delimiter = "," if self._is_json else self._delimiter(text)
        header = next(csv.reader([_first_line(text)], delimiter=delimiter), [])
        missing = [name for name in self._columns if name not in [column.strip().lower() for column in header]]
        if self._is_json or not missing:
            return text
        rows = csv.reader(io.StringIO(text.removeprefix(BOM), newline=""), delimiter=delimiter, strict=True)
        extended = [BOM if text.startswith(BOM) else ""]
        try:
            for row in rows:
                if row and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, the header has {len(header)}")
                cells = missing if row == header else [""] * len(missing)
                extended.append(self._format([*row, *cells], delimiter, newline) if row else newline)
        except csv.Error as error:
            raise DataError(
                f"{self.path}:{rows.line_num}: {error}; fix this line first: the first label adds the columns "
                f"{', '.join(missing)} to each row"
            ) from None
        return "".join(extended)

    @staticmethod
    def _format(cells: Sequence[str], delimiter: str, newline: str) -> str:
        buffer = io.StringIO(newline="")
        csv.writer(buffer, delimiter=delimiter, lineterminator=newline).writerow(cells)
        return buffer.getvalue()


def _first_line(text: str) -> str:
    return text.removeprefix(BOM).partition("\n")[0].removesuffix("\r")


def _line_end(text: str) -> str:
    return "\r\n" if text.partition("\n")[0].endswith("\r") else "\n"


def image_key(image: str) -> str:
    """Return an image's path as in its id: `./a.jpg` and `a.jpg` are one image, and so are `x\\a.jpg` and `x/a.jpg`."""
    return posixpath.normpath(image.replace("\\", "/"))
