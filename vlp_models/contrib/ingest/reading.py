"""Read a submission's listing and images into a SQLite staging file.

Rows wait on disk, so memory does not depend on their number. A bad row is counted under the rule it broke: a validation
rule for captions, a rule of data/images.py for images.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vlp_models.contrib.ingest.index import BLOCK, signed
from vlp_models.contrib.ingest.submissions import Submission
from vlp_models.curation.duplicates.fingerprints import Fingerprint
from vlp_models.curation.duplicates.hashes import HashJob, hash_all, stored_name
from vlp_models.curation.validation.rules import broken_rule, caption_rules
from vlp_models.curation.validation.text import caption_key
from vlp_models.data.formats.base import RecordError, Tables, get_sentence, printable
from vlp_models.data.formats.pairs import read_group, read_image_name, read_language, read_pairs, read_split
from vlp_models.data.images import ImageError
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError
from vlp_models.params import ValidateParams

MAX_LISTING = 1 << 30  # bytes
_SCHEMA = """
CREATE TABLE images (
    id INTEGER PRIMARY KEY, path TEXT, path_key TEXT UNIQUE, split TEXT, together TEXT, provenance TEXT, sha256 BLOB,
    pixels BLOB, perceptual INTEGER, fingerprint BLOB, width INTEGER, height INTEGER, stored TEXT,
    verdict TEXT, rule TEXT, reason TEXT);
CREATE TABLE pairs (
    id INTEGER PRIMARY KEY, image INTEGER, caption TEXT, language TEXT, provenance TEXT,
    verdict TEXT, rule TEXT, reason TEXT);
