"""Facts about a row that depend on other rows: repeated ids, captions and images, and the state of its images.

DuckDB joins compute them on disk (data/joins.py); they are returned in row order, a batch at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlp_models.curation.validation.text import caption_key
from vlp_models.data.joins import Database, RowCursor
from vlp_models.data.tables import BATCH_ROWS, ID_COLUMN, SCHEMAS, SPLITS, read_batches
from vlp_models.data.views import OTHER_IMAGES

Row = dict[str, Any]


@dataclass
class CrossFacts:
    """Facts about the rows of one batch that depend on other rows.

    columns      row number -> those of the columns `id_of`, `same_as`, `also_in` that are not empty
    images       the valid images that the rows name, by id: split, width, height
    quarantined  ids of the images they name that are in quarantine
    """

    columns: dict[int, Row] = field(default_factory=dict)
    images: dict[str, Row] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)


_SPLIT_RANK = "CASE split " + " ".join(f"WHEN '{name}' THEN {rank}" for rank, name in enumerate(SPLITS)) + " END"

# The second and later rows of an id, each with the provenance of the first.
_REPEATED = """
    CREATE OR REPLACE TABLE repeated AS
    WITH ids AS (SELECT id, min(row) AS first FROM here GROUP BY id HAVING count(*) > 1)
    SELECT h.row, o.provenance AS id_of
    FROM here h JOIN ids ON h.id IS NOT DISTINCT FROM ids.id AND h.row <> ids.first JOIN here o ON o.row = ids.first
"""
# Repeated ids are reported once, by `id_of`: such rows take no part in the comparison of captions.
_SAME_AS = """
    WITH alone AS (SELECT * FROM here h ANTI JOIN repeated r ON h.row = r.row WHERE h.key IS NOT NULL),
    keys AS (SELECT key, min(row) AS first FROM alone GROUP BY key HAVING count(*) > 1)
    SELECT a.row, 'same_as' AS kind, o.id AS value
    FROM alone a JOIN keys ON a.key = keys.key AND a.row <> keys.first JOIN here o ON o.row = keys.first
"""
# Byte-equal images in two splits: the copy in the higher split (train < val < test) stays, the other goes.
_ALSO_IN = f"""
    WITH known AS (
        SELECT h.*, {_SPLIT_RANK} AS rank FROM here h ANTI JOIN repeated r ON h.row = r.row
        WHERE h.sha256 <> '' AND {_SPLIT_RANK} IS NOT NULL
    ),
    tops AS (SELECT sha256, max(rank) AS top FROM known GROUP BY sha256 HAVING min(rank) <> max(rank)),
    kept AS (
        SELECT k.sha256, min(k.row) AS first FROM known k JOIN tops t ON k.sha256 = t.sha256 AND k.rank = t.top
        GROUP BY k.sha256
    )
    SELECT k.row, 'also_in' AS kind, o.split || ' as ' || coalesce(o.id, 'None') AS value
    FROM known k JOIN tops t ON k.sha256 = t.sha256 AND k.rank < t.top
    JOIN kept ON k.sha256 = kept.sha256 JOIN here o ON o.row = kept.first
"""
_ID_OF = "SELECT row, 'id_of' AS kind, id_of AS value FROM repeated"
_IMAGES = """
    SELECT m.row, m.name, g.split, g.width, g.height, g.image_id IS NOT NULL AS good, b.marked IS NOT NULL AS bad
    FROM mentions m LEFT JOIN good g ON m.name = g.image_id LEFT JOIN bad b ON m.name IS NOT DISTINCT FROM b.name
    ORDER BY m.row
