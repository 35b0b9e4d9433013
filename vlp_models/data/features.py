"""Region features on disk: chunks of images, an index and a manifest (docs/reference/tables.md, "Features").

A chunk lists its images in its header, so the index can be rebuilt from finished chunks after an interruption. The same
regions give the same bytes.

data/features is a DVC output and deleted before its stage starts. `cache_features` keeps its chunks as hard links,
which take no space, so that the next run extracts only the regions of new images.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vlp_models.common.io import atomic_write, link_or_copy, output_directory
from vlp_models.common.limits import check_numbers
from vlp_models.data.mapped import SortedRows
from vlp_models.data.sample import REGION_DTYPES, RegionArrays
from vlp_models.data.tables import RowGroups, TableWriter
from vlp_models.errors import DataError

CHUNK_IMAGES = 512
INDEX_SCHEMA = pa.schema(
    [("image_id", pa.string()), ("chunk", pa.int32()), ("start", pa.int32()), ("count", pa.int32())]
)
_IMAGES = "images"  # the only header entry: safetensors does not keep the order of several


def chunk_name(number: int) -> str:
    """Return a chunk's file name. Eight digits: names sort like numbers up to 100 million chunks."""
    return f"features-{number:08d}.safetensors"


def write_chunk(directory: Path, number: int, images: Sequence[tuple[str, RegionArrays]]) -> Path:
    """Write one chunk atomically.

    Raises:
        DataError: a value is not finite (float16 ends at 65504), boxes leave [0, 1], or the images differ in F or C.
    """
    for image_id, regions in images:
        _check(image_id, regions, images[0][1])
    arrays = {}
    for name, dtype in REGION_DTYPES.items():
        rows = np.concatenate([getattr(regions, name) for _, regions in images])  # of all images, one after the other
        arrays[name] = np.ascontiguousarray(rows, dtype=dtype)
    # rows of the chunk are found by adding up the counts
    listing = [[image_id, len(regions)] for image_id, regions in images]
    path = directory / chunk_name(number)
    with atomic_write(path) as temporary:
        save_file(arrays, temporary, metadata={_IMAGES: json.dumps(listing, ensure_ascii=False)})
    return path


