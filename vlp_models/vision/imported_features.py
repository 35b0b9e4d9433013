"""Region features from files that another detector made: TSV (bottom-up attention) or .npz (TDEN's public code).

Regions keep their class probabilities if the file has them. If it has only a class and a confidence, the row is that
confidence for that class and zero elsewhere (MOC then makes it a hard label). If it has neither, C is 0: such features
do not support masked object classification. The first regions in the file's order are kept, as in TDEN's public code;
`features.order: score` sorts them by confidence first, if the file has one (else every score is 1).
`features.min_score` does not apply.

The id of imported features is the hash of the files' content, so half an import never continues with other files of
the same names. A TSV is hashed while it is indexed; .npz files are read once more. Files that change during an import
end it.

TSV: arrays are base64 of raw numbers, the line has no header. The number of columns distinguishes three layouts: the
original's (Anderson et al., 2018), the same with class probabilities (ViLBERT), and LXMERT's, whose class numbers do
not count the background.

npz: one file per image, as TDEN's public code (xmodaler) stores regions: features, boxes, image_h, image_w, cls_prob.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from vlp_models.common.io import HEAD, explain_not_text, hash_file, stat_file
from vlp_models.common.progress import progress_bar
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError
from vlp_models.vision.region_source import BACKGROUND, Row, quarantine_row

MISSING = "features_present"  # rules of the quarantine table
UNREADABLE = "features_readable"
Order = Literal["file", "score"]
OVERHANG = 2.0  # pixels that a box may extend outside its image


class RecordError(ValueError):
    """One image's record is damaged; others may be fine."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One image's regions as stored.

    features [N, F]; boxes [N, 4] in pixels, x1 y1 x2 y2; class_probs [N, C], column 0 background; scores [N].
    """

    features: np.ndarray
    boxes: np.ndarray
    width: float
    height: float
    class_probs: np.ndarray | None = None
    scores: np.ndarray | None = None


@dataclass(frozen=True)
class Origin:
    """The files that features are imported from.

    id     hash of their names and contents
    state  hash of their names, sizes, dates and inodes: while it is the same, so are the contents
    """

    id: str
    state: str


class RecordFile(Protocol):
    """Random access to the records of a file or a directory of files."""

    stamps: dict[Path, tuple[int, ...]]  # each file's `stat_file` before it was read

    def hash_contents(self) -> str: ...

    def path_of(self, key: str) -> Path: ...

    def keys(self) -> Iterable[str]: ...

    def where(self, key: str) -> str:
        """Return file and line, for messages."""
        ...

    def read(self, key: str) -> Record:
        """Raises `RecordError`."""
        ...


# ---- The source --------------------------------------------------------------------------------------------------


class ImportedSource:
    """The `RegionSource` of a `RecordFile`.

    Args:
        order: of an image's regions, before those beyond `max_regions` are left out.
        origin: of the same files, opened by another process; their contents are not hashed again.

    Raises:
        DataError: not a single record is readable, or the files have changed since `origin`.
    """

    by_content = False
    device = "cpu"

    def __init__(
        self, file: RecordFile, path: Path, max_regions: int, order: Order = "file", origin: Origin | None = None
    ) -> None:
        # Sizes, dates and inodes are enough to find that nothing changed; a new import hashes the contents.
        stamps = sorted((p.name, *stamp) for p, stamp in file.stamps.items())
        state = hashlib.sha256(repr(stamps).encode()).hexdigest()
        if origin is not None and origin.state != state:
            raise _changed(path)
        self.origin = origin or Origin(f"import-{file.hash_contents()[:16]}", state)
        self.detector_id = self.origin.id
        self._file = file
        self._check_unchanged(file.stamps)
        self._keys = set(file.keys())
        self._max_regions = max_regions
        self._order = order
        # Its widths are those that all records must have.
        first = self._first_record(path)
        self.feature_dim = int(first.features.shape[1])
        self._columns = 0 if first.class_probs is None else int(first.class_probs.shape[1])
        self.classes: tuple[str, ...] = ()
        if self._columns:
            self.classes = (BACKGROUND, *(f"class {n}" for n in range(1, self._columns)))

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """Return regions and quarantine rows. An image with a missing or damaged record gets no regions and a row.

        Raises:
            DataError: a file has changed since it was opened.
        """
        regions, quarantine = [], []
        read = set[Path]()
        for image in images:
            key = self._key(image)
            try:
                if key is None:
                    names = ", ".join(record_names(image))
                    quarantine.append(quarantine_row(image, MISSING, f"no record named {names}", ""))
                    regions.append(self._empty())
                else:
                    read.add(self._file.path_of(key))
                    regions.append(self._arrays(self._file.read(key)))
            except RecordError as error:
                quarantine.append(quarantine_row(image, UNREADABLE, str(error), self._file.where(str(key))))
                regions.append(self._empty())
            advance(1)
        # Checked after reading, because a file may have changed in the meantime.
        self._check_unchanged(read)
        return regions, quarantine

    def _check_unchanged(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if not path.exists() or stat_file(path.stat()) != self._file.stamps[path]:
                raise _changed(path)

    def check_names(self, images: Iterable[Row]) -> None:
        """Check that each record belongs to one image.

        Raises:
            DataError: two images with different files match the same record.
        """
        # Copies of one file may share a record: they have the same regions.
        owners: dict[str, Row] = {}
        for image in images:
            key = self._key(image)
            if key is None:
                continue
            owner = owners.setdefault(key, image)
            if owner["sha256"] != image["sha256"]:
                raise DataError(
                    f"features.path: the record {key} matches both {owner['image_id']} and {image['image_id']}, which "
                    "are different files; name each record by the whole id of its image"
                )

    def _key(self, image: Row) -> str | None:
        return next((name for name in record_names(image) if name in self._keys), None)

    def _first_record(self, path: Path) -> Record:
        # Damaged records are skipped, and the first damage is named if all are.
        error: RecordError | None = None
        for key in sorted(self._keys):
            try:
                return check_record(self._file.read(key))
            except RecordError as problem:
                error = error or problem
        reason = f"the first: {error}" if error else "no records"
        raise DataError(f"{path}: no readable record of region features ({reason}); check features.path and source")

    def _arrays(self, record: Record) -> RegionArrays:
        check_record(record)
        count = len(record.features)
        probs = np.zeros((count, 0), np.float16) if record.class_probs is None else record.class_probs
        if record.features.shape[1] != self.feature_dim or probs.shape[1] != self._columns:
            raise RecordError(
                f"{record.features.shape[1]} features and {probs.shape[1]} classes per region, "
                f"but {self.feature_dim} and {self._columns} in the first record"
            )
        scores = np.ones(count, np.float32) if record.scores is None else record.scores
        order = np.argsort(-scores, kind="stable") if self._order == "score" else np.arange(count)
        # (N, 4) pixels -> fractions of the image, of the regions that are kept
        rows = order[: self._max_regions]
        size = np.array([record.width, record.height] * 2, np.float32)
        return RegionArrays(
            features=record.features[rows].astype(np.float16),
            boxes=(record.boxes[rows] / size).clip(0, 1).astype(np.float32),
            class_probs=probs[rows].astype(np.float16),
            scores=scores[rows].astype(np.float32),
        )

    def _empty(self) -> RegionArrays:
        return RegionArrays(
            features=np.zeros((0, self.feature_dim), np.float16),
            boxes=np.zeros((0, 4), np.float32),
            class_probs=np.zeros((0, self._columns), np.float16),
            scores=np.zeros(0, np.float32),
        )


def check_record(record: Record) -> Record:
    """Return the record if its shapes, numbers and boxes are valid.

    Raises:
        RecordError: they are not.
    """
    count = len(record.features)
    arrays = {"features": record.features, "boxes": record.boxes}
    if record.class_probs is not None:
        arrays["class probabilities"] = record.class_probs
    if record.scores is not None:
        arrays["scores"] = record.scores
    for name, array in arrays.items():
        if len(array) != count or array.ndim != (1 if name == "scores" else 2):
            raise RecordError(f"{name} of shape {list(array.shape)}, but features {list(record.features.shape)}")
        # Features are stored as float16.
        if not np.isfinite(array).all() or np.abs(array).max(initial=0) > np.finfo(np.float16).max:
            raise RecordError(f"{name} with a value that is not finite or too large")
    if record.boxes.shape[1] != 4 or record.width <= 0 or record.height <= 0:
        raise RecordError(f"boxes {list(record.boxes.shape)} in an image of {record.width} x {record.height}")
    # The largest number of each column; the initial 0 is for an image without regions.
    x1, y1, x2, y2 = record.boxes.max(axis=0, initial=0)
    too_far_right = max(x1, x2) > record.width + OVERHANG
    too_far_down = max(y1, y2) > record.height + OVERHANG
    if record.boxes.min(initial=0) < -OVERHANG or too_far_right or too_far_down:
        raise RecordError(f"a box outside its image of {record.width:.0f} x {record.height:.0f} pixels")
    return record


def record_names(image: Row) -> tuple[str, ...]:
    """Return the names that an image's record may have: its whole id, its id within the dataset, its file's stem."""
    image_id = str(image["image_id"])
    return tuple(dict.fromkeys((image_id, image_id.partition("/")[2], Path(str(image["path"])).stem)))


def _changed(path: Path) -> DataError:
    return DataError(f"{path}: changed while it was being imported; run the same command again")


# ---- TSV ---------------------------------------------------------------------------------------------------------

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


def open_tsv(path: Path, max_regions: int, order: Order = "file", origin: Origin | None = None) -> ImportedSource:
    """Open a TSV file, or a directory of files with `.tsv` in their names (`karpathy_train.tsv.0`, ...).

    Raises:
        DataError: no such file, no readable record, or other files than those of `origin`.
    """
    paths = sorted(p for p in path.glob("*.tsv*") if p.is_file()) if path.is_dir() else [path]
    if not paths or not all(p.is_file() for p in paths):
        raise DataError(f"{path}: no TSV of region features; set features.path to the file or its directory")
    return ImportedSource(TsvFile(paths), path, max_regions, order, origin)


class TsvFile:
    """Random access by id. Opening reads every line once, to index the ids and to hash the content."""

    def __init__(self, paths: list[Path]) -> None:
        self.stamps = {path: stat_file(path.stat()) for path in paths}
        self._digest = hashlib.sha256(b"tsv")
        self._index: dict[str, tuple[Path, int, int]] = {}  # id -> file, line number, offset
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
                    self._index.setdefault(key, (path, number, offset))  # the first record of an id counts
                    self._digest.update(line)
                    bar.advance(by=(offset >> 20) - indexed)
                    indexed = offset >> 20

    def hash_contents(self) -> str:
        return self._digest.hexdigest()

    def path_of(self, key: str) -> Path:
        return self._index[key][0]

    def keys(self) -> Iterable[str]:
        return self._index

    def where(self, key: str) -> str:
        path, number, _ = self._index[key]
        return f"{path.name}:{number}"

    def read(self, key: str) -> Record:
        path, number, offset = self._index[key]
        with path.open("rb") as file:
            file.seek(offset)
            line = file.readline(MAX_LINE)
        try:
            return _parse_tsv_line(line.decode("ascii").rstrip("\r\n").split("\t"))
        except UnicodeDecodeError as error:
            reason = f"byte {error.start + 1} of the line is not ASCII; the file is damaged or not a features TSV"
            raise RecordError(f"{path.name}:{number}: {reason}") from None
        except RecordError as error:
            raise RecordError(f"{path.name}:{number}: {error}") from None


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


# ---- npz ---------------------------------------------------------------------------------------------------------

MAX_NPZ_BYTES = 64 * 2**20  # of one image's arrays when unpacked
_NEEDED = ("features", "boxes", "image_h", "image_w")


def open_npz(path: Path, max_regions: int, order: Order = "file", origin: Origin | None = None) -> ImportedSource:
    """Open the .npz files of a directory.

    Raises:
        DataError: no such directory, no readable record, or other files than those of `origin`.
    """
    paths = sorted(path.glob("*.npz"))
    if not paths:
        raise DataError(f"{path}: no .npz files; set features.path to the directory that holds them")
    return ImportedSource(NpzDirectory(paths), path, max_regions, order, origin)


class NpzDirectory:
    """`<image id>.npz` for each image."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = {path.stem: path for path in paths}
        self.stamps = {path: stat_file(path.stat()) for path in self._paths.values()}

    def hash_contents(self) -> str:
        digest = hashlib.sha256(b"npz")
        with progress_bar("hashing features", len(self._paths), "files") as bar:
            for path in self._paths.values():
                digest.update(f"{path.name}\0{hash_file(path)}\n".encode("utf-8", "surrogateescape"))
                bar.advance()
        return digest.hexdigest()

    def path_of(self, key: str) -> Path:
        return self._paths[key]

    def keys(self) -> Iterable[str]:
        return self._paths

    def where(self, key: str) -> str:
        return self._paths[key].name

    def read(self, key: str) -> Record:
        path = self._paths[key]
        try:
            # The sizes are in the archive's directory: they are known before anything is unpacked.
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > MAX_NPZ_BYTES:
                raise RecordError(f"unpacks to {size >> 20} MiB; the limit is {MAX_NPZ_BYTES >> 20}")
            # Without pickle, which would run code from the file.
            with np.load(path, allow_pickle=False) as file:
                missing = [name for name in _NEEDED if name not in file]
                if missing:
                    raise RecordError(f"lacks {', '.join(missing)}")
                class_probs = _to_float32(file["cls_prob"]) if "cls_prob" in file else None
                return Record(
                    features=_to_float32(file["features"]),
                    boxes=_to_float32(file["boxes"]),
                    # A scalar in some files, an array of one element in others.
                    width=float(file["image_w"].reshape(-1)[0]),
                    height=float(file["image_h"].reshape(-1)[0]),
                    class_probs=class_probs,
                    scores=None if class_probs is None else class_probs[:, 1:].max(axis=1, initial=0),
                )
        except (OSError, ValueError, IndexError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            raise RecordError(f"{path.name}: {error}") from None


def _to_float32(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiu":
        raise RecordError(f"holds {array.dtype}, not numbers")
    return array.astype(np.float32)
