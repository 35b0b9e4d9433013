"""Features that another detector made, as files: what the formats share.

Regions keep their class probabilities where the file has them. Where it has only a class and a confidence, the row is
that confidence in that class and zero elsewhere (the objective then makes it a hard label). Where it has neither,
C is 0: such features carry no masked object classification. Regions stay in the file's order, and the first are kept,
as TDEN's public code has it; `features.order: score` sorts them by confidence before any is left out, where the file
has one (else every score is 1). `features.min_score` does not apply: the file's maker has chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError
from vlp_models.vision.config import BACKGROUND
from vlp_models.vision.source import Row, left_out

MISSING = "features_present"  # rules of the quarantine table
UNREADABLE = "features_readable"
Order = Literal["file", "score"]
OVERHANG = 2.0  # pixels a box may stick out of its image


class RecordError(ValueError):
    """One image's record is damaged; the others may be fine."""


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
    """Random access to the records of a file or a directory of files."""

    def keys(self) -> Iterable[str]: ...

    def where(self, key: str) -> str:
        """File and place, for messages."""
        ...

    def read(self, key: str) -> Record:
        """Raises `RecordError`."""
        ...


class ImportedSource:
    """A `RegionSource` over a `RecordFile`.

    Args:
        order: of an image's regions, before any beyond `max_regions` is left out.

    Raises:
        DataError: not one record is readable.
    """

    by_content = False
    device = "cpu"

    def __init__(self, file: RecordFile, path: Path, detector_id: str, max_regions: int, order: Order = "file") -> None:
        self.detector_id = detector_id
        self._file = file
        self._keys = set(file.keys())
        self._max_regions = max_regions
        self._order = order
        first = self._first_record(path)
        self.feature_dim = int(first.features.shape[1])
        self._columns = 0 if first.class_probs is None else int(first.class_probs.shape[1])
        self.classes = (BACKGROUND, *(f"class {n}" for n in range(1, self._columns))) if self._columns else ()

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """Images whose record is missing or damaged have no region, and a row in the second list."""
        found, notes = [], []
        for image in images:
            key = self._key(image)
            try:
                if key is None:
                    notes.append(left_out(image, MISSING, f"no record named {', '.join(names_of(image))}", ""))
                    found.append(self._empty())
                else:
                    found.append(self._arrays(self._file.read(key)))
            except RecordError as error:
                notes.append(left_out(image, UNREADABLE, str(error), self._file.where(str(key))))
                found.append(self._empty())
            advance(1)
        return found, notes

    def check_names(self, images: Iterable[Row]) -> None:
        """
        Raises:
            DataError: one record would be that of two images whose files differ.
        """
        owners: dict[str, Row] = {}
        for image in images:
            key = self._key(image)
            if key is not None and (owner := owners.setdefault(key, image))["sha256"] != image["sha256"]:
                raise DataError(
                    f"features.path: the record {key} would be that of {owner['image_id']} and of {image['image_id']}, "
                    "which are different files; name each record by the whole id of its image"
                )

    def _key(self, image: Row) -> str | None:
        return next((name for name in names_of(image) if name in self._keys), None)

    def _first_record(self, path: Path) -> Record:
        error: RecordError | None = None
        for key in sorted(self._keys):
            try:
                return check_record(self._file.read(key))
            except RecordError as problem:
                error = error or problem
        why = f"the first: {error}" if error else "it holds none"
        raise DataError(f"{path}: not one readable record of region features ({why}); check features.path and source")

    def _arrays(self, record: Record) -> RegionArrays:
        check_record(record)
        count = len(record.features)
        probs = np.zeros((count, 0), np.float16) if record.class_probs is None else record.class_probs
        if record.features.shape[1] != self.feature_dim or probs.shape[1] != self._columns:
            raise RecordError(
                f"{record.features.shape[1]} features and {probs.shape[1]} classes a region, "
                f"but {self.feature_dim} and {self._columns} in the first record"
            )
        scores = np.ones(count, np.float32) if record.scores is None else record.scores
        places = np.argsort(-scores, kind="stable") if self._order == "score" else np.arange(count)
        keep = places[: self._max_regions]
        size = np.array([record.width, record.height] * 2, np.float32)
        return RegionArrays(
            features=record.features[keep].astype(np.float16),
            boxes=(record.boxes[keep] / size).clip(0, 1).astype(np.float32),
            class_probs=probs[keep].astype(np.float16),
            scores=scores[keep].astype(np.float32),
        )

    def _empty(self) -> RegionArrays:
        return RegionArrays(
            features=np.zeros((0, self.feature_dim), np.float16),
            boxes=np.zeros((0, 4), np.float32),
            class_probs=np.zeros((0, self._columns), np.float16),
            scores=np.zeros(0, np.float32),
        )


def check_record(record: Record) -> Record:
    """Raises `RecordError` if the shapes, the numbers or the boxes can't be."""
    count = len(record.features)
    arrays = {"features": record.features, "boxes": record.boxes}
    arrays |= {} if record.class_probs is None else {"class probabilities": record.class_probs}
    arrays |= {} if record.scores is None else {"scores": record.scores}
    for name, array in arrays.items():
        if len(array) != count or array.ndim != (1 if name == "scores" else 2):
            raise RecordError(f"{name} of shape {list(array.shape)} beside features {list(record.features.shape)}")
        if not np.isfinite(array).all() or np.abs(array).max(initial=0) > np.finfo(np.float16).max:
            raise RecordError(f"{name} with a value that is not finite or too large")
    if record.boxes.shape[1] != 4 or record.width <= 0 or record.height <= 0:
        raise RecordError(f"boxes {list(record.boxes.shape)} in an image of {record.width} x {record.height}")
    reach = record.boxes.max(axis=0, initial=0)
    if record.boxes.min(initial=0) < -OVERHANG or (
        max(reach[0], reach[2]) > record.width + OVERHANG or max(reach[1], reach[3]) > record.height + OVERHANG
    ):
        raise RecordError(f"a box outside its image of {record.width:.0f} x {record.height:.0f} pixels")
    return record


def names_of(image: Row) -> tuple[str, ...]:
    """What an image may be called elsewhere: its whole id, its id within the dataset, its file's name."""
    image_id = str(image["image_id"])
    return tuple(dict.fromkeys((image_id, image_id.partition("/")[2], Path(str(image["path"])).stem)))


def import_id(kind: str, files: Iterable[Path]) -> str:
    """Identity of imported features: names and sizes of their files (reading 25 GB to hash them would be slow)."""
    listing = sorted((path.name, path.stat().st_size) for path in files)
    return "import-" + hashlib.sha256(json.dumps([kind, listing]).encode()).hexdigest()[:16]
