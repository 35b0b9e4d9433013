"""Leakage between splits: training images and sentences that repeat what a model is evaluated on.

Images: `prepare` reads every image once and stores its fingerprint in `fingerprints.parquet` next to the tables.
`validate` indexes the fingerprints of the evaluation splits and streams all images past them. Of images with equal
pixels, such as a placeholder that a website returns for each missing photo, only one is indexed.

Sentences: two match if deleting at most one word from each makes them equal (a word replaced, added or dropped). Case,
punctuation and spaces do not count. Both are compared by hashes, so memory holds one hash for each word of the
evaluation sentences.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track

from vlp_models.common.executors import LocalMapper, Mapper
from vlp_models.common.unicode_words import split_words
from vlp_models.curation.duplicates.fingerprints import Fingerprint
from vlp_models.curation.duplicates.hashes import ImageHashes
from vlp_models.curation.duplicates.search import Match, NearDuplicateIndex, NearRules
from vlp_models.data.tables import SPLITS, open_parquet
from vlp_models.errors import DataError

FINGERPRINTS = "fingerprints.parquet"
LEAKS = "leaks.parquet"  # in data/validated: every leak found, quarantined or not
BATCH = 512  # images that are streamed together
INDEXED = 4096  # evaluation images indexed together, about 60 kB each
SERIES = 12  # images verified per image when near-duplicates are grouped: a photo may have many copies
EQUAL = "pixel for pixel"
_WORTH_A_PROCESS = 2  # batches; with fewer, starting another process takes longer than the search
RANK = {split: number for number, split in enumerate(SPLITS)}  # train < val < test: keep the copy in the higher split
MIN_WORDS = 4  # below it only equal sentences count: without a word, little of "a red ball" is left

_SCHEMA = pa.schema([("image_id", pa.string()), ("pixels", pa.binary()), ("fingerprint", pa.binary())])
_LEAK_SCHEMA = pa.schema([(name, pa.string()) for name in ("image_id", "copy_of", "split", "how")])
T = TypeVar("T")
Row = tuple[str, str, bytes]  # image id, split, hash of its pixels
SentenceMatch = Literal["equal", "one word apart"]


class FingerprintWriter:
    """Write `fingerprints.parquet` into a directory, a batch at a time. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._writer = pq.ParquetWriter(directory / FINGERPRINTS, _SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> FingerprintWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, image_id: str, hashes: ImageHashes) -> None:
        row = {"image_id": image_id, "pixels": hashes.pixels, "fingerprint": hashes.fingerprint.to_bytes()}
        self._rows.append(row)
        if len(self._rows) == BATCH:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
        self._rows = []


@dataclass(frozen=True, kw_only=True)
class Leak:
    """An image that is a copy of one in a higher split (train below val below test)."""

    image_id: str
    copy_of: str
    split: str  # of `copy_of`
    how: str

    @property
    def description(self) -> str:
        return f"{self.split} as {self.copy_of} ({self.how})"


