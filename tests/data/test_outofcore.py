"""Sorts of more rows than memory holds, read from beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vlp_models.data import joins as outofcore
from vlp_models.data.tables import BATCH_ROWS

ROWS = 300_000
SCHEMA = pa.schema([("row", pa.int64()), ("text", pa.string())])


def shuffled() -> Iterator[pa.Table]:
    order = np.random.default_rng(0).permutation(ROWS)
    for start in range(0, ROWS, BATCH_ROWS):
        rows = order[start : start + BATCH_ROWS]
        yield pa.table({"row": rows, "text": [f"{row:060d}" for row in rows]}, schema=SCHEMA)


def test_sorts_that_are_read_in_turns_need_no_more_memory_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open beside each other they hold what they have not handed out, and four of these do not fit into 32 MB."""
    monkeypatch.setattr(outofcore, "MEMORY", "32MB")
    with outofcore.Database.within(tmp_path) as database:
        database.load("rows", shuffled(), SCHEMA)
        up, down = "SELECT * FROM rows ORDER BY row", "SELECT * FROM rows ORDER BY row DESC"
        rising, falling, *more = (database.stream(query) for query in (up, down, up, down))
        first = [next(stream) for stream in (rising, falling, *more)]
        found = {
            "rising": np.concatenate([first[0]["row"].to_numpy(), *(piece["row"].to_numpy() for piece in rising)]),
            "falling": np.concatenate([first[1]["row"].to_numpy(), *(piece["row"].to_numpy() for piece in falling)]),
        }
        assert (found["rising"] == np.arange(ROWS)).all()
        assert (found["falling"] == np.arange(ROWS)[::-1]).all()
        assert database.value("SELECT count(*) FROM duckdb_tables()") == 3, "`rows`, and two answers not yet read"
    assert not any(tmp_path.iterdir())
