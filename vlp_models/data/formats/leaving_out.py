"""Tables without what they hold of some images: their rows of every view, their boxes, their lines of ground truth."""

from __future__ import annotations

from collections.abc import Set

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.formats.base import Row, Rows, Tables
from vlp_models.data.tables import HELD, SCHEMAS, TableWriter, read_batches
from vlp_models.data.views import OTHER_IMAGES

BEFORE = ".whole.parquet"


def leave_out(tables: Tables, images: Set[str]) -> int:
    """Takes out every row of these images, and of pairs of which one is among them, but for the table `images`, whose
    rows are the caller's. Returns how many there were."""
    count = 0
    for name, schema in SCHEMAS.items():
        if name == "images" or "image_id" not in schema.names:
            continue
        before = len(tables[name])
        tables.rows[name] = _without(name, tables, images)
        count += before - len(tables[name])
    tables.keep_truth(lambda image: image not in images)
    return count


def _without(name: str, tables: Tables, images: Set[str]) -> Rows:
    rows = tables[name]
    if not isinstance(rows, TableWriter):
        return [row for row in rows if images.isdisjoint(_images_of(row))]
    rows.close()
    whole = rows.path.rename(rows.path.with_name(BEFORE))
    kept = TableWriter(name, rows.path.parent)
    for batch in read_batches([whole], HELD):
        kept.write(batch.filter(pc.invert(_names(batch, images))))
    kept.close()
    whole.unlink()
    return kept


def _images_of(row: Row) -> list[str]:
    return [row["image_id"], *(row.get(OTHER_IMAGES.name) or ())]


def _names(batch: pa.Table, images: Set[str]) -> pa.Array:
    """Which rows are about one of the images."""
    found = pc.is_in(batch["image_id"], value_set=pa.array(sorted(images), pa.string()))
    if OTHER_IMAGES.name not in batch.column_names:
        return found
    others = [not images.isdisjoint(names or ()) for names in batch[OTHER_IMAGES.name].to_pylist()]
    return pc.or_(found, pa.chunked_array([others], pa.bool_()))