def find_leaks(
    files: Sequence[Path],
    held_out: Mapping[str, str],
    rules: NearRules,
    *,
    workers: int = 1,
    mapper: Mapper | None = None,
) -> list[Leak]:
    """Find every copy across splits, sorted by image id; for each image, the copy in the highest split comes first.

    Evaluation images of one split with equal pixels are a group. An image that is a copy of a group has a leak for the
    first of them, so that the number of leaks grows with the number of images, not of pairs. Of each dataset and split,
    the first copy has a leak for every image of the group: all of them are named for every dataset.

    Args:
        files: `fingerprints.parquet` of every dataset; missing files are skipped.
        held_out: image id -> split of each evaluation image; all others are in train.
        workers: processes; each takes INDEXED evaluation images at a time, or a share of the batches of all images
            if there are fewer blocks of evaluation images than processes.
        mapper: executes the search in their place.

    Raises:
        DataError: a file is damaged.
    """
    # blocks of rows, not of ids: `validate` removes repeated ids only later
    rows = held_out_rows = 0
    for path in files:
        if path.exists():
            with _damaged_file_errors(path), open_parquet(path) as file:
                rows += file.metadata.num_rows
                for batch in file.iter_batches(columns=["image_id"]):
                    held_out_rows += sum(name in held_out for name in batch["image_id"].to_pylist())
    starts = range(0, held_out_rows, INDEXED)
    # Rounded up: the last batch may be smaller.
    batch_count = -(-rows // BATCH)
    # more processes than blocks: cut the batches of all images into shares
    shares = max(1, min(workers // max(1, len(starts)), batch_count // _WORTH_A_PROCESS)) if mapper is None else 1
    tasks = [_Task(start, start + INDEXED, share, shares) for start in starts for share in range(shares)]
    search = partial(_find_in_block, files, held_out, rules)
    parts = _search_all(search, tasks, "searching for copies of evaluation images", workers, mapper)
    blocks: dict[int, _BlockLeaks] = {}
    for task, part in zip(tasks, parts, strict=True):
        block = blocks.setdefault(task.first, _BlockLeaks([], part.groups))  # shares of a block have the same groups
        block.leaks.extend(part.leaks)
    leaks = [leak for block in blocks.values() for leak in _list_leaks(block, held_out)]
    return sorted(leaks, key=lambda leak: (leak.image_id, -RANK[leak.split], leak.copy_of))


def _search_all(
    search: Callable[[Any], T], tasks: Sequence[Any], description: str, workers: int, mapper: Mapper | None
) -> Iterable[T]:
    """Yield the result of each task in order, with a progress bar on a terminal."""
    results = (mapper or LocalMapper(max(1, min(workers, len(tasks))))).map(search, tasks)
    return track(
        results,
        description=description,
        total=len(tasks),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


class _Task(NamedTuple):
    """Compare evaluation images number `first` to `end`, in the order of the files, with the batches of all images
    whose number is `share` modulo `shares`."""

    first: int
    end: int
    share: int
    shares: int


class _BlockLeaks(NamedTuple):
    """Copies of a block of evaluation images.

    leaks   (number of the batch, number of the group, leak): for the first image of each group only
    groups  ids of the evaluation images of one split with equal pixels, in order
    """

    leaks: list[tuple[int, int, Leak]]
    groups: list[list[str]]


def _list_leaks(block: _BlockLeaks, held_out: Mapping[str, str]) -> Iterable[Leak]:
    """Return one leak of each pair of ids, that of the first batch: ids may be repeated.

    The first copy of a group in each dataset and split has a leak for each image of the group; and so has the first one
    with equal pixels, since `validate` may quarantine one kind of copy and keep the other.
    """
    pairs: dict[tuple[str, str], Leak] = {}
    named = set[tuple[int, str, str, bool]]()
    # in the order of batches, however many processes found them
    for _, group, leak in sorted(block.leaks, key=itemgetter(0)):
        pairs.setdefault((leak.image_id, leak.copy_of), leak)
        dataset, split = leak.image_id.partition("/")[0], held_out.get(leak.image_id, SPLITS[0])
        kind = (group, dataset, split, leak.how == EQUAL)
        if kind not in named:
            named.add(kind)
            for other in block.groups[group]:
                pairs.setdefault((leak.image_id, other), replace(leak, copy_of=other))
    return pairs.values()


def _find_in_block(files: Sequence[Path], held_out: Mapping[str, str], rules: NearRules, task: _Task) -> _BlockLeaks:
    """Return the copies of a task's evaluation images."""
    leaks: dict[tuple[str, str], tuple[int, int, Leak]] = {}

    def add(image_id: str, split: str, group: int, how: str) -> None:
        indexed_id, indexed_split, _ = rows[group]
        # a copy in an equal or higher split is not a leak: the copy in the higher split stays
        if RANK[split] < RANK[indexed_split]:
            leak = Leak(image_id=image_id, copy_of=indexed_id, split=indexed_split, how=how)
            leaks.setdefault((image_id, indexed_id), (number, group, leak))

    rows: list[Row] = []  # the first of each group
    indexed_fingerprints: list[Fingerprint] = []
    groups: list[list[str]] = []
    by_pixels: dict[bytes, dict[str, int]] = defaultdict(dict)  # pixels -> split -> group
    for row, fingerprint in islice(_read_fingerprints(files, held_out, train=False), task.first, task.end):
        image_id, split, pixels = row
        # of images with equal pixels in one split, one is indexed
        if split not in by_pixels[pixels]:
            by_pixels[pixels][split] = len(rows)
            rows.append(row)
            indexed_fingerprints.append(fingerprint)
            groups.append([])
        groups[by_pixels[pixels][split]].append(image_id)
    index = NearDuplicateIndex(indexed_fingerprints, rules)

    for number, (batch, fingerprints) in enumerate(batches(_read_fingerprints(files, held_out, train=True))):
        if number % task.shares != task.share:
            continue
        # equal pixels need no search
        for image_id, split, pixels in batch:
            for group in by_pixels.get(pixels, {}).values():
                add(image_id, split, group, EQUAL)

        def is_verified(query: int, indexed: int, batch: Sequence[Row] = batch) -> bool:
            """Return whether a pair is across splits and not already found by its pixels."""
            _, split, pixels = batch[query]
            return RANK[split] < RANK[rows[indexed][1]] and pixels != rows[indexed][2]

        for match in index.search(fingerprints, is_verified):
            add(*batch[match.query][:2], match.indexed, describe_match(match))
    return _BlockLeaks(list(leaks.values()), groups)


def find_near_duplicates(
    file: Path, rules: NearRules, *, fixed: Set[str] = frozenset(), workers: int = 1, mapper: Mapper | None = None
) -> Iterator[tuple[str, str]]:
    """Yield pairs of ids of images that are copies of each other, whatever their splits.

    Every image is compared with every other one: about five times the work of `find_leaks` with a fifth held out.
    Images with equal pixels are each paired with the first of them in a block, and only that one is compared.

    Args:
        file: `fingerprints.parquet` of a dataset, all of whose images were hashed as `held_out`.
        fixed: ids of images that join no others. None of them represents other images with its pixels.
        workers: processes.
        mapper: executes the search in their place.

    Raises:
        DataError: the file is damaged.
    """
    count = sum(1 for _ in _read_fingerprints([file], {}, train=True))
    # each process indexes a block, and streams all images of the dataset past it
    blocks = [(first, first + INDEXED) for first in range(0, count, INDEXED)]
    search = partial(_find_pairs_in_block, file, rules, fixed)
    parts = _search_all(search, blocks, "searching for near-duplicates", workers, mapper)
    for part in parts:
        yield from part


def _find_pairs_in_block(
    file: Path, rules: NearRules, fixed: Set[str], block: tuple[int, int]
) -> list[tuple[str, str]]:
    rows: list[Row] = []  # the first with its pixels, of the fixed images and of the others
    indexed_fingerprints: list[Fingerprint] = []
    by_pixels: dict[bytes, dict[bool, str]] = defaultdict(dict)  # pixels -> is it fixed -> image id
    for row, fingerprint in islice(_read_fingerprints([file], {}, train=True), *block):
        image_id, _, pixels = row
        # of equal pixels, one fixed image and one other are indexed
        if (image_id in fixed) not in by_pixels[pixels]:
            by_pixels[pixels][image_id in fixed] = image_id
            rows.append(row)
            indexed_fingerprints.append(fingerprint)
    index = NearDuplicateIndex(indexed_fingerprints, rules)
    pairs: list[tuple[str, str]] = []
    for batch, fingerprints in batches(_read_fingerprints([file], {}, train=True)):
        for name, _, pixels in batch:
            pairs += [(name, first) for first in by_pixels.get(pixels, {}).values() if first != name]

        def is_verified(query: int, indexed: int, batch: Sequence[Row] = batch) -> bool:
            name, _, pixels = batch[query]
            return name != rows[indexed][0] and pixels != rows[indexed][2]

        matches = index.search(fingerprints, is_verified, SERIES)
        pairs += [(batch[match.query][0], rows[match.indexed][0]) for match in matches]
    return pairs


def write_leaks(directory: Path, leaks: Sequence[Leak]) -> None:
    """Write `leaks.parquet`."""
    rows = [{name: getattr(leak, name) for name in _LEAK_SCHEMA.names} for leak in leaks]
    pq.write_table(pa.Table.from_pylist(rows, schema=_LEAK_SCHEMA), directory / LEAKS, compression="zstd")


def leaking_images(leaks: Iterable[Leak]) -> dict[str, str]:
    """Return image id -> description of its copy in the highest split."""
    descriptions: dict[str, str] = {}
    for leak in leaks:
        descriptions.setdefault(leak.image_id, leak.description)
    return descriptions


def describe_match(match: Match) -> str:
    """Return a human-readable reason for the match."""
    agreement = match.agreement
    corners = f"{agreement.inliers} corners agree, " if agreement.inliers else ""
    return f"{match.change}; {corners}correlation {agreement.correlation:.2f}"


def batches(rows: Iterable[tuple[T, Fingerprint]], size: int = BATCH) -> Iterator[tuple[list[T], list[Fingerprint]]]:
    """Yield names and fingerprints, `size` at a time."""
    stream = iter(rows)
    while batch := list(islice(stream, size)):
        names = [name for name, _ in batch]
        fingerprints = [fingerprint for _, fingerprint in batch]
        yield names, fingerprints


def _read_fingerprints(
    files: Iterable[Path], held_out: Mapping[str, str], *, train: bool
) -> Iterator[tuple[Row, Fingerprint]]:
    """Yield evaluation images with their fingerprints; training images as well if `train`."""
    for path in files:
        if not path.exists():
            continue
        with _damaged_file_errors(path):
            for batch in open_parquet(path).iter_batches(BATCH):
                for row in batch.to_pylist():
                    split = held_out.get(row["image_id"], SPLITS[0])
                    if train or split != SPLITS[0]:
                        yield (row["image_id"], split, row["pixels"]), Fingerprint.from_bytes(row["fingerprint"])


@contextmanager
def _damaged_file_errors(path: Path) -> Iterator[None]:
    """Turn errors of a damaged file into a `DataError` that names it and the way out."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); run `dvc repro -f prepare@{path.parent.name}`") from None


def compare_sentences(held_out: Sequence[str], trained_on: Iterable[str]) -> list[SentenceMatch | None]:
    """Return each evaluation sentence's closest training match: equal, one word apart, or None.

    The evaluation sentences are indexed in memory; the training sentences, which are many, stream past.
    """
    equal: dict[bytes, list[int]] = defaultdict(list)
    shortened: dict[bytes, list[int]] = defaultdict(list)
    long = [False] * len(held_out)
    for number, text in enumerate(held_out):
        words = compared_words(text)
        if words:
            equal[_hash(words)].append(number)
            long[number] = len(words) >= MIN_WORDS
            for part in set(_hashes_without_one_word(words)):
                shortened[part].append(number)
    matches: list[SentenceMatch | None] = [None] * len(held_out)
    # one word apart: deleting a word from one sentence or from both makes them equal
    for text in trained_on:
        words = compared_words(text)
        text_hash = _hash(words)
        # the evaluation sentence without a word equals the training sentence
        near = set(shortened.get(text_hash, ()))
        for part in _hashes_without_one_word(words):
            # the training sentence without a word equals a long enough evaluation sentence
            near.update(number for number in equal.get(part, ()) if long[number])
            # both without a word are equal: a word was replaced
            near.update(shortened.get(part, ()))
        for number in near:
            matches[number] = matches[number] or "one word apart"
        for number in equal.get(text_hash, ()):
            matches[number] = "equal"
    return matches


def compared_words(text: str) -> list[str]:
    """Split into words without case and punctuation; into characters where a script has no spaces between words."""
    return split_words(unicodedata.normalize("NFKC", text).casefold())


def _hashes_without_one_word(words: list[str]) -> Iterator[bytes]:
    if len(words) >= MIN_WORDS:
        for left_out in range(len(words)):
            yield _hash(words[:left_out] + words[left_out + 1 :])


def _hash(words: list[str]) -> bytes:
    return blake2b(" ".join(words).encode(), digest_size=8).digest()
