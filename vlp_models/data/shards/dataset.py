"""The shards as a map-style dataset: sample i of a view, read from the offsets in the index.

Texts and offsets are columns of Arrow (shards/index.py); regions and pixels are read from the tar on demand. Worker
processes share both with their parent, so memory does not grow with their number. If shards are streamed, images come
by the block (contrib/streaming), from a folder or an object store; the index is always the one in data/shards.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import Dataset

from vlp_models.common.limits import check_numbers
from vlp_models.data.sample import Sample, SampleImage
from vlp_models.data.shards import streaming
from vlp_models.data.shards.archive import BLOCK, REGIONS, decode, padded, read_member
from vlp_models.data.shards.contents import part_of
from vlp_models.data.shards.index import PIECE, Index, read_index
from vlp_models.data.shards.order import sample_numbers
from vlp_models.data.shards.write import LOCATION_COLUMNS, index_name, shard_name
from vlp_models.data.views import OTHER_IMAGES, VIEWS
from vlp_models.errors import DataError, ParamsError, first_line
from vlp_models.params import StreamParams

_WAYS_OUT = {
    "regions": "no model read any when they were made; add this one to `models` in params.yaml, `dvc repro shards`",
    "pixels": "set `shards.pixels: true` (or auto, with the model in `models`) and run `dvc repro shards`",
}


@dataclass(frozen=True, kw_only=True)
class ShardsManifest:
    """What a model must know about the shards.

    classes  the detector's, background first; with detector_id "" and feature_dim 0 the shards have no regions
    """

    feature_dim: int
    classes: tuple[str, ...]
    detector_id: str
    sources: tuple[str, ...]
    counts: dict[str, dict[str, int]]  # split -> samples of each view, regions, shards

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def read_manifest(directory: Path) -> ShardsManifest:
    """Read the manifest of the shards.

    Raises:
        DataError: there are no shards in `directory`, or their manifest is damaged.
    """
    file = directory / "manifest.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        manifest = ShardsManifest(
            feature_dim=value["feature_dim"],
            classes=tuple(value["classes"]),
            detector_id=value["detector_id"],
            sources=tuple(value["sources"]),
            counts=value["counts"],
        )
        # types and ranges
        numbers = [manifest.feature_dim]
        for counts in manifest.counts.values():
            numbers += counts.values()
        check_numbers({"feature_dim": manifest.feature_dim})
        names = (manifest.detector_id, *manifest.classes, *manifest.sources)
        if not all(isinstance(name, str) for name in names) or not all(type(n) is int and n >= 0 for n in numbers):
            raise TypeError("feature_dim and counts must be integers, the rest are names")
        return manifest
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; run `dvc repro shards`") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: not a manifest of shards: {first_line(error)}; run `dvc repro shards`") from None


class ShardDataset(Dataset[Sample]):
    """One view of one split. data/views defines the columns of each view."""

    def __init__(
        self,
        directory: Path,
        split: str,
        view: str,
        sources: Mapping[str, int] | None = None,
        *,
        regions: bool = True,
        pixels: bool = False,
        captioned: bool = False,
        stream: StreamParams | None = None,
        by_block: bool = True,
    ) -> None:
        """Open one view of one split.

        Args:
            sources: dataset name -> how often its samples are in an epoch; None or empty: every dataset once.
            regions, pixels: what to read of the image.
            captioned: with the view `images`, only images with a reference caption.
            stream: where the tars are, and how they are read; None or without an address: in `directory`, one by one.
            by_block: streamed images come with adjacent ones; False: separately, to read a few of many.

        Raises:
            DataError: no shards here, or requested regions or pixels are missing, or the shards at `stream.address`
                are different.
            ParamsError: an unknown view, a source that is not in the shards.
        """
        if view not in VIEWS:
            raise ParamsError(f"unknown view `{view}`; available: {', '.join(VIEWS)}")
        self.manifest = read_manifest(directory)
        self.split = split
        self.view = view
        self._directory = directory
        self._view = VIEWS[view]
        self._regions = regions and self._view.has_image
        self._pixels = pixels and self._view.has_image
        self._index = read_index(directory / index_name(split), self._view)
        # rows of the view, then those of the requested datasets, repeated
        rows = self._index.where(pc.list_value_length(pc.field("captions")) > 0) if captioned else None
        self._rows = _select(self._index, rows, sources or {}, self.manifest.sources)
        self._other_images: _OtherImages | None = None
        if self._view.images == "several" and (self._regions or self._pixels):
            self._other_images = _OtherImages(directory / index_name(split), self._index)
        # every row has what the first one has: the shards were packed for one set of models
        for kind, requested in (("regions", self._regions), ("pixels", self._pixels)):
            if requested and len(self._rows) and not self._index.take([self._rows[0]])[0][f"{kind}_size"]:
                raise DataError(f"{directory}: the shards have no {kind}; {_WAYS_OUT[kind]}")
        self.layout: Any = None  # where streamed samples are
        self.blocks: Any = None  # reads streamed images, by the block
        if stream is not None and stream.address and (self._regions or self._pixels) and len(self._rows):
            if by_block:
                self.layout = streaming("layout").of(self.image_spans, stream.block_mb << 20)
            self.blocks = streaming("open")(directory, split, stream, self.layout)

    def __len__(self) -> int:
        return len(self._rows)

    def image_ids(self) -> list[str]:
        """Return the image id of each sample, from the index alone."""
        return list(self.iterate_image_ids())

    def iterate_image_ids(self) -> Iterator[str]:
        """Yield the image id of each sample, from the index alone."""
        if isinstance(self._rows, range):
            for piece in self._index.pieces:
                yield from piece["image_id"].to_pylist()
            return
        for start in range(0, len(self._rows), PIECE):
            yield from self._index.values("image_id", self._rows[start : start + PIECE])

    def first_positions(self) -> NDArray[np.uint32]:
        """Return uint32 [N]: for each sample the number of the first sample with its image."""
        # the first row of each row's image, uint32 [rows of the index]
        images = self._index.first_rows()
        # A range means all rows of the index, in order: sample and row numbers are equal.
        if isinstance(self._rows, range):
            return images
        images = images[self._rows]
        first = np.zeros(len(self._index), np.uint32)
        first[images[::-1]] = sample_numbers(len(images))[::-1]  # the last assignment to an image is its first sample
        return first[images]

    def find_samples(self, image_ids: Set[str]) -> NDArray[np.int64]:
        """Return the numbers of samples with one of these images, in any position; from the index alone."""
        ids = pa.array(sorted(image_ids), pa.string())
        matches = pc.is_in(self._index.column("image_id"), value_set=ids).to_numpy()  # bool [rows of the index]
        if OTHER_IMAGES.name in self._index.schema.names:
            # a row with several images matches by any of them; `parents` maps each flattened id to its row
            other_ids = self._index.column(OTHER_IMAGES.name)
            parents = pc.list_parent_indices(other_ids).to_numpy()
            matches = matches.copy()
            matches[parents[pc.is_in(pc.list_flatten(other_ids), value_set=ids).to_numpy()]] = True
        return np.flatnonzero(matches if isinstance(self._rows, range) else matches[self._rows])

    def references(self) -> dict[str, tuple[str, ...]]:
        """Return all reference captions of each image, from the index alone; for the view `images`."""
        rows = pa.array(np.unique(self._rows))
        image_ids = self._index.column("image_id").take(rows).to_pylist()
        captions = self._index.column("captions").take(rows).to_pylist()
        return {image_id: tuple(texts or ()) for image_id, texts in zip(image_ids, captions, strict=True)}

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return a batch of samples; torch's DataLoader calls this if a dataset has it."""
        numbers = [int(self._rows[index]) for index in indices]
        rows = self._index.take(numbers)
        # per row the locations of its images after the first; ids are enough if no image is read
        other_images: list[list[dict[str, Any]]] = []
        for number, row in zip(numbers, rows, strict=True):
            if self._other_images is None:
                other_images.append([{"image_id": image_id} for image_id in row.get(OTHER_IMAGES.name) or ()])
            else:
                other_images.append(self._other_images.of(number))
        members: dict[str, bytes] = {}  # by name, if shards are streamed
        if self.blocks is not None:
            first, last = self._first_and_last_member()
            spans = []
            for image in [*rows, *itertools.chain.from_iterable(other_images)]:
                # The span ends where the next member's header would begin.
                end = padded(image[f"{last}_offset"] + image[f"{last}_size"])
                spans.append((image["shard"], image[f"{first}_offset"] - BLOCK, end))
            members = self.blocks.fetch(spans)
        return [self._sample(row, images, members) for row, images in zip(rows, other_images, strict=True)]

    def image_spans(self) -> Iterator[NDArray[np.int64]]:
        """Yield int64 [n, 3], piece by piece: per sample the shard, and the byte range of its image's members in it."""
        first, last = self._first_and_last_member()
        for start in range(0, len(self._rows), PIECE):
            rows = np.asarray(self._rows[start : start + PIECE])
            begin = self._index.values(f"{first}_offset", rows) - BLOCK  # where the member's header begins
            end = padded(self._index.values(f"{last}_offset", rows) + self._index.values(f"{last}_size", rows))
            yield np.stack([self._index.values("shard", rows), begin, end], axis=1)

    def _first_and_last_member(self) -> tuple[str, str]:
        """Return the kinds of the requested members; in a tar, an image's pixels come before its regions."""
        first = "pixels" if self._pixels else "regions"
        last = "regions" if self._regions else "pixels"
        return first, last

    def _sample(
        self, row: dict[str, Any], other_images: Iterable[dict[str, Any]], members: Mapping[str, bytes]
    ) -> Sample:
        """Make a sample. other_images: locations of the images after the first. members: those that were fetched."""
        columns = [column for column in self._view.indexed if column.name != "text"]
        others = [SampleImage(image_id=image["image_id"], **self._read_image(image, members)) for image in other_images]
        return Sample(
            sample_id=row["sample_id"],
            image_id=row["image_id"],
            source=row["source"],
            text=row.get("text") or "",
            values={column.name: _plain(row[column.name], column.arrow_type) for column in columns},
            others=tuple(others),
            **self._read_image(row, members),
        )

    def _read_image(self, row: dict[str, Any], members: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the requested contents of the image at this location."""
        contents: dict[str, Any] = {"regions": None, "pixels": None}
        if self._regions:
            contents["regions"] = self._read_member(row, "regions", REGIONS, members)
        if self._pixels:
            contents["pixels"] = self._read_member(row, "pixels", row["pixels_extension"], members)
        return contents

    def _read_member(self, row: dict[str, Any], kind: str, extension: str, members: Mapping[str, bytes]) -> Any:
        shard: Path | str = self._directory / shard_name(self.split, row["shard"])
        name, size = f"{row['key']}.{extension}", row[f"{kind}_size"]
        if self.blocks is None:
            data = read_member(Path(shard), name, row[f"{kind}_offset"], size)
        else:
            shard = self.blocks.store.url(shard_name(self.split, row["shard"]))
            data = members.get(name, b"")
            if len(data) != size:
                raise DataError(f"{shard}: {name} is not at the offset in the index; upload this shard again")
        return decode(extension, data, where=f"{shard}: {name}")


class _OtherImages:
    """Locations of the images after a row's first: each has a row of its own in the view `images`."""

    def __init__(self, index: Path, rows: Index) -> None:
        """Look up all images that rows name."""
        ids = rows.column(OTHER_IMAGES.name).combine_chunks()
        self._images = read_index(index, VIEWS["images"])
        # the other images of all rows, one after the other: row i's are [_ends[i - 1], _ends[i])
        numbers = pc.index_in(ids.flatten(), value_set=self._images.column("image_id").combine_chunks())
        if numbers.null_count:
            missing_id = ids.flatten().filter(pc.is_null(numbers))[0].as_py()
            raise DataError(f"{index}: no image {missing_id}, which a row names; run `dvc repro shards`")
        self._numbers = numbers.to_numpy()
        self._ends = np.cumsum(pc.fill_null(pc.list_value_length(ids), 0).to_numpy())

    def of(self, row: int) -> list[dict[str, Any]]:
        """Return the locations of one row's other images, in order."""
        first = self._ends[row - 1] if row else 0
        locations = []
        for image in self._images.take(self._numbers[first : self._ends[row]]):
            locations.append({name: image[name] for name in LOCATION_COLUMNS})
        return locations


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return lists as tuples, recursively; a null list as an empty one."""
    if not pa.types.is_list(kind):
        return value
    return tuple(_plain(item, kind.value_type) for item in value or ())


def check_sources(sources: Iterable[str], available: Sequence[str]) -> None:
    """Check the names of datasets, and of parts of them (`part_of`).

    Raises:
        ParamsError: one is not in the shards.
    """
    for name in sources:
        if name.partition("/")[0] not in available:
            raise ParamsError(f"sources: no dataset `{name}` in the shards; available: {', '.join(available)}")


def _select(
    index: Index, rows: NDArray[np.uint32] | None, sources: Mapping[str, int], available: tuple[str, ...]
) -> NDArray[np.uint32] | range:
    """Return the rows of an epoch; those of a dataset with k repeats k times.

    Datasets follow in the order of their repeats, most first, then of their names: neither DVC nor a run's fingerprint
    reads that of params.yaml.

    Args:
        rows: rows to choose from; None: all.
    """
    if not sources:
        return range(len(index)) if rows is None else rows
    check_sources(sources, available)
    epoch_rows: list[NDArray[np.uint32]] = []  # per repeat of a dataset
    for name, repeats in sorted(sources.items(), key=lambda entry: (-entry[1], entry[0])):
        dataset, _, part = name.partition("/")
        dataset_rows = index.where(pc.field("source") == dataset)
        if part:
            parts, image_ids = int(part.rpartition("-")[2]), index.values("image_id", dataset_rows)
            dataset_rows = dataset_rows[[part_of(dataset, image_id, parts) == name for image_id in image_ids]]
        if rows is not None:
            # `intersect1d` sorts, and both are sorted already: the order of rows stays.
            dataset_rows = np.intersect1d(dataset_rows, rows)
        epoch_rows += [dataset_rows] * repeats
    if len(epoch_rows) > 1:
        return np.concatenate(epoch_rows)
    # the only dataset of the shards: a range takes no memory
    return range(len(index)) if len(epoch_rows[0]) == len(index) else epoch_rows[0]


POOL_IMAGES = 256  # images in memory with all regions


def mean_region_features(
    dataset: ShardDataset, numbers: Sequence[int], max_regions: int | None = None
) -> NDArray[np.float32]:
    """Return each image's mean region feature, normalized to length one: float32 [N, F].

    The shards have all it needs, so it is available whenever a model reads regions; for a backbone's grid cells the
    mean is the pooled feature. Zeros if an image has no region.

    Args:
        max_regions: maximum number of regions that a model reads; None: all.
    """
    pooled_NF = np.zeros((len(numbers), dataset.manifest.feature_dim), np.float32)
    for start in range(0, len(numbers), POOL_IMAGES):
        for row, sample in enumerate(dataset.__getitems__(list(numbers[start : start + POOL_IMAGES])), start):
            if sample.regions is not None and len(sample.regions):
                pooled_NF[row] = sample.regions.features[:max_regions].astype(np.float32).mean(0)
    return normalize_rows(pooled_NF)


def normalize_rows(features_NF: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows with length one; a row of zeros stays."""
    return features_NF / np.maximum(np.linalg.norm(features_NF, axis=1, keepdims=True), 1e-12)
