"""shards: the validated tables and the region features, packed for training."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.archive import check_tar
from vlp_models.data.features import FeatureStore
from vlp_models.data.shards import ImageRecord, ShardWriter
from vlp_models.data.tables import ID_COLUMN, SPLITS, read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.stages.workspace import (
    Workspace,
    measured,
    need,
    output_directory,
    write_manifest,
)

TEXT_TABLES = ("captions", "questions", "statements", "choices")


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/shards: tars and an index for each split, an empty index for a split without images.

    Raises:
        DataError: an image has no entry in data/features, or (with `shards.pixels`) no readable file.
        ParamsError: `images_per_shard` below 1.
    """
    p = params.shards
    if p.images_per_shard < 1:
        raise ParamsError(f"params.yaml: `shards.images_per_shard: {p.images_per_shard}`; at least 1")
    with measured(workspace, "shards"):
        validated = need(workspace.validated, "validate")
        store = FeatureStore(need(workspace.features, "features"))
        images = read_table("images", validated)
        _check_features(images, store, workspace)
        tables = {name: read_table(name, validated) for name in TEXT_TABLES}
        counts = {}
        with output_directory(workspace.shards) as directory:
            for split in SPLITS:
                writer = ShardWriter(directory, split, p.images_per_shard)
                of_split = images.filter(pc.equal(images["split"], split)).sort_by("image_id")
                for record in _progress(_records(of_split, tables, p.images_per_shard), len(of_split), split):
                    pixels = _read_pixels(workspace.root / record["path"]) if p.pixels else (None, "")
                    writer.add(
                        ImageRecord(
                            image_id=record["image_id"],
                            source=record["source"],
                            width=record["width"],
                            height=record["height"],
                            regions=store.get(record["image_id"]),
                            captions=record["captions"],
                            questions=record["questions"],
                            statements=record["statements"],
                            choices=record["choices"],
                            pixels=pixels[0],
                            pixels_extension=pixels[1],
                        )
                    )
                counts[split] = writer.close()
            for tar in sorted(directory.glob("*.tar")):
                check_tar(tar)
            write_manifest(
                directory,
                stage="shards",
                params=to_plain(p),
                counts=counts,
                sources=sorted(pc.unique(images["source"]).to_pylist()),
                feature_dim=store.feature_dim,
                classes=store.classes,
                num_classes=len(store.classes),
                detector_id=store.detector_id,
            )
    for split, n in counts.items():
        print(f"shards {split}: " + ", ".join(f"{count:,} {name}" for name, count in n.items() if count))


def _check_features(images: pa.Table, store: FeatureStore, workspace: Workspace) -> None:
    missing = [image_id for image_id in images["image_id"].to_pylist() if image_id not in store]
    if missing:
        raise DataError(
            f"{workspace.features}: no features for {len(missing):,} of {len(images):,} images, such as "
            f"{', '.join(sorted(missing)[:3])}; `dvc repro features` makes them, or import the missing ones"
        )


def _records(images: pa.Table, tables: dict[str, pa.Table], block: int) -> Iterator[dict[str, Any]]:
    """Each row of `images` with its captions, questions, statements and choices; `block` images are held at a time."""
    grouped = {name: _group(table, images["image_id"], ID_COLUMN[name]) for name, table in tables.items()}
    for start in range(0, len(images), block):
        rows = images.slice(start, block).to_pylist()
        for row in rows:
            row.update({name: [] for name in tables})
        for name, (table, position) in grouped.items():
            first, last = np.searchsorted(position, [start, start + len(rows)])
            for place, text in zip(position[first:last], table.slice(first, last - first).to_pylist(), strict=True):
                rows[place - start][name].append(text)
        yield from rows


def _group(table: pa.Table, image_ids: pa.ChunkedArray, id_column: str) -> tuple[pa.Table, np.ndarray]:
    """The rows of these images, in the images' order and then by id; and for each the place of its image."""
    position = pc.index_in(table["image_id"], value_set=image_ids.combine_chunks())
    kept = pc.is_valid(position)
    table = table.filter(kept).append_column("_image", position.filter(kept))
    table = table.sort_by([("_image", "ascending"), (id_column, "ascending")])
    return table, table["_image"].to_numpy()


def _read_pixels(path: Path) -> tuple[bytes, str]:
    """The image file as it is where it is a PNG or a JPEG; else (WebP, GIF, BMP) as a PNG."""
    from PIL import Image

    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:  # validate has checked its size
            if image.format in ("PNG", "JPEG"):
                return data, {"PNG": "png", "JPEG": "jpg"}[image.format]
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "PNG")
            return buffer.getvalue(), "png"
    except OSError as error:
        raise DataError(f"{path}: {error}; it was readable at `validate`: `dvc repro validate`") from None


def _progress(records: Iterator[dict[str, Any]], total: int, split: str) -> Iterator[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import track

    yield from track(
        records,
        description=f"packing {split}",
        total=total,
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
