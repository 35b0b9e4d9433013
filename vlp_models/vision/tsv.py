"""Bottom-up-attention features as TSV: arrays are base64 of raw numbers, the line has no header.

Three column orders are told apart by their number: the original's (Anderson et al., 2018), the same with class
probabilities (ViLBERT), and LXMERT's, whose class numbers do not count the background.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vlp_models.common.progress import progress_bar
from vlp_models.errors import DataError
from vlp_models.vision.imported import ImportedSource, Order, Record, RecordError, import_id

_BOTTOM_UP = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
LAYOUTS = {
    6: _BOTTOM_UP,
    7: (*_BOTTOM_UP, "cls_prob"),
    10: (
        *("img_id", "image_h", "image_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"),
        *("num_boxes", "boxes", "features"),
    ),
}
CLASSES = 1601  # Visual Genome's, as all these files have them, background included
MAX_LINE = 64 * 2**20  # bytes; 100 regions of 2048 features and 1601 probabilities take 2 MB


class TsvFile:
    """Random access by id. Opening reads every line once to find where the ids are."""

    def __init__(self, paths: list[Path]) -> None:
        self._places: dict[str, tuple[Path, int, int]] = {}  # id -> file, line number, offset
        megabytes = sum(path.stat().st_size for path in paths) >> 20
        with progress_bar("finding ids", megabytes, "MB") as bar:
            for path in paths:
                before = 0
                for number, offset, line in _lines(path):
                    self._places.setdefault(line.split(b"\t", 1)[0].decode("utf-8", "replace"), (path, number, offset))
                    bar.advance(by=(offset >> 20) - before)
                    before = offset >> 20

    def keys(self) -> Iterable[str]:
        return self._places

    def where(self, key: str) -> str:
        path, number, _ = self._places[key]
        return f"{path.name}:{number}"

    def read(self, key: str) -> Record:
        path, number, offset = self._places[key]
        with path.open("rb") as file:
            file.seek(offset)
            line = file.readline(MAX_LINE)
        try:
            return _record(line.decode("ascii").rstrip("\r\n").split("\t"))
        except (RecordError, UnicodeDecodeError) as error:
            raise RecordError(f"{path.name}:{number}: {error}") from None


def open_tsv(path: Path, max_regions: int, order: Order = "file") -> ImportedSource:
    """A file, or a directory of files whose names hold `.tsv` (`karpathy_train.tsv.0`, ...).

    Raises:
        DataError: no such file, or no readable record.
    """
    paths = sorted(p for p in path.glob("*.tsv*") if p.is_file()) if path.is_dir() else [path]
    if not paths or not all(p.is_file() for p in paths):
        raise DataError(f"{path}: no TSV of region features; set features.path to the file or its directory")
    return ImportedSource(TsvFile(paths), path, import_id("tsv", paths), max_regions, order)


def _lines(path: Path) -> Iterable[tuple[int, int, bytes]]:
    with path.open("rb") as file:
        number = offset = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE:
                raise DataError(f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB; not a features TSV")
            yield number, offset, line
            offset += len(line)


def _record(cells: list[str]) -> Record:
    if len(cells) not in LAYOUTS:
        raise RecordError(f"{len(cells)} columns; known layouts have {', '.join(map(str, LAYOUTS))}")
    row = dict(zip(LAYOUTS[len(cells)], cells, strict=True))
    try:
        count, width, height = int(row["num_boxes"]), float(row["image_w"]), float(row["image_h"])
    except ValueError as error:
        raise RecordError(f"not a number: {error}") from None
    class_probs = scores = None
    if "cls_prob" in row:
        class_probs = _array(row, "cls_prob", count, np.float32)
        scores = class_probs[:, 1:].max(axis=1, initial=0)
    elif "objects_id" in row:
        names = _array(row, "objects_id", count, np.int64)[:, 0] + 1
        scores = _array(row, "objects_conf", count, np.float32)[:, 0]
        if count and not (names.min() >= 1 and names.max() < CLASSES):
            raise RecordError(f"objects_id beyond {CLASSES - 1} classes")
        class_probs = np.zeros((count, CLASSES), np.float32)
        class_probs[np.arange(count), names] = scores
    return Record(
        features=_array(row, "features", count, np.float32),
        boxes=_array(row, "boxes", count, np.float32),
        width=width,
        height=height,
        class_probs=class_probs,
        scores=scores,
    )


def _array(row: dict[str, str], name: str, count: int, dtype: type[np.generic]) -> np.ndarray:
    """[count, k] from base64."""
    try:
        data = base64.b64decode(row[name], validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{name}: broken base64: {error}") from None
    size = np.dtype(dtype).itemsize
    if count < 1 or len(data) == 0 or len(data) % (size * count):
        raise RecordError(f"{name}: {len(data)} bytes are no {count} rows of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype).reshape(count, -1)
