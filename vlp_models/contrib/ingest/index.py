"""An index of the hashes of all accepted and evaluation images, in a SQLite file, so memory stays flat.

The index is a cache: batches store their images' hashes, so it can be rebuilt from the batches, and a batch that a kill
left out is added at the next start. Images of other datasets are hashed once and cached by path and `stat_file`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import stat_file
from vlp_models.curation.duplicates.fingerprints import Fingerprint
from vlp_models.data.batches import FINGERPRINTS, MANIFEST, PAIRS, batch_folders, read_fingerprints
from vlp_models.errors import DataError, first_line

BLOCK = 4096
_VERSION = 5  # of the schema; an index with another version, or with other fingerprints, is rebuilt
_SCHEMA = """
CREATE TABLE images (
    id INTEGER PRIMARY KEY, origin TEXT NOT NULL, image_id TEXT NOT NULL, split TEXT NOT NULL,
    path TEXT, state TEXT, sha256 BLOB NOT NULL, pixels BLOB NOT NULL, perceptual INTEGER,
    fingerprint BLOB);
CREATE INDEX images_sha256 ON images (sha256);
CREATE INDEX images_pixels ON images (pixels);
CREATE INDEX images_origin ON images (origin, image_id);
CREATE TABLE batches (name TEXT PRIMARY KEY, snapshot TEXT NOT NULL, pairs INTEGER NOT NULL);
CREATE TABLE submissions (snapshot TEXT PRIMARY KEY);
"""
BATCH_ORIGIN = "batch/"  # origin of a batch's images; those of another dataset have "data/<name>"


@dataclass(frozen=True)
class IndexedImage:
    """An image of the index."""

    origin: str
    image_id: str
    split: str


class HashIndex:
    """The index; one writer at a time (the caller holds the lock). A damaged file is rebuilt.

    Args:
        path: the SQLite file.
        name: prefix of the ids of the dataset's own images.
        keypoints: whether fingerprints include keypoints.
    """

    def __init__(self, path: Path, name: str, *, keypoints: bool) -> None:
        self._name = name
        # Odd with keypoints, even without: a change of either setting rebuilds the index.
        self._version = 2 * _VERSION + keypoints
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.connection = self._open(path)
        except sqlite3.DatabaseError:  # damaged, or of another version
            path.unlink()
            self.connection = self._open(path)

    def _open(self, path: Path) -> sqlite3.Connection:
        # `isolation_level=None`: transactions begin and end where the code states it.
        connection = sqlite3.connect(path, isolation_level=None, uri=False)
        try:
            # A kill loses nothing; what a power cut loses is read from the batches again.
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA cache_size = -4096")  # KiB: the only memory the index uses
            connection.execute("PRAGMA temp_store = FILE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != self._version:
                # A new file has version 0 and no tables; tables under another version belong to another schema.
                if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise sqlite3.DatabaseError("another version")
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {self._version}; COMMIT;")
            return connection
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self.connection.close()

    # --- The dataset's own batches

    def sync_batches(self, dataset: Path) -> None:
        """Update the index to the batches on disk.

        Raises:
            DataError: a batch is tracked but missing, or damaged.
        """
        # a batch whose .dvc file is here must be here too: else its images would count as new
        on_disk = {batch.name for batch in batch_folders(dataset)}
        absent = sorted(path.stem for path in dataset.glob("*.dvc") if path.stem not in on_disk)
        if absent:
            raise DataError(
                f"{dataset}: {len(absent)} tracked batches are missing, such as {absent[0]}; their images would be "
                f"ingested again. Run `dvc pull {dataset / absent[0]}.dvc` (or `dvc checkout`)"
            )
        indexed = {name for (name,) in self.connection.execute("SELECT name FROM batches")}
        # batches that were removed, then new ones
        for name in sorted(indexed - on_disk):
            with self._transaction():
                self.connection.execute("DELETE FROM images WHERE origin = ?", (BATCH_ORIGIN + name,))
                self.connection.execute("DELETE FROM batches WHERE name = ?", (name,))
        for name in sorted(on_disk - indexed):
            manifest = read_batch_manifest(dataset / name)
            with self._transaction():
                self.connection.executemany(
                    "INSERT INTO images (origin, image_id, split, sha256, pixels, perceptual, fingerprint) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    _image_rows(dataset / name),
                )
                counts = (manifest["snapshot"], manifest["counts"]["new"])
                self.connection.execute("INSERT INTO batches VALUES (?, ?, ?)", (name, *counts))

    # --- Submissions

    def is_ingested(self, snapshot: str) -> bool:
        """Return whether a submission was ingested: it has a batch, or it stayed in place and was recorded."""
        query = "SELECT 1 FROM batches WHERE snapshot = ?1 UNION SELECT 1 FROM submissions WHERE snapshot = ?1"
        return self.connection.execute(query, (snapshot,)).fetchone() is not None

    def record_submission(self, snapshot: str) -> None:
        self.connection.execute("INSERT OR IGNORE INTO submissions VALUES (?)", (snapshot,))

    # --- Images of other datasets

    def sync_source(
        self,
        source: str,
        listed: Iterable[tuple[str, str, str]],
        hash_files: Callable[[Iterator[tuple[int, str, bool]]], Iterator[tuple[int, Any]]],
    ) -> int:
        """Update the index to the images of another dataset; hash those that are new or changed.

        Args:
            source: the dataset's name.
            listed: (image id, split, path) of every image.
            hash_files: (number, path, whether it is held out) -> (number, ImageHashes or an exception), in any order.

        Returns:
            How many could not be read; `prepare` quarantines them.
        """
        origin = f"data/{source}"
        # the images with the state of their files, for the comparisons below; the index may be too large for memory
        run = self.connection.execute
        run("CREATE TEMP TABLE IF NOT EXISTS listed (image_id TEXT, split TEXT, path TEXT, state TEXT)")
        run("DELETE FROM listed")
        unreadable = 0
        with self._transaction():
            for image_id, split, path in listed:
                try:
                    state = str(stat_file(Path(path).stat()))
                except OSError:
                    unreadable += 1
                    continue
                run("INSERT INTO listed VALUES (?, ?, ?, ?)", (image_id, split, path, state))
        # images that are no longer listed leave the index; those that it has already need no hashing
        columns = "image_id, split, path, state"
        with self._transaction():
            run(f"DELETE FROM images WHERE origin = ? AND ({columns}) NOT IN (SELECT * FROM listed)", (origin,))
            run(
                f"DELETE FROM listed WHERE ({columns}) IN (SELECT {columns} FROM images WHERE origin = ?)",
                (origin,),
            )
        # what remains is new or changed
        query = "SELECT rowid, path, split FROM listed ORDER BY rowid"
        paths = ((number, path, split != "train") for number, path, split in self._stream(query))
        results = iter(hash_files(paths))
        # a block of hashed images per transaction
        while block := list(islice(results, BLOCK)):
            rows = []
            for number, hashes in block:
                if isinstance(hashes, Exception):
                    unreadable += 1
                    continue
                perceptual = signed(hashes.perceptual)
                rows.append((origin, hashes.sha256, hashes.pixels, perceptual, hashes.fingerprint.to_bytes(), number))
            with self._transaction():
                # Number, path and state are in `listed` already: join them by rowid.
                self.connection.executemany(
                    f"INSERT INTO images (origin, {columns}, sha256, pixels, perceptual, fingerprint) "
                    f"SELECT ?1, {columns}, ?2, ?3, ?4, ?5 FROM listed WHERE rowid = ?6",
                    rows,
                )
        return unreadable

    def has_train(self, source: str) -> bool:
        """Return whether images of its training split are indexed; once indexed they stay."""
        query = "SELECT 1 FROM images WHERE origin = ? AND split = 'train' LIMIT 1"
        return self.connection.execute(query, (f"data/{source}",)).fetchone() is not None

    def remove_other_sources(self, keep: Iterable[str]) -> None:
        """Remove the images of datasets that params.yaml no longer names."""
        origins = {row[0] for row in self.connection.execute("SELECT DISTINCT origin FROM images")}
        for origin in origins - {f"data/{name}" for name in keep}:
            if not origin.startswith(BATCH_ORIGIN):
                self.connection.execute("DELETE FROM images WHERE origin = ?", (origin,))

    # --- Look-ups

    def image(self, number: int) -> IndexedImage:
        query = "SELECT origin, image_id, split FROM images WHERE id = ?"
        origin, image_id, split = self.connection.execute(query, (number,)).fetchone()
        # ids of batches lack the dataset's name
        return IndexedImage(origin, f"{self._name}/{image_id}" if origin.startswith(BATCH_ORIGIN) else image_id, split)

    def perceptual_blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids (int64) and perceptual hashes (uint64) of all images that have one, a block at a time."""
        # SQLite's integers are signed: the same bits are read as unsigned
        cursor = self.connection.execute("SELECT id, perceptual FROM images WHERE perceptual IS NOT NULL")
        while rows := cursor.fetchmany(2 * BLOCK):
            table = np.array(rows, np.int64)
            yield table[:, 0], np.ascontiguousarray(table[:, 1]).view(np.uint64)

    def fingerprints(self, *, held_out: bool) -> Iterator[tuple[int, Fingerprint]]:
        """Yield (id, fingerprint) of the evaluation images, or of the training images."""
        sign = "!=" if held_out else "="
        query = f"SELECT id, fingerprint FROM images WHERE split {sign} 'train' AND fingerprint IS NOT NULL"
        for number, content in self._stream(query):
            yield number, Fingerprint.from_bytes(content)

    def fingerprint_of(self, number: int) -> Fingerprint | None:
        (content,) = self.connection.execute("SELECT fingerprint FROM images WHERE id = ?", (number,)).fetchone()
        return None if content is None else Fingerprint.from_bytes(content)

    def _stream(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query, a block at a time; its table must not change meanwhile."""
        cursor = self.connection.cursor().execute(query)
        while rows := cursor.fetchmany(BLOCK):
            yield from rows

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit, or roll back on an error. Python's own transactions start too late for several statements."""
        # IMMEDIATE takes the write lock now, not at the first change.
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")


def _image_rows(batch: Path) -> Iterator[tuple[Any, ...]]:
    """Yield origin, id, split, hashes and fingerprint of each image of a batch."""
    # fingerprints come in the order of the images, one each
    last, fingerprints = "", read_fingerprints(batch / FINGERPRINTS)
    with (batch / PAIRS).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if row["image"] == last:  # captions of one image are adjacent
                    continue
                last = row["image"]
                perceptual = None if row["perceptual"] is None else int(row["perceptual"], 16)
                hashes = (bytes.fromhex(row["sha256"]), bytes.fromhex(row["pixels"]), signed(perceptual))
                image, fingerprint = next(fingerprints)
                if image != last:
                    raise ValueError(f"{FINGERPRINTS} has {image} where {last} is expected")
                yield (BATCH_ORIGIN + batch.name, f"{batch.name}/{last}", row["split"], *hashes, fingerprint)
            except (ValueError, KeyError, TypeError, StopIteration) as error:
                raise DataError(
                    f"{batch / PAIRS}:{number}: damaged ({first_line(error)}); run `dvc checkout {batch}.dvc`"
                ) from None


def read_batch_manifest(batch: Path) -> dict[str, Any]:
    """Read a batch's manifest.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((batch / MANIFEST).read_text(encoding="utf-8"))
        manifest["snapshot"], manifest["counts"]["new"]
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{batch / MANIFEST}: damaged ({first_line(error)}); run `dvc checkout {batch}.dvc`") from None


def signed(value: int | None) -> int | None:
    """Convert an unsigned 64-bit integer to SQLite's signed one."""
    # Two's complement: values with the highest bit set become negative.
    return None if value is None else value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """Convert SQLite's signed 64-bit integer back to an unsigned one."""
    return value & ((1 << 64) - 1)
