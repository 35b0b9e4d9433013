"""Tables that don't fit memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.data.tables import open_parquet, read_batches

GROUPS, ROWS, WIDTH = 60, 16, 1 << 16  # 1 MB of noise a group


def test_what_has_passed_is_let_go(tmp_path: Path) -> None:
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
