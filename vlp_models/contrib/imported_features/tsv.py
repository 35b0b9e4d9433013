"""`features.source: tsv`: one line per image, as bottom-up attention writes them.

Arrays are base64 of raw numbers, the line has no header. The number of columns distinguishes three layouts: the
original's (Anderson et al., 2018), the same with class probabilities (ViLBERT), and LXMERT's, whose class numbers do
not count the background.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vlp_models.common.io import HEAD, explain_not_text, stat_file
from vlp_models.common.progress import progress_bar
from vlp_models.contrib.imported_features.source import (
    ImportedSource,
    Record,
    RecordError,
    check_record,
    features_path,
)
from vlp_models.errors import DataError
from vlp_models.vision.region_source import SourceRequest

_BOTTOM_UP = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
LAYOUTS = {
    6: _BOTTOM_UP,
    7: (*_BOTTOM_UP, "cls_prob"),
    10: (
        *("img_id", "image_h", "image_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
        *("num_boxes", "boxes", "features"),
    ),
}
CLASSES = 1601  # Visual Genome's, as in all these files, including the background
MAX_LINE = 64 * 2**20  # bytes; 100 regions of 2048 features and 1601 probabilities take 2 MB


def open_tsv(request: SourceRequest) -> ImportedSource:
    """Open a TSV file, or a directory of files with `.tsv` in their names (`karpathy_train.tsv.0`, ...).

    Raises:
        ParamsError: no `features.path`.
        DataError: no such file, no readable record, or other files than those of `request.origin`.
    """
    path = features_path(request)
    paths = sorted(p for p in path.glob("*.tsv*") if p.is_file()) if path.is_dir() else [path]
    if not paths or not all(p.is_file() for p in paths):
        raise DataError(f"{path}: no TSV of region features; set features.path to the file or its directory")
    return ImportedSource(TsvFile(paths), request)


class TsvFile:
    """Random access by id. Opening reads every line once, to index the ids and to hash the content."""

    def __init__(self, paths: list[Path]) -> None:
        self.stamps = {path: stat_file(path.stat()) for path in paths}
        self._digest = hashlib.sha256(b"tsv")
        self.paths: dict[str, Path] = {}
        self._lines: dict[str, tuple[int, int]] = {}  # id -> line number, offset
        # further records of an id, as of a file that was resumed or joined
        self._others: dict[str, list[tuple[Path, tuple[int, int]]]] = {}
        megabytes = sum(path.stat().st_size for path in paths) >> 20
        with progress_bar("indexing features", megabytes, "MB") as bar:
            for path in paths:
                with path.open("rb") as file:
                    reason = explain_not_text(file.read(HEAD), str(path))
                if reason:
                    raise DataError(f"{path}: {reason} (a TSV of region features)")
                indexed = 0  # megabytes of this file
                # Name and size first: so two files never hash as one that holds the lines of both.
                self._digest.update(f"{path.name}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
                for number, offset, line in _tsv_lines(path):
                    key = line.split(b"\t", 1)[0].decode("utf-8", "replace")
                    if key not in self.paths:
                        self.paths[key], self._lines[key] = path, (number, offset)
                    else:
                        self._others.setdefault(key, []).append((path, (number, offset)))
                    self._digest.update(line)
                    bar.advance(by=(offset >> 20) - indexed)
                    indexed = offset >> 20

    def hash_contents(self) -> str:
        return self._digest.hexdigest()

    def where(self, key: str) -> str:
        return f"{self.paths[key].name}:{self._lines[key][0]}"

    def read(self, key: str) -> Record:
        """Return the first record of an id that is intact; raises the error of the first if none is."""
        error: RecordError | None = None
        first = self.paths[key], self._lines[key]
        for path, line in (first, *self._others.get(key, ())):
            try:
                record = self._read_line(path, *line)
            except RecordError as problem:
                error = error or problem
            else:
                # The next read, and messages, begin with it.
                self.paths[key], self._lines[key] = path, line
                return record
        assert error is not None
        raise error

    def _read_line(self, path: Path, number: int, offset: int) -> Record:
        with path.open("rb") as file:
            file.seek(offset)
            line = file.readline(MAX_LINE)
        where = f"{path.name}:{number}"
        try:
            return check_record(_parse_tsv_line(line.decode("ascii").rstrip("\r\n").split("\t")))
        except UnicodeDecodeError as error:
            reason = f"byte {error.start + 1} of the line is not ASCII; the file is damaged or not a features TSV"
            raise RecordError(f"{where}: {reason}") from None
        except RecordError as error:
            raise RecordError(f"{where}: {error}") from None


def _tsv_lines(path: Path) -> Iterable[tuple[int, int, bytes]]:
    """Yield line number, offset and content."""
    with path.open("rb") as file:
        number = offset = 0
        while line := file.readline(MAX_LINE):
            number += 1
            # readline stops at the limit, so a full buffer means a longer line.
            if len(line) == MAX_LINE:
                raise DataError(f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB; not a features TSV")
            yield number, offset, line
            offset += len(line)


def _parse_tsv_line(cells: list[str]) -> Record:
    if len(cells) not in LAYOUTS:
        raise RecordError(f"{len(cells)} columns; known layouts have {', '.join(map(str, LAYOUTS))}")
    row = dict(zip(LAYOUTS[len(cells)], cells, strict=True))
    try:
        count, width, height = int(row["num_boxes"]), float(row["image_w"]), float(row["image_h"])
    except ValueError as error:
        raise RecordError(f"not a number: {error}") from None
    class_probs = scores = None
    if "cls_prob" in row:
        class_probs = _decode_array(row, "cls_prob", count, np.float32)
        # A region's confidence is its highest probability of a class; column 0 is the background.
        scores = class_probs[:, 1:].max(axis=1, initial=0)
    elif "objects_id" in row:
        # LXMERT's class numbers do not count the background. One-hot rows, times the confidence: [N, C]
        classes = _decode_array(row, "objects_id", count, np.int64)[:, 0] + 1
        scores = _decode_array(row, "objects_conf", count, np.float32)[:, 0]
        if count and not (classes.min() >= 1 and classes.max() < CLASSES):
            raise RecordError(f"objects_id beyond {CLASSES - 1} classes")
        class_probs = np.zeros((count, CLASSES), np.float32)
        class_probs[np.arange(count), classes] = scores
    return Record(
        features=_decode_array(row, "features", count, np.float32),
        boxes=_decode_array(row, "boxes", count, np.float32),
        width=width,
        height=height,
        class_probs=class_probs,
        scores=scores,
    )


def _decode_array(row: dict[str, str], name: str, count: int, dtype: type[np.generic]) -> np.ndarray:
    """Return [count, k] from base64."""
    try:
        data = base64.b64decode(row[name], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{name}: broken base64: {error}") from None
    size = np.dtype(dtype).itemsize
    if count < 1 or len(data) == 0 or len(data) % (size * count):
        raise RecordError(f"{name}: {len(data)} bytes are not {count} rows of {np.dtype(dtype).name}")
    # (count * k,) -> (count, k): the number of columns follows from the length.
    return np.frombuffer(data, dtype).reshape(count, -1)
