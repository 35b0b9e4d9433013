"""Which pictures may not stay where they are: copies, changed or not, of one that is tested on.

`prepare` looks at every picture once and leaves its record in `prints.parquet` beside the tables. `validate` holds the
records of what is tested on, and lets all of them pass by, a batch at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.data.tables import SPLITS
from vlp_models.duplicates.hashes import ImageHashes
from vlp_models.duplicates.prints import Print
from vlp_models.duplicates.search import Match, NearPictures, NearRules
from vlp_models.errors import DataError

FILE = "prints.parquet"
COPIES = "copies.parquet"  # of data/validated: what was found, whatever became of it
BATCH = 512  # pictures that pass together
HELD = 2048  # pictures tested on that are held together, about 30 kB each
RANK = {split: number for number, split in enumerate(SPLITS)}  # of two copies, the one that is tested on stays
_SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("pixels", pa.binary()),
        ("print", pa.binary()),
    ]
)
_COPY_SCHEMA = pa.schema([(name, pa.string()) for name in ("image_id", "copy_of", "split", "how")])
SplitOf = Callable[[str], str | None]
T = TypeVar("T")


class PrintWriter:
    """Writes `prints.parquet` into a directory, a batch at a time. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._writer = pq.ParquetWriter(directory / FILE, _SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> PrintWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, image_id: str, found: ImageHashes) -> None:
        row = {"image_id": image_id, "pixels": found.pixels}
        self._rows.append({**row, "print": found.print.to_bytes()})
        if len(self._rows) == BATCH:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
        self._rows = []


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A picture, and one of a higher split (train below val below test) that it is a copy of."""

    image_id: str
    copy_of: str
    split: str  # of `copy_of`
    how: str

    @property
    def where(self) -> str:
        return f"{self.split} as {self.copy_of} ({self.how})"


def find_copies(files: Sequence[Path], split_of: SplitOf, rules: NearRules) -> list[Copy]:
    """Every copy across splits, by image id; of each picture, the one in the highest split comes first.

    Args:
        files: `prints.parquet` of every dataset; one that is absent holds nothing.
        split_of: a picture's split; None for one that does not count.

    Raises:
        DataError: a file is damaged.
    """
    found: dict[tuple[str, str], Copy] = {}

    def meet(image_id: str, split: str, held_id: str, held_split: str, how: str) -> None:
        if RANK[split] < RANK[held_split]:
            copy = Copy(image_id=image_id, copy_of=held_id, split=held_split, how=how)
            found.setdefault((image_id, held_id), copy)

    def rows() -> Iterator[tuple[Row, Print]]:
        return _rows(files, split_of)

    for held, near in held_blocks((row for row in rows() if row[0][1] != SPLITS[0]), rules):
        pixels: dict[bytes, list[int]] = defaultdict(list)
        for number, (_, _, value) in enumerate(held):
            pixels[value].append(number)
        for batch, prints in batches(rows()):
            for image_id, split, value in batch:
                for number in pixels.get(value, ()):
                    meet(image_id, split, *held[number][:2], "pixel for pixel")
            for match in near.matches(prints, partial(_may_leak, batch, held)):
                meet(*batch[match.other][:2], *held[match.held][:2], said(match))
    return sorted(found.values(), key=lambda copy: (copy.image_id, -RANK[copy.split], copy.copy_of))


def write_copies(directory: Path, copies: Sequence[Copy]) -> None:
    rows = [{name: getattr(copy, name) for name in _COPY_SCHEMA.names} for copy in copies]
    pq.write_table(pa.Table.from_pylist(rows, schema=_COPY_SCHEMA), directory / COPIES, compression="zstd")


def where_else(copies: Iterable[Copy]) -> dict[str, str]:
    """Image id -> where its copy in the highest split is."""
    places: dict[str, str] = {}
    for copy in copies:
        places.setdefault(copy.image_id, copy.where)
    return places


def said(match: Match) -> str:
    """How two pictures were known to be one."""
    agreement = match.agreement
    corners = f"{agreement.inliers} corners agree, " if agreement.inliers else ""
    return f"{match.how}; {corners}correlation {agreement.correlation:.2f}"


def held_blocks(rows: Iterable[tuple[T, Print]], rules: NearRules) -> Iterator[tuple[list[T], NearPictures]]:
    """What is tested on, as many pictures together as are held in memory: their names, and what asks for copies."""
    for names, prints in batches(rows, HELD):
        yield names, NearPictures(prints, rules)


def batches(rows: Iterable[tuple[T, Print]], size: int = BATCH) -> Iterator[tuple[list[T], list[Print]]]:
    """Names and prints, `size` at a time."""
    stream = iter(rows)
    while batch := list(islice(stream, size)):
        yield [name for name, _ in batch], [print_ for _, print_ in batch]


Row = tuple[str, str, bytes]  # id, split, hash of the pixels


def _may_leak(batch: Sequence[Row], held: Sequence[Row], other: int, number: int) -> bool:
    """Whether a picture of the batch is in a lower split than a held one."""
    return RANK[batch[other][1]] < RANK[held[number][1]]


def _rows(files: Iterable[Path], split_of: SplitOf) -> Iterator[tuple[Row, Print]]:
    for path in files:
        if not path.exists():
            continue
        try:
            for batch in pq.ParquetFile(path).iter_batches(BATCH):
                for row in batch.to_pylist():
                    split = split_of(row["image_id"])
                    if split in RANK:
                        found = Print.from_bytes(row["print"])
                        yield (row["image_id"], split, row["pixels"]), found
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: damaged ({error}); `dvc repro -f prepare@{path.parent.name}` makes it anew"
            ) from None
