"""Tables that don't fit memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlp_models.data import joins
from vlp_models.data.tables import BATCH_ROWS, open_parquet, read_batches
from vlp_models.errors import DataError

GROUPS, ROWS, WIDTH = 60, 16, 1 << 16  # 1 MB of noise a group


def test_read_batches_are_released(tmp_path: Path) -> None:
    """Arrow's own reader holds on to it, which a million pictures' prints (3 GB) would show in a worker."""
    noise = np.random.default_rng(0)
    path = tmp_path / "table.parquet"
    schema = pa.schema([("row", pa.int64()), ("print", pa.binary())])
    with pq.ParquetWriter(path, schema) as writer:
        for group in range(GROUPS):
            rows = [{"row": group * ROWS + n, "print": noise.bytes(WIDTH)} for n in range(ROWS)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    before = pa.total_allocated_bytes()
    rows: list[int] = []
    most = 0
    for batch in open_parquet(path).iter_batches(ROWS):
        rows += batch["row"].to_pylist()
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == list(range(GROUPS * ROWS)) and most < 8 << 20
    last, most = -1, 0
    for table in read_batches([path], ROWS):
        last, most = table["row"][-1].as_py(), max(most, pa.total_allocated_bytes() - before)
    assert last == GROUPS * ROWS - 1 and most < 8 << 20


MANY_ROWS = 300_000
SCHEMA = pa.schema([("row", pa.int64()), ("text", pa.string())])


def shuffled() -> Iterator[pa.Table]:
    order = np.random.default_rng(0).permutation(MANY_ROWS)
    for start in range(0, MANY_ROWS, BATCH_ROWS):
        rows = order[start : start + BATCH_ROWS]
        yield pa.table({"row": rows, "text": [f"{row:060d}" for row in rows]}, schema=SCHEMA)


@pytest.mark.slow
def test_interleaved_sorts_need_no_more_memory_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several open sorts hold the rows not yet returned, and four of these do not fit into 32 MB."""
    monkeypatch.setattr(joins, "MEMORY", "32MB")
    with joins.Database.within(tmp_path) as database:
        database.load("rows", shuffled(), SCHEMA)
        up, down = "SELECT * FROM rows ORDER BY row", "SELECT * FROM rows ORDER BY row DESC"
        rising, falling, *more = (database.stream(query) for query in (up, down, up, down))
        first = [next(stream) for stream in (rising, falling, *more)]
        found = {
            "rising": np.concatenate([first[0]["row"].to_numpy(), *(piece["row"].to_numpy() for piece in rising)]),
            "falling": np.concatenate([first[1]["row"].to_numpy(), *(piece["row"].to_numpy() for piece in falling)]),
        }
        assert (found["rising"] == np.arange(MANY_ROWS)).all()
        assert (found["falling"] == np.arange(MANY_ROWS)[::-1]).all()
        assert database.value("SELECT count(*) FROM duckdb_tables()") == 3, "`rows`, and two answers not yet read"
    assert not any(tmp_path.iterdir())


def test_an_error_of_the_rows_is_not_one_of_the_database(tmp_path: Path) -> None:
    def rows() -> Iterator[pa.Table]:
        yield pa.table({"a": [1]})
        raise DataError("captions.parquet: damaged")

    schema = pa.schema({"a": pa.int64()})
    with joins.Database.within(tmp_path) as database:
        with pytest.raises(DataError, match=r"^captions\.parquet: damaged$"):
            database.load("rows", rows(), schema)
        database.load("rows", [pa.table({"a": [1, 2]})], schema)
        assert database.value("SELECT count(*) FROM rows") == 2
