"""Write WebDataset tars and the index next to them.

`<split>-00000000.tar`, ...: for each image, in the order of their ids, `<key>.json` (the image's ids, size and texts)
and, if models read them, `<key>.regions.safetensors` and the image file. `index-<split>.parquet`: one row per sample
and view, with the sample's text and the byte ranges of its image's members, so that training reads tars only for
regions and pixels. The same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.archive import REGIONS, encode_regions
from vlp_models.data.tables import RowGroups
from vlp_models.data.views import LOCATION, TABLES, VIEWS, View, index_columns

_LONGEST_KEY = 72  # with its extension a name fits into USTAR's 100 bytes

_LOCATION = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in LOCATION.items()])
LOCATION_COLUMNS = tuple(_LOCATION.names[1:])  # without the view


def index_schema() -> pa.Schema:
    """Return the schema of the index: where a sample's image is, then the columns of all views."""
    return pa.schema([*_LOCATION, *(pa.field(name, kind) for name, kind in index_columns().items())])


def view_schema(view: View) -> pa.Schema:
    """Return the columns of the index that a view has."""
    return pa.schema([*_LOCATION, *(pa.field(column.name, column.arrow_type) for column in view.indexed)])


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """Everything the shards store about one image. rows: view -> the image's rows of that canonical table."""

    image_id: str
    source: str
    width: int
    height: int
    regions: RegionArrays | None = None
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    pixels: bytes | None = None
    pixels_extension: str = ""  # png or jpg


def shard_name(split: str, number: int) -> str:
    """Return a shard's file name. Eight digits: names sort like numbers up to 100 million shards."""
    return f"{split}-{number:08d}.tar"


def index_name(split: str) -> str:
    return f"index-{split}.parquet"


def member_key(image_id: str) -> str:
    """Return an image's id as a member name: no dot, no slash, and distinct ids stay distinct."""
    # a dot would begin the extension
    key = quote(image_id, safe="").replace(".", "%2E").replace("~", "%7E")
    if len(key) <= _LONGEST_KEY:
        return key
    # a long key is cut; its hash keeps keys distinct
    return f"{key[:30]}-{hashlib.sha256(image_id.encode()).hexdigest()[:40]}"


class ShardWriter:
    """Write one split: call `add` for images in the order of their ids, then `close`.

    first: number of the first shard, if other writers write the ones before it (`join_parts`).
    """

    def __init__(self, directory: Path, split: str, images_per_shard: int, first: int = 0) -> None:
        self._directory = directory
        self._split = split
        self._images_per_shard = images_per_shard
        # `_next_shard` adds one before the first shard.
        self._number = first - 1
        self._tar: tarfile.TarFile | None = None
        self._in_shard = 0
        self._rows: list[dict[str, Any]] = []
        self._schema = index_schema()
        self._index = pq.ParquetWriter(directory / index_name(split), self._schema, compression="zstd")
        self._counts: Counter[str] = Counter(dict.fromkeys(VIEWS, 0) | {"regions": 0, "shards": 0})

    def add(self, record: ImageRecord) -> None:
        """Add one image with all its rows."""
        if self._tar is None or self._in_shard == self._images_per_shard:
            self._next_shard()
        key = member_key(record.image_id)
        # the view `images` has no table: its captions are those of the image
        references = [row["text"] for row in record.rows.get("captions", ())]
        rows: list[dict[str, Any]] = [{"view": "images", "sample_id": record.image_id, "captions": references}]
        texts: dict[str, Any] = {name: getattr(record, name) for name in ("image_id", "source", "width", "height")}
        for name, view in TABLES.items():
            samples = [view.index_row(row, record.width, record.height) for row in record.rows.get(name, ())]
            rows += [{"view": name} | sample for sample in samples]
            if samples:
                texts[name] = [{"id": sample.pop("sample_id"), **sample} for sample in samples]
        # in the tar: texts, pixels, regions. Streaming depends on the order of the last two
        content = json.dumps(texts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        self._write(f"{key}.json", content.encode())
        location: dict[str, Any] = {"pixels_offset": 0, "pixels_size": 0, "pixels_extension": record.pixels_extension}
        if record.pixels is not None:
            location["pixels_offset"], location["pixels_size"] = self._write(
                f"{key}.{record.pixels_extension}", record.pixels
            )
        location |= {"regions_offset": 0, "regions_size": 0}
        if record.regions is not None:
            location["regions_offset"], location["regions_size"] = self._write(
                f"{key}.{REGIONS}", encode_regions(record.regions, f"image {record.image_id}")
            )
            self._counts["regions"] += len(record.regions)
        location |= {"image_id": record.image_id, "source": record.source, "shard": self._number, "key": key}
        # one row per view and sample of the image, all with the image's location
        self._rows += [row | location for row in rows]
        self._counts.update(row["view"] for row in rows)
        self._in_shard += 1

    def add_without_image(self, view: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of a text-only view; they are in the index and in no tar."""
        no_image = {"image_id": "", "shard": -1, "key": "", "regions_offset": 0, "regions_size": 0}
        no_image |= {"pixels_offset": 0, "pixels_size": 0, "pixels_extension": ""}
        for row in rows:
            self._rows.append(VIEWS[view].index_row(row, 0, 0) | no_image | {"view": view, "source": row["source"]})
            self._counts[view] += 1

    def close(self) -> dict[str, int]:
        """Finish the last shard and the index; return the number of samples of each view, regions and shards."""
        self._end_shard()
        self._index.close()
        return dict(self._counts)

    def _next_shard(self) -> None:
        self._end_shard()
        self._number += 1
        self._in_shard = 0
        self._counts["shards"] += 1
        path = self._directory / shard_name(self._split, self._number)
        # USTAR: no extended headers, which `check_tar` refuses
        self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def _end_shard(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar = None
        if self._rows:
            # one row group per shard; columns of other views are null
            columns = {}
            for name in self._schema.names:
                columns[name] = [row.get(name) for row in self._rows]
            self._index.write_table(pa.Table.from_pydict(columns, schema=self._schema))
            self._rows = []

    def _write(self, name: str, data: bytes) -> tuple[int, int]:
        """Write one member; return the offset of its contents, and their size."""
        assert self._tar is not None
        info = tarfile.TarInfo(name)  # mtime, uid and gid 0, no user names
        info.size = len(data)
        info.mode = 0o644
        # The member's header comes first, then its contents.
        offset = self._tar.offset + tarfile.BLOCKSIZE
        self._tar.addfile(info, io.BytesIO(data))
        return offset, len(data)


class Parts(Protocol):
    """Folders of shards, whose number is known."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Path]: ...


def join_parts(directory: Path, split: str, parts: Parts) -> None:
    """Move the shards of all parts, folders filled by a `ShardWriter`, into `directory`, and join the indexes.

    Each part is one shard. Up to some 2,000 shards, the result is byte-equal to that of one writer.
    """
    schema = index_schema()
    with RowGroups(directory / index_name(split), schema, len(parts)) as index:
        for part in parts:
            rows = pq.read_table(part / index_name(split), schema=schema)
            # from Python objects, as one writer writes them: the bytes are equal
            index.write(pa.Table.from_pydict(rows.to_pydict(), schema=schema))
            for tar in part.glob("*.tar"):
                shutil.move(tar, directory / tar.name)
