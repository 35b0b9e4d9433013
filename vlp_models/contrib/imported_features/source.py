"""The source of imported regions: finds each image's record, checks it and cuts it to `features.max_regions`.

Regions keep their class probabilities if the file has them. If it has only a class and a confidence, the row is that
confidence for that class and zero elsewhere (MOC then makes it a hard label). If it has neither, C is 0: such features
do not support masked object classification. The first regions in the file's order are kept, as in TDEN's public code;
`features.order: score` sorts them by confidence first, if the file has one (else every score is 1).
`features.min_score` does not apply.

The id of imported features is the hash of the files' content, so half an import never continues with other files of
the same names. A TSV is hashed while it is indexed; .npz files are read once more. Files that change during an import
end it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlp_models.common.io import stat_file
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError, ParamsError
from vlp_models.vision.region_source import BACKGROUND, MISSING, UNREADABLE, RegionSource, Row, quarantine_row

if TYPE_CHECKING:
    from vlp_models.vision.region_source import SourceRequest

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


class RecordFile(Protocol):
    """Random access to the records of a file or a directory of files.

    paths   record -> its file
    stamps  each file's `stat_file` before it was read
    """

    paths: dict[str, Path]
    stamps: dict[Path, tuple[int, ...]]

    def hash_contents(self) -> str: ...

    def where(self, key: str) -> str:
        """Return file and line, for messages."""
        ...

    def read(self, key: str) -> Record:
        """Raises `RecordError`."""
        ...


@dataclass(frozen=True)
class Origin:
    """The files that features are imported from.

    id     hash of their names and contents
    state  hash of their names, sizes, dates and inodes: while it is the same, so are the contents
    """

    id: str
    state: str


def features_path(request: SourceRequest) -> Path:
    """Return the file or directory to import."""
    p = request.params
    if not p.path:
        raise ParamsError(f"params.yaml: `features.source: {p.source}` needs `features.path`")
    return request.workspace.root / p.path


class ImportedSource(RegionSource):
    """The `RegionSource` of a `RecordFile`.

    Raises:
        DataError: not a single record is readable, or the files have changed since `request.origin`.
    """

    def __init__(self, file: RecordFile, request: SourceRequest) -> None:
        # Sizes, dates and inodes are enough to find that nothing changed; a new import hashes the contents.
        stamps = sorted((p.name, *stamp) for p, stamp in file.stamps.items())
        state = hashlib.sha256(repr(stamps).encode()).hexdigest()
        if request.origin is not None and request.origin.state != state:
            raise _changed(features_path(request))
        self.origin = request.origin or Origin(f"import-{file.hash_contents()[:16]}", state)
        self.detector_id = self.origin.id
        self._file = file
        self._max_regions = request.params.max_regions
        self._order = request.params.order
        # A file may have changed while it was indexed or hashed.
        self._check_unchanged(file.stamps)
        # Its widths are those that all records must have.
        first = self._first_record(features_path(request))
        self.feature_dim = int(first.features.shape[1])
        self._columns = 0 if first.class_probs is None else int(first.class_probs.shape[1])
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
                    regions.append(self._arrays(self._file.read(key)))
                    read.add(self._file.paths[key])
            except RecordError as error:
                read.add(self._file.paths[str(key)])
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

    def check_images(self, images: Iterable[Row]) -> None:
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
        return next((name for name in record_names(image) if name in self._file.paths), None)

    def _first_record(self, path: Path) -> Record:
        # Damaged records are skipped, and the first damage is named if all are.
        error: RecordError | None = None
        for key in sorted(self._file.paths):
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
        # Without a confidence in the file all regions are equally certain: a stable sort keeps their order.
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
    # `coco/val2014/17.jpg` -> itself, `val2014/17.jpg`, `17`; the first name that a record has is taken
    image_id = str(image["image_id"])
    return tuple(dict.fromkeys((image_id, image_id.partition("/")[2], Path(str(image["path"])).stem)))


def _changed(path: Path) -> DataError:
    return DataError(f"{path}: changed while it was being imported; run the same command again")
