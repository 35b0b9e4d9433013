"""shards: the validated tables and the region features, packed for training.

Each shard is a part that any process can make; finished ones wait under .work, and after an interruption only the
others are made. The result does not depend on who made them.
"""

from __future__ import annotations

import functools
import io
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.archive import check_tar
from vlp_models.data.features import FeatureStore
from vlp_models.data.shards import ImageRecord, ShardWriter, join_parts
from vlp_models.data.tables import SPLITS, read_table
from vlp_models.data.views import TABLES, VIEWS
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.workspace.mapper import LocalMapper, Mapper
from vlp_models.workspace.paths import (
    Workspace,
    fingerprint,
    measured,
    need,
    output_directory,
    read_json,
    write_json,
    write_manifest,
)


def run(params: Params, workspace: Workspace, key: str = "", mapper: Mapper | None = None) -> None:
    """Writes data/shards: tars and an index for each split, an empty index for a split without images.

    Args:
        mapper: who makes the shards; by default `cluster.workers` processes.

    Raises:
        DataError: an image has no entry in data/features, or (with `shards.pixels`) no readable file.
        ParamsError: `images_per_shard` below 1.
    """
    p = params.shards
    if p.images_per_shard < 1:
        raise ParamsError(f"params.yaml: `shards.images_per_shard: {p.images_per_shard}`; at least 1")
    mapper = mapper or LocalMapper(params.cluster.workers)
    with measured(workspace, "shards"):
        validated = need(workspace.validated, "validate")
        store = FeatureStore(need(workspace.features, "features"))
        images = read_table("images", validated)
        _check_features(images, store, workspace)
        tables = {name: read_table(name, validated) for name, view in TABLES.items() if view.has_image}
        texts = {name: read_table(name, validated) for name, view in TABLES.items() if not view.has_image}
        work = _work(workspace, to_plain(p))
        make = functools.partial(
            _make_shard, root=workspace.root, features=workspace.features, work=work, pixels=p.pixels
        )
        counts: dict[str, dict[str, int]] = {}
        with output_directory(workspace.shards) as directory:
            every = chain.from_iterable(_shards(images, tables, split, p.images_per_shard) for split in SPLITS)
            names = list(mapper.map(make, every))
            for split in SPLITS:
                parts = [work / name for name in names if name.startswith(f"{split}-")]
                parts += _without_images(texts, split, work)
                counts[split] = _total(parts)
                join_parts(directory, split, parts)
            write_manifest(
                directory,
                stage="shards",
                params=to_plain(p),
                counts=counts,
                sources=sorted(
                    {name for table in (images, *texts.values()) for name in table["source"].unique().to_pylist()}
                ),
                feature_dim=store.feature_dim,
                classes=store.classes,
                num_classes=len(store.classes),
                detector_id=store.detector_id,
            )
        shutil.rmtree(work)
    for split, n in counts.items():
        print(f"shards {split}: " + ", ".join(f"{count:,} {name}" for name, count in n.items() if count))


Shard = tuple[str, int, list[dict[str, Any]]]  # split, number, the images' rows with their texts
COUNTS = "counts.json"


def _work(workspace: Workspace, settings: dict[str, Any]) -> Path:
    """Where finished shards wait. The chunks of features are told apart by size and time: there may be terabytes."""
    chunks = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in workspace.features.glob("*.safetensors"))
    inputs = {"validated": workspace.validated, "features": workspace.features / "manifest.json"}
    return workspace.work("shards", fingerprint({"shards": settings, "chunks": chunks}, inputs))


def _shards(images: pa.Table, tables: dict[str, pa.Table], split: str, size: int) -> Iterator[Shard]:
    of_split = images.filter(pc.equal(images["split"], split)).sort_by("image_id")
    records = _progress(_records(of_split, tables, size), len(of_split), split)
    number = 0
    while rows := list(islice(records, size)):
        yield split, number, rows
        number += 1


def _make_shard(shard: Shard, *, root: Path, features: Path, work: Path, pixels: bool) -> str:
    """Makes one shard with its index, unless `work` has it; returns its folder's name there."""
    split, number, records = shard
    part = work / f"{split}-{number:05d}"
    if part.exists():
        return part.name
    store = _store(features, (features / "manifest.json").stat().st_mtime_ns)
    with output_directory(part) as directory:
        writer = ShardWriter(directory, split, len(records), first=number)
        for record in records:
            data, extension = _read_pixels(root / record["path"]) if pixels else (None, "")
            writer.add(
                ImageRecord(
                    image_id=record["image_id"],
                    source=record["source"],
                    width=record["width"],
                    height=record["height"],
                    regions=store.get(record["image_id"]),
                    rows=record["rows"],
                    pixels=data,
                    pixels_extension=extension,
                )
            )
        write_json(directory / COUNTS, writer.close())
        for tar in directory.glob("*.tar"):
            check_tar(tar)
    return part.name


def _without_images(tables: Mapping[str, pa.Table], split: str, work: Path) -> list[Path]:
    """One more part, an index alone, for the rows that no image belongs to; none where there are none."""
    chosen = {name: table.filter(pc.equal(table["split"], split)) for name, table in tables.items()}
    if not any(len(table) for table in chosen.values()):
        return []
    part = work / f"{split}-texts"
    with output_directory(part) as directory:
        writer = ShardWriter(directory, split, 1)
        for name, table in chosen.items():
            writer.add_without_image(name, table.sort_by(TABLES[name].id_column).to_pylist())
        write_json(directory / COUNTS, writer.close())
    return [part]


@functools.lru_cache(maxsize=1)
def _store(features: Path, changed: int) -> FeatureStore:
    """Opened once a process, not once a shard."""
    return FeatureStore(features)


def _total(parts: Iterable[Path]) -> dict[str, int]:
    total = Counter(dict.fromkeys((*VIEWS, "regions", "shards"), 0))
    for part in parts:
        total.update(read_json(part / COUNTS))
    return dict(total)


def _check_features(images: pa.Table, store: FeatureStore, workspace: Workspace) -> None:
    missing = [image_id for image_id in images["image_id"].to_pylist() if image_id not in store]
    if missing:
        raise DataError(
            f"{workspace.features}: no features for {len(missing):,} of {len(images):,} images, such as "
            f"{', '.join(sorted(missing)[:3])}; `dvc repro features` makes them, or import the missing ones"
        )


def _records(images: pa.Table, tables: dict[str, pa.Table], block: int) -> Iterator[dict[str, Any]]:
    """Each row of `images` with its rows of every table under `rows`; `block` images are held at a time."""
    grouped = {name: _group(table, images["image_id"], TABLES[name].id_column) for name, table in tables.items()}
    for start in range(0, len(images), block):
        rows = images.slice(start, block).to_pylist()
        for row in rows:
            row["rows"] = {name: [] for name in tables}
        for name, (table, position) in grouped.items():
            first, last = np.searchsorted(position, [start, start + len(rows)])
            for place, text in zip(position[first:last], table.slice(first, last - first).to_pylist(), strict=True):
                rows[place - start]["rows"][name].append(text)
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