def write_index(directory: Path) -> dict[str, int]:
    """Write index.parquet from the chunks in `directory`; return the number of images, regions and chunks."""
    images = regions = 0
    paths = sorted(directory.glob("features-*.safetensors"))
    with RowGroups(directory / "index.parquet", INDEX_SCHEMA, len(paths)) as index:
        for number, path in enumerate(paths):
            if path.name != chunk_name(number):
                raise DataError(f"{directory}: {chunk_name(number)} is missing; run `dvc repro features`")
            rows, start = [], 0
            for image_id, count in read_listing(path):
                rows.append({"image_id": image_id, "chunk": number, "start": start, "count": count})
                start += count
            index.write(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
            # after the loop, `start` is the number of the chunk's regions
            images, regions = images + len(rows), regions + start
    return {"images": images, "regions": regions, "chunks": len(paths)}


def read_listing(path: Path) -> list[tuple[str, int]]:
    """Return the images of a chunk and their numbers of regions, in the order of its rows.

    Raises:
        DataError: not a chunk, or damaged.
    """
    with _open(path) as chunk:
        try:
            # The header's only entry: a list of [image id, number of regions], in the order of the rows.
            listing = [(str(image_id), int(count)) for image_id, count in json.loads((chunk.metadata() or {})[_IMAGES])]
            rows = chunk.get_slice("features").get_shape()[0]
        except (KeyError, IndexError, ValueError, TypeError, RecursionError, SafetensorError):
            raise DataError(f"{path}: not a features chunk; delete it and run `dvc repro features`") from None
    if sum(count for _, count in listing) != rows:
        raise DataError(f"{path}: its listing does not match its {rows} rows; delete it and run `dvc repro features`")
    return listing


class FeatureStore:
    """Reads data/features. Chunks are memory-mapped; `get` copies one image's rows.

    A large index is memory-mapped, next to `directory` (mapped.py).

    Args:
        directory: a finished data/features.

    Raises:
        DataError: an incomplete directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            check_numbers(manifest)
            self.detector_id: str = manifest["detector_id"]
            self.feature_dim: int = manifest["feature_dim"]
            self.classes: list[str] = manifest["classes"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{path}: not a manifest of features: {error}; run `dvc repro features`") from None
        try:
            # image id -> chunk, first row and number of regions
            self._rows = SortedRows.open(directory / "index.parquet", "image_id", INDEX_SCHEMA)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise DataError(f"{directory / 'index.parquet'}: {error}; run `dvc repro features`") from None
        self._chunks: dict[int, Any] = {}

    def __contains__(self, image_id: str) -> bool:
        return self._rows.find(image_id) is not None

    def get(self, image_id: str) -> RegionArrays:
        """Return the regions of one image, most confident first; possibly none.

        Raises:
            DataError: the image has no entry, or its chunk is missing or damaged.
        """
        row = self._rows.find(image_id)
        if row is None:
            raise DataError(f"{self._directory}: no features for image {image_id}; run `dvc repro features`")
        number, start, count = row["chunk"], row["start"], row["count"]
        # chunks stay open: they are memory-mapped
        if number not in self._chunks:
            self._chunks[number] = _open(self._directory / chunk_name(number)).__enter__()
        chunk = self._chunks[number]
        try:
            regions = RegionArrays(**{name: _rows(chunk, name, start, count) for name in REGION_DTYPES})
            if any(len(getattr(regions, name)) != count for name in REGION_DTYPES):
                raise ValueError(f"the index lists {count} regions of {image_id}, the chunk has fewer")
            return regions
        except (SafetensorError, ValueError, TypeError) as error:
            raise DataError(f"{self._directory / chunk_name(number)}: {error}; run `dvc repro features`") from None


def _rows(chunk: Any, name: str, start: int, count: int) -> np.ndarray:
    rows = chunk.get_slice(name)
    if count == 0:  # safetensors rejects an empty slice at the end
        return np.zeros((0, *rows.get_shape()[1:]), dtype=REGION_DTYPES[name])
    return rows[start : start + count]


def _check(image_id: str, regions: RegionArrays, first: RegionArrays) -> None:
    for name, dtype in REGION_DTYPES.items():
        array = getattr(regions, name)
        if len(array) != len(regions) or array.shape[1:] != getattr(first, name).shape[1:]:
            raise DataError(
                f"image {image_id}: {name} has shape {list(array.shape)}, features {list(regions.features.shape)},"
                f" and {list(getattr(first, name).shape)} for the chunk's first image"
            )
        # a value beyond float16 would become infinite
        if not np.isfinite(array).all() or np.abs(array).max(initial=0) > np.finfo(dtype).max:
            raise DataError(
                f"image {image_id}: {name} has non-finite values, or values beyond the {np.dtype(dtype).name} "
                "range; check the file"
            )
    if regions.boxes.size and (regions.boxes.min() < 0 or regions.boxes.max() > 1):
        raise DataError(f"image {image_id}: boxes must be fractions of width and height, 0 to 1")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: missing or damaged ({error}); run `dvc repro features`") from None


HASHES = "hashes.parquet"  # image_id, sha256 of the image file
_HASHES_SCHEMA = pa.schema([("image_id", pa.string()), ("sha256", pa.string())])


class FeatureCache:
    """The features that `cache_features` put into `directory`, by image content; empty if it is missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self._ids: SortedRows | None = None
        try:
            self._store = FeatureStore(directory)
            self._ids = SortedRows.open(directory / HASHES, "sha256", _HASHES_SCHEMA)
        except (OSError, pa.ArrowException, ValueError, DataError):
            return

    def get(self, sha256: str) -> RegionArrays | None:
        """Return the regions of the image with this hash; None if they are unknown or cannot be read."""
        row = self._ids.find(sha256) if self._ids is not None else None
        if row is None:
            return None
        try:
            return self._store.get(row["image_id"])
        except DataError:
            return None


def cache_features(features: Path, images: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Keep a finished data/features for the next run, and delete those of other detectors next to `directory`.

    Args:
        images: rows of the images table.
    """
    # The folder is replaced as a whole, so a killed run leaves the previous cache.
    with output_directory(directory) as new:
        for path in features.iterdir():
            link_or_copy(path, new / path.name)
        with TableWriter(HASHES.removesuffix(".parquet"), new, _HASHES_SCHEMA) as hashes:
            hashes.extend({"image_id": row["image_id"], "sha256": row["sha256"]} for row in images if row["sha256"])
    # only the features of the last detector are kept
    for other in directory.parent.iterdir():
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
