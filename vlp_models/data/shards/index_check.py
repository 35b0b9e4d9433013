"""Whether an index of shards can be true, before a sample is read by it.

Vectorised: an index has one row a sample. Where its images lie is looked at again in the tar itself (archive.py).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.shards.archive import BLOCK, KEY

KINDS = ("regions", "pixels")


def check_index(table: pa.Table) -> None:
    """
    Args:
        table: rows of the index with the columns that say where the image lies (`PLACE_COLUMNS`).

    Raises:
        ValueError: says which column can't be, and in which row.
    """
    table.validate(full=True)  # offsets of strings and lists, UTF-8
    places = [f"{kind}_{what}" for kind in KINDS for what in ("offset", "size")]
    for name in ("sample_id", "image_id", "source", "shard", "key", "pixels_extension", *places):
        if table[name].null_count:
            raise ValueError(f"row {_first(pc.is_null(table[name]))}: no `{name}`")
    _refuse(table, "shard", pc.less(table["shard"], -1), "is no shard's number")
    _refuse(table, "key", pc.invert(pc.match_substring_regex(table["key"], f"^{KEY}*$")), "is no member's name")
    known = pc.is_in(table["pixels_extension"], value_set=pa.array(["", "png", "jpg"]))
    _refuse(table, "pixels_extension", pc.invert(known), "is none of png, jpg")
    for kind in KINDS:
        offset, size = table[f"{kind}_offset"], table[f"{kind}_size"]
        _refuse(table, f"{kind}_size", pc.less(size, 0), "is negative")
        before = pc.and_(pc.greater(size, 0), pc.less(offset, BLOCK))
        _refuse(table, f"{kind}_offset", before, "is before the first member")


def _refuse(table: pa.Table, column: str, bad: pa.ChunkedArray, why: str) -> None:
    if pc.any(bad).as_py():
        row = _first(bad)
        raise ValueError(f"row {row}: `{column}` {str(table[column][row])[:60]!r} {why}")


def _first(bad: pa.ChunkedArray) -> int:
    found: int = pc.index(bad, True).as_py()
    return found