CREATE INDEX pairs_image ON pairs (image);
"""


class Staging:
    """The rows of a submission. `verdict` is null (accepted), `bad`, `duplicate`, `leak` or `withdrawn`.

    `together` (column `group` of the listing) is empty for an image without a group, `language` for a caption of a
    listing without a column `lang`.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.connection = sqlite3.connect(path, isolation_level=None)
        # The file is deleted and read again after a crash, so it needs neither a journal nor flushes.
        for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096", "temp_store = FILE"):
            self.connection.execute(f"PRAGMA {setting}")
        self.connection.executescript(_SCHEMA)
        self.connection.create_function("caption_key", 1, caption_key, deterministic=True)

    def close(self) -> None:
        self.connection.close()

    def read(self, submission: Submission, params: ValidateParams) -> None:
        """Read the listing.

        Raises:
            DataError: it is too large, or not in a supported format.
        """
        if submission.listing.stat().st_size > MAX_LISTING:
            raise DataError(f"{submission.listing}: more than {MAX_LISTING >> 30} GiB; split the submission")
        # the rules of captions that `validate` applies later, so that no accepted pair is refused there
        rules = caption_rules(params)
        tables = Tables()
        run = self.connection.execute
        run("BEGIN")
        for line, record in read_pairs(submission.listing, tables):
            provenance = printable(line)
            # lines that the reader skipped since the last row
            self._add_unreadable(tables)
            try:
                path, split = read_image_name(record), read_split(record) or "train"
                if split not in SPLITS:
                    raise RecordError(f"split {split!r} is not one of {', '.join(SPLITS)}", rule="split_known")
                caption, group, language = get_sentence(record, "caption"), read_group(record), read_language(record)
                path_key = _normalize(path)
                # the first row of an image decides its split, and the first with a group its group
                run(
                    "INSERT OR IGNORE INTO images (path, path_key, split, together, provenance) "
                    "VALUES (?, ?, ?, '', ?)",
                    (path, path_key, split, provenance),
                )
                image, first_split, together, first_provenance = run(
                    "SELECT id, split, together, provenance FROM images WHERE path_key = ?", (path_key,)
                ).fetchone()
                # An image has one split and one group: a row that contradicts an earlier one is rejected.
                if split != first_split:
                    reason = f"the image is {split} here and {first_split} in {first_provenance}"
                    raise RecordError(reason, rule="split_disjoint")
                if group and not together:
                    run("UPDATE images SET together = ? WHERE id = ?", (group, image))
                elif group not in ("", together):
                    reason = f"the image is of group {group!r} here and of {together!r} elsewhere"
                    raise RecordError(reason, rule="group_unique")
                if broken := broken_rule(caption, rules):
                    raise RecordError(broken[1], rule=broken[0])
            except RecordError as error:
                self._add_bad(provenance, error.rule, str(error))
                continue
            run(
                "INSERT INTO pairs (image, caption, language, provenance) VALUES (?, ?, ?, ?)",
                (image, caption, language, provenance),
            )
        self._add_unreadable(tables)
        # of equal captions of one image the first stays
        run(
            "UPDATE pairs SET verdict = 'duplicate', rule = 'caption_unique', reason = 'the image has this caption' "
            "WHERE verdict IS NULL AND id NOT IN (SELECT min(id) FROM pairs WHERE verdict IS NULL "
            "GROUP BY image, caption_key(caption))"
        )
        run("COMMIT")

    def has_held_out(self) -> bool:
        """Return whether the submission has pairs for an evaluation split."""
        return self.connection.execute("SELECT 1 FROM images WHERE split != 'train' LIMIT 1").fetchone() is not None

    def hash_images(self, job: HashJob, processes: int) -> None:
        """Check, hash and store every image that a valid row names."""
        # all paths first: a table must not change while it is read
        # Images without a valid row are not read at all.
        items = self.connection.execute(
            "SELECT id, path, split != 'train' FROM images WHERE id IN "
            "(SELECT image FROM pairs WHERE verdict IS NULL) ORDER BY id"
        ).fetchall()
        results = hash_all(items, job, processes)
        # a block of images per transaction, which is faster than one each
        while block := list(islice(results, BLOCK)):
            self.connection.execute("BEGIN")
            for number, hashes in block:
                if isinstance(hashes, ImageError):
                    values: dict[str, Any] = {"verdict": "bad", "rule": hashes.rule, "reason": printable(hashes.reason)}
                else:
                    values = {name: getattr(hashes, name) for name in ("sha256", "pixels", "width", "height")}
                    values["perceptual"] = signed(hashes.perceptual)
                    values |= {"fingerprint": hashes.fingerprint.to_bytes(), "stored": stored_name(hashes)}
                columns = ", ".join(f"{name} = ?" for name in values)
                self.connection.execute(f"UPDATE images SET {columns} WHERE id = ?", (*values.values(), number))
            self.connection.execute("COMMIT")

    def fingerprints(self, *, held_out: bool = False) -> Iterator[tuple[int, Fingerprint]]:
        """Yield (id, fingerprint) of every image without a verdict, or only of those in evaluation splits."""
        where = "AND split != 'train'" if held_out else ""
        cursor = self.connection.cursor().execute(
            f"SELECT id, fingerprint FROM images WHERE fingerprint IS NOT NULL AND verdict IS NULL {where} ORDER BY id"
        )
        while rows := cursor.fetchmany(BLOCK // 8):
            yield from ((number, Fingerprint.from_bytes(content)) for number, content in rows)

    def fingerprint_of(self, number: int) -> Fingerprint | None:
        (content,) = self.connection.execute("SELECT fingerprint FROM images WHERE id = ?", (number,)).fetchone()
        return None if content is None else Fingerprint.from_bytes(content)

    def counts(self) -> dict[str, int]:
        """Count the pairs by verdict; `rows` is their sum."""
        query = (
            "SELECT coalesce(p.verdict, i.verdict, 'new'), count(*) FROM pairs p LEFT JOIN images i ON i.id = p.image "
            "GROUP BY 1"
        )
        pairs = Counter(dict(self.connection.execute(query).fetchall()))
        names = {"new": "new", "duplicates": "duplicate", "leaks": "leak", "withdrawn": "withdrawn", "bad": "bad"}
        return {"rows": pairs.total(), **{name: pairs[verdict] for name, verdict in names.items()}}

    def _add_unreadable(self, tables: Tables) -> None:
        for row in tables["quarantine"]:
            self._add_bad(printable(row["provenance"]), row["rule"], row["reason"])
        # The list is in memory: empty it once its rows are stored.
        tables.rows["quarantine"] = []

    def _add_bad(self, provenance: str, rule: str, reason: str) -> None:
        self.connection.execute(
            "INSERT INTO pairs (provenance, verdict, rule, reason) VALUES (?, 'bad', ?, ?)",
            (provenance, rule, printable(reason)),
        )


def _normalize(path: str) -> str:
    """Return what the spellings of a path have in common: a.jpg, ./a.jpg; x/a.jpg, x\\a.jpg. Bad paths stay apart."""
    parts = path.replace("\\", "/").split("/")
    return path if ".." in parts or path.startswith("/") else "/".join(part for part in parts if part not in ("", "."))
