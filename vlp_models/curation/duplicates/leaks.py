"""Which pictures may not stay where they are: copies, changed or not, of one that is tested on.

`prepare` looks at every picture once and leaves its record in `prints.parquet` beside the tables. `validate` holds the
records of what is tested on, and lets all of them pass by, a batch at a time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track

from vlp_models.common.parallel import LocalMapper
from vlp_models.curation.duplicates.hashes import ImageHashes
from vlp_models.curation.duplicates.prints import Print
from vlp_models.curation.duplicates.search import Match, NearPictures, NearRules
from vlp_models.data.tables import SPLITS, open_parquet
from vlp_models.errors import DataError

FILE = "prints.parquet"
COPIES = "copies.parquet"  # of data/validated: what was found, whatever became of it
BATCH = 512  # pictures that pass together
HELD = 4096  # pictures tested on held together, about 60 kB each with what finds them
RANK = {split: number for number, split in enumerate(SPLITS)}  # of two copies, the one that is tested on stays
_SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("pixels", pa.binary()),
        ("print", pa.binary()),
    ]
)
_COPY_SCHEMA = pa.schema([(name, pa.string()) for name in ("image_id", "copy_of", "split", "how")])
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


def find_copies(
    files: Sequence[Path], tested: Mapping[str, str], rules: NearRules, *, workers: int = 1, held: int = HELD
) -> list[Copy]:
    """Every copy across splits, by image id; of each picture, the one in the highest split comes first.

    Args:
        files: `prints.parquet` of every dataset; one that is absent holds nothing.
        tested: of each picture that is tested on, its split. All others are learnt from.
        workers: processes that look beside each other, each for the copies of `held` pictures.

    Raises:
        DataError: a file is damaged.
    """
    # by rows, not by names: `validate` has yet to set aside what is listed twice
    blocks = [(first, first + held) for first in range(0, sum(_tested_rows(files, tested)), held)]
    look = partial(_copies_of_block, files, tested, rules)
    parts = track(
        LocalMapper(max(1, min(workers, len(blocks)))).map(look, blocks),
        description="looking for copies of what is tested on",
        total=len(blocks),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    found = [copy for part in parts for copy in part]
    return sorted(found, key=lambda copy: (copy.image_id, -RANK[copy.split], copy.copy_of))


def _copies_of_block(
    files: Sequence[Path], tested: Mapping[str, str], rules: NearRules, block: tuple[int, int]
) -> list[Copy]:
    """Of some of the pictures that are tested on: from where to where, in the order of the files."""
    found: dict[tuple[str, str], Copy] = {}

    def meet(image_id: str, split: str, held_id: str, held_split: str, how: str) -> None:
        if RANK[split] < RANK[held_split]:
            copy = Copy(image_id=image_id, copy_of=held_id, split=held_split, how=how)
            found.setdefault((image_id, held_id), copy)

    ours = list(islice(_rows(files, tested, learnt=False), *block))
    held = [row for row, _ in ours]
    near = NearPictures([print_ for _, print_ in ours], rules)
    pixels: dict[bytes, list[int]] = defaultdict(list)
    for number, (_, _, value) in enumerate(held):
        pixels[value].append(number)
    for batch, prints in batches(_rows(files, tested, learnt=True)):
        for image_id, split, value in batch:
            for number in pixels.get(value, ()):
                meet(image_id, split, *held[number][:2], "pixel for pixel")
        for match in near.matches(prints, partial(_may_leak, batch, held)):
            meet(*batch[match.other][:2], *held[match.held][:2], said(match))
    return list(found.values())


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


def _tested_rows(files: Iterable[Path], tested: Mapping[str, str]) -> Iterator[int]:
    """Of each file, how many rows are tested on."""
    for path in files:
        if path.exists():
            with _naming(path):
                for batch in open_parquet(path).iter_batches(columns=["image_id"]):
                    yield sum(name in tested for name in batch["image_id"].to_pylist())


def _rows(files: Iterable[Path], tested: Mapping[str, str], *, learnt: bool) -> Iterator[tuple[Row, Print]]:
    """Pictures that are tested on with their prints; those learnt from as well, if asked for."""
    for path in files:
        if not path.exists():
            continue
        with _naming(path):
            for batch in open_parquet(path).iter_batches(BATCH):
                for row in batch.to_pylist():
                    split = tested.get(row["image_id"], SPLITS[0])
                    if learnt or split != SPLITS[0]:
                        yield (row["image_id"], split, row["pixels"]), Print.from_bytes(row["print"])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of a damaged file, with its name and the way out."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); `dvc repro -f prepare@{path.parent.name}` makes it anew") from None