"""
_MENTIONS = "SELECT row, image_id AS name FROM here"
_ALL_MENTIONS = f"{_MENTIONS} UNION ALL SELECT row, unnest({OTHER_IMAGES.name}) AS name FROM here"


class Crossing:
    """Computes `CrossFacts` in one run of `validate`: table after table, images first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    @contextmanager
    def within(cls, directory: Path) -> Iterator[Crossing]:
        with Database.within(directory) as database:
            yield cls(database)

    def load_images(self, good: Path, quarantine: Path) -> None:
        """Load the valid images and the quarantine, which the rows of later tables refer to."""
        # valid images with what rules of other tables need
        columns = ["image_id", "split", "width", "height"]
        schema = pa.schema([SCHEMAS["images"].field(name) for name in columns])
        self._database.load("good", read_batches([good], BATCH_ROWS, columns), schema)
        bad = pa.schema([("row_id", pa.string())])
        self._database.load("bad_rows", read_batches([quarantine], BATCH_ROWS, ["row_id"]), bad)
        self._database.run("CREATE TABLE bad AS SELECT DISTINCT row_id AS name, true AS marked FROM bad_rows")

    def facts(self, table: str, sources: list[Path], size: int) -> Iterator[CrossFacts]:
        """Yield the facts of each batch of `size` rows of one table's files, in order."""
        # the table's rows, numbered over all files, without columns that no query needs
        columns = [name for name in _COLUMNS if name in SCHEMAS[table].names]
        extra = [pa.field("row", pa.int64()), pa.field("id", pa.string()), *_EXTRA.get(table, [])]
        schema = pa.schema([*(SCHEMAS[table].field(name) for name in columns), *extra])
        self._database.load("here", _with_keys(table, sources), schema)
        self._database.run(_REPEATED)
        # facts of rows by number, and the images that rows name with their state
        queries = {"images": f"{_ID_OF} UNION ALL ({_ALSO_IN})", "captions": f"{_ID_OF} UNION ALL ({_SAME_AS})"}
        rows = RowCursor(self._database.stream(f"SELECT * FROM ({queries.get(table, _ID_OF)}) ORDER BY row"))
        named = RowCursor(iter(()))
        if table != "images" and "image_id" in columns:
            mentions = _ALL_MENTIONS if OTHER_IMAGES.name in columns else _MENTIONS
            self._database.run(f"CREATE OR REPLACE VIEW mentions AS {mentions}")
            named = RowCursor(self._database.stream(_IMAGES))
        count = self._database.value("SELECT count(*) FROM here")
        assert isinstance(count, int)
        for start in range(0, count, size):
            # both cursors are sorted by row: take what belongs to this batch
            facts = CrossFacts()
            for entry in rows.before(start + size):
                facts.columns.setdefault(entry["row"], {})[entry["kind"]] = entry["value"]
            for entry in named.before(start + size):
                if entry["good"]:
                    facts.images[entry["name"]] = {name: entry[name] for name in ("split", "width", "height")}
                elif entry["bad"]:
                    facts.quarantined.add(entry["name"])
            yield facts


_COLUMNS = ("image_id", OTHER_IMAGES.name, "provenance", "sha256", "split")
_EXTRA = {"captions": [pa.field("key", pa.binary())]}


def _with_keys(table: str, sources: list[Path]) -> Iterator[pa.Table]:
    """Yield the rows with their number over all files and their id; captions also with a key of equal captions."""
    start = 0
    for rows in read_batches(sources, BATCH_ROWS):
        number = pa.array(range(start, start + len(rows)), pa.int64())
        start += len(rows)
        rows = rows.append_column("row", number).append_column("id", rows[ID_COLUMN[table]])
        if table == "captions":
            # equal captions of one image have one key; a missing text equals no other
            keys: list[bytes | None] = []
            for image_id, text in zip(rows["image_id"].to_pylist(), rows["text"].to_pylist(), strict=True):
                caption = None if text is None else repr((image_id, caption_key(text))).encode()
                keys.append(None if caption is None else hashlib.blake2b(caption, digest_size=16).digest())
            rows = rows.append_column("key", pa.array(keys, pa.binary()))
        yield rows
