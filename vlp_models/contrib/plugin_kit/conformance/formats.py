"""Checks of a reader's tables: `vlp try FORMAT --root FOLDER` prints their results. No image is opened."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa

from vlp_models.contrib.plugin_kit.conformance.checks import Problem, Result, run_check, shorten_names
from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Row, Tables, extracted_in
from vlp_models.data.tables import ID_COLUMN, SCHEMAS, SPLITS
from vlp_models.data.views import OTHER_IMAGES
from vlp_models.params import DatasetParams

NAME = "try"  # of the dataset: ids start with it
QUARANTINED = 3  # records that are printed


def try_format(params: DatasetParams, base: Path) -> Iterator[Result]:
    """Read a folder, and yield the result for each table that has rows, and for the quarantine.

    Images inside other files are copied to a temporary folder.

    Args:
        base: the folder that `params.root` is relative to.
    """
    tables = Tables()
    with tempfile.TemporaryDirectory(prefix="vlp-try-") as extracted:

        def read() -> str:
            nonlocal tables
            # Readers that unpack images from other files write them to this folder.
            with extracted_in(Path(extracted), write=True):
                tables = read_source(NAME, params, base)
            counts = {name: len(tables[name]) for name in SCHEMAS if name != "quarantine" and len(tables[name])}
            if not counts:
                raise Problem("no table has a row; name the files with --set, or check the folder")
            return ", ".join(f"{count:,} {name}" for name, count in counts.items())

        yield run_check("reads", read)
        for name in SCHEMAS:
            if name != "quarantine" and len(tables[name]):
                yield run_check(name, partial(check_table, tables, name))
        if count := len(tables["quarantine"]):
            rows = islice(tables["quarantine"], QUARANTINED)
            lines = [f"{row['provenance']}: {row['rule']}: {row['reason']}" for row in rows]
            detail = "\n  ".join([f"{count:,} record{'s' if count > 1 else ''}", *lines])
            yield Result(check="quarantine", detail=detail)


def check_table(tables: Tables, name: str) -> str:
    """Check a table's rows, and return their number in each split."""
    rows = list(tables[name])
    id_column, schema = ID_COLUMN[name], SCHEMAS[name]
    for row in rows:
        if unknown := sorted(set(row) - set(schema.names)):
            raise Problem(f"a row has {shorten_names(unknown)}, which {name} does not have: {', '.join(schema.names)}")
        try:
            # One row at a time, so that the message can name it.
            pa.Table.from_pylist([row], schema=schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise Problem(f"row {row.get(id_column)}: a value has another type: {error}") from None
        if not row.get(id_column) or not row.get("provenance"):
            raise Problem(f"row {row!r:.80}: `{id_column}` and `provenance` are required")
    split_of = {row["image_id"]: row["split"] for row in tables["images"]}
    if name == "images":
        _check_images(rows)
    else:
        repeated = [key for key, count in Counter(row[id_column] for row in rows).items() if count > 1]
        if repeated:
            raise Problem(f"{id_column} {repeated[0]} occurs twice; ids are unique in a dataset")
        # Tables of texts have no images to check.
        for row in rows if "image_id" in schema.names else ():
            for image_id in (row["image_id"], *(row.get(OTHER_IMAGES.name) or ())):
                if image_id not in split_of:
                    raise Problem(f"{row[id_column]} names the image {image_id}, which is not in `images`")
    # A row has the split of its image unless it has its own.
    counts = Counter(row["split"] if "split" in row else split_of[row["image_id"]] for row in rows)
    return ", ".join(f"{split} {counts[split]:,}" for split in SPLITS if counts[split])


def _check_images(rows: list[Row]) -> None:
    for row in rows:
        if row["split"] not in SPLITS:
            raise Problem(f"{row['image_id']}: split {row['split']!r} is not one of {', '.join(SPLITS)}")
    missing = [row for row in rows if not Path(row["path"]).exists()]
    if missing:
        raise Problem(f"{len(missing):,} of {len(rows):,} image files do not exist, such as {missing[0]['path']}")
