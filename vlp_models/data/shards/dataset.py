"""The shards as a map-style dataset: sample i of a view, read from the offsets in the index.

Texts and offsets are columns of Arrow (shards/index.py); regions and pixels are read from the tar on demand. Worker
processes share both with their parent, so memory does not grow with their number. If shards are streamed, images come
by the block (shards/stream.py), from a folder or an object store; the index is always the one in data/shards.

`AugmentedDataset` adds captions that a model wrote to a train split's captions, or as a control the images' own
captions again.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
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
from vlp_models.data.shards.archive import BLOCK, REGIONS, decode, read_member
from vlp_models.data.shards.index import PIECE, Index, read_index
from vlp_models.data.shards.order import sample_numbers
from vlp_models.data.shards.stream import BlockReader, Layout, Store, padded
from vlp_models.data.shards.write import PLACE_COLUMNS, index_name, shard_name
from vlp_models.data.tables import read_table
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

    def check(self) -> None:
        """Check types and ranges.

        Raises:
            TypeError, ValueError: a field has another type, or is out of range.
        """
        check_numbers({"feature_dim": self.feature_dim})
        texts = (self.detector_id, *self.classes, *self.sources)
        counts = (
            [n for split in self.counts.values() for n in split.values()] if isinstance(self.counts, dict) else [""]
        )
        if not isinstance(self.feature_dim, int) or self.feature_dim < 0 or not all(isinstance(t, str) for t in texts):
            raise TypeError("feature_dim must be an integer, the rest are names")
        if not all(isinstance(n, int) and n >= 0 for n in counts):
            raise TypeError("counts must be integers, by split and view")


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
        manifest.check()
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
            ParamsError: an unknown view, a source that is not in the shards, or repeats below 1.
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
        rows = self._index.where(pc.list_value_length(pc.field("captions")) > 0) if captioned else None
        self._rows = _select(self._index, rows, sources or {}, self.manifest.sources)
        several = self._view.images == "several" and (self._regions or self._pixels)
        self._others = _OtherImages(directory / index_name(split), self._index) if several else None
        for kind, requested in (("regions", self._regions), ("pixels", self._pixels)):
            if requested and len(self._rows) and not self._index.take([self._rows[0]])[0][f"{kind}_size"]:
                raise DataError(f"{directory}: the shards have no {kind}; {_WAYS_OUT[kind]}")
        self.layout: Layout | None = None
        self.blocks: BlockReader | None = None
        if stream is not None and stream.address and (self._regions or self._pixels) and len(self._rows):
            self._stream(stream, by_block)

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
            yield from self._index.strings("image_id", self._rows[start : start + PIECE])

    def first_positions(self) -> NDArray[np.uint32]:
        """Return uint32 [N]: for each sample the number of the first sample with its image."""
        images = self._index.first_rows()
        if isinstance(self._rows, range):
            return images
        images = images[self._rows]
        first = np.zeros(len(self._index), np.uint32)
        first[images[::-1]] = sample_numbers(len(images))[::-1]  # the last assignment to an image is its first sample
        return first[images]

    def find_samples(self, image_ids: Set[str]) -> NDArray[np.int64]:
        """Return the numbers of samples with one of these images, in any position; from the index alone."""
        wanted = pa.array(sorted(image_ids), pa.string())
        shows = pc.is_in(self._index.column("image_id"), value_set=wanted).to_numpy()
        if OTHER_IMAGES.name in self._index.schema.names:
            others = self._index.column(OTHER_IMAGES.name)
            parents = pc.list_parent_indices(others).to_numpy()
            shows = shows.copy()
            shows[parents[pc.is_in(pc.list_flatten(others), value_set=wanted).to_numpy()]] = True
        return np.flatnonzero(shows if isinstance(self._rows, range) else shows[self._rows])

    def references(self) -> dict[str, tuple[str, ...]]:
        """Return all reference captions of each image, from the index alone; for the view `images`."""
        rows = pa.array(np.unique(self._rows))
        names, captions = (self._index.column(name).take(rows).to_pylist() for name in ("image_id", "captions"))
        return {name: tuple(texts or ()) for name, texts in zip(names, captions, strict=True)}

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return a batch of samples; torch's DataLoader calls this if a dataset has it."""
        numbers = [int(self._rows[index]) for index in indices]
        rows = self._index.take(numbers)
        if self._others is None:
            others = [[{"image_id": name} for name in row.get(OTHER_IMAGES.name) or ()] for row in rows]
        else:
            others = [self._others.of(number) for number in numbers]
        fetched = self._fetch([*rows, *(other for behind in others for other in behind)])
        return [self._sample(row, behind, fetched) for row, behind in zip(rows, others, strict=True)]

    def places(self) -> Iterator[NDArray[np.int64]]:
        """Yield int64 [n, 3], piece by piece: per sample the shard, and the byte range of its image's members in it."""
        kinds = [kind for kind, requested in (("pixels", self._pixels), ("regions", self._regions)) if requested]
        columns = ["shard", *(f"{kind}_{what}" for kind in (kinds[0], kinds[-1]) for what in ("offset", "size"))]
        for start in range(0, len(self._rows), PIECE):
            rows = np.asarray(self._rows[start : start + PIECE])
            shard, begin, _, last, size = (self._index.integers(name, rows) for name in columns)
            yield np.stack([shard, begin - BLOCK, padded(last + size)], axis=1)

    def _stream(self, stream: StreamParams, by_block: bool) -> None:
        """Open the streamed shards."""
        store = Store(stream.address, stream.timeout_seconds, stream.retry_seconds)
        if store.read("manifest.json") != (self._directory / "manifest.json").read_bytes():
            raise DataError(
                f"{store.url('manifest.json')}: differs from {self._directory}: upload these shards, "
                "or run `dvc pull data/shards` at the commit that made the uploaded ones"
            )
        if by_block:
            self.layout = Layout.of(self.places, stream.block_mb << 20)
        self.blocks = BlockReader(store, self.split, self.layout, stream.buffer_mb << 20)

    def _fetch(self, places: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """Return the members of these images if shards are streamed."""
        if self.blocks is None:
            return {}
        first, last = ("pixels" if self._pixels else "regions"), ("regions" if self._regions else "pixels")
        return self.blocks.fetch(
            (p["shard"], p[f"{first}_offset"] - BLOCK, padded(p[f"{last}_offset"] + p[f"{last}_size"])) for p in places
        )

    def _sample(self, row: dict[str, Any], others: Sequence[dict[str, Any]], fetched: Mapping[str, bytes]) -> Sample:
        """Make a sample. others: locations of the images after the first."""
        return Sample(
            sample_id=row["sample_id"],
            image_id=row["image_id"],
            source=row["source"],
            text=row.get("text") or "",
            values={
                column.name: _plain(row[column.name], column.arrow_type)
                for column in self._view.indexed
                if column.name != "text"
            },
            others=tuple(
                SampleImage(image_id=other["image_id"], **self._read_image(other, fetched)) for other in others
            ),
            **self._read_image(row, fetched),
        )

    def _read_image(self, place: dict[str, Any], fetched: Mapping[str, bytes]) -> dict[str, Any]:
        """Return what was requested of the image at this location."""
        return {
            "regions": self._read_member(place, "regions", REGIONS, fetched) if self._regions else None,
            "pixels": self._read_member(place, "pixels", place["pixels_extension"], fetched) if self._pixels else None,
        }

    def _read_member(self, row: dict[str, Any], kind: str, extension: str, fetched: Mapping[str, bytes]) -> Any:
        shard: Path | str = self._directory / shard_name(self.split, row["shard"])
        name, size = f"{row['key']}.{extension}", row[f"{kind}_size"]
        if self.blocks is None:
            data = read_member(Path(shard), name, row[f"{kind}_offset"], size)
        else:
            shard = self.blocks.store.url(shard_name(self.split, row["shard"]))
            data = fetched.get(name, b"")
            if len(data) != size:
                raise DataError(f"{shard}: {name} is not at the offset in the index; upload this shard again")
        return decode(extension, data, where=f"{shard}: {name}")


class _OtherImages:
    """Locations of the images after a row's first: each has a row of its own in the view `images`."""

    def __init__(self, index: Path, rows: Index) -> None:
        """Look up all images that rows name.

        Raises:
            DataError: a row names an image that is not in the split.
        """
        ids = rows.column(OTHER_IMAGES.name).combine_chunks()
        self._places = read_index(index, VIEWS["images"])
        found = pc.index_in(ids.flatten(), value_set=self._places.column("image_id").combine_chunks())
        if found.null_count:
            lost = ids.flatten().filter(pc.is_null(found))[0].as_py()
            raise DataError(f"{index}: no image {lost}, which a row names; run `dvc repro shards`")
        self._numbers = found.to_numpy()
        self._ends = np.cumsum(pc.fill_null(pc.list_value_length(ids), 0).to_numpy())

    def of(self, row: int) -> list[dict[str, Any]]:
        """Return the locations of one row's other images, in order."""
        first = self._ends[row - 1] if row else 0
        found = self._places.take(self._numbers[first : self._ends[row]])
        return [{name: place[name] for name in PLACE_COLUMNS} for place in found]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return lists as tuples, recursively; a null list as an empty one."""
    if not pa.types.is_list(kind):
        return value
    return tuple(_plain(item, kind.value_type) for item in value or ())


def check_sources(sources: Iterable[str], known: Sequence[str]) -> None:
    """Check the names of datasets.

    Raises:
        ParamsError: one is not in the shards.
    """
    for name in sources:
        if name not in known:
            raise ParamsError(f"sources: no dataset `{name}` in the shards; available: {', '.join(known)}")


def _select(
    index: Index, rows: NDArray[np.uint32] | None, sources: Mapping[str, int], known: tuple[str, ...]
) -> NDArray[np.uint32] | range:
    """Return the rows of an epoch; those of a dataset with k repeats k times.

    Datasets follow in the order of their repeats, most first, then of their names: neither DVC nor a run's fingerprint
    reads that of params.yaml.

    Args:
        rows: rows to choose from; None: all.
    """
    if not sources:
        return range(len(index)) if rows is None else rows
    check_sources(sources, known)
    chosen: list[NDArray[np.uint32]] = []
    for name, repeats in sorted(sources.items(), key=lambda entry: (-entry[1], entry[0])):
        if repeats < 1:
            raise ParamsError(f"sources: `{name}: {repeats}`; remove a dataset from the list to skip it")
        of_name = index.where(pc.field("source") == name)
        chosen += [of_name if rows is None else np.intersect1d(of_name, rows)] * repeats
    if len(chosen) > 1:
        return np.concatenate(chosen)
    return range(len(index)) if len(chosen[0]) == len(index) else chosen[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneratedCaption:
    """A caption of an image that a model wrote."""

    caption_id: str
    image_id: str
    text: str


def read_generated(directory: Path, shards: Path) -> list[GeneratedCaption]:
    """Read the captions in data/augmented/NAME.

    Raises:
        DataError: one is of an image of the val or the test split.
    """
    rows = read_table("captions", directory, ["caption_id", "image_id", "text"]).to_pylist()
    for split in ("val", "test"):
        held_out = ShardDataset(shards, split, "images", regions=False).references()
        refuse_evaluation_images(
            {row["image_id"] for row in rows} & held_out.keys(), f"{directory}: it has captions", split
        )
    return [GeneratedCaption(**row) for row in rows]


def refuse_evaluation_images(image_ids: set[str], what: str, split: str) -> None:
    """Check that `image_ids` is empty.

    Raises:
        DataError: it is not.
    """
    if image_ids:
        raise DataError(
            f"{what} of {len(image_ids):,} images of the {split} split, such as {', '.join(sorted(image_ids)[:3])}: "
            "training on them would leak evaluation data. Name other `sources`, or make the datasets' splits "
            "agree, and run `dvc repro augment`"
        )


class AugmentedDataset(Dataset[Sample]):
    """The samples of `base`, a view of captions, followed by one per generated caption of its images.

    control: use a caption of the image in `base` in place of the generated one; the first for the first, and so on in
    turn. So the number of samples per image and of updates is the same, without new text.
    """

    def __init__(self, base: ShardDataset, written: Sequence[GeneratedCaption], *, control: bool) -> None:
        """Match generated captions with the images of `base`.

        Raises:
            DataError: no image of `base` has a generated caption.
        """
        places: dict[str, list[int]] = {caption.image_id: [] for caption in written}
        for place, image_id in enumerate(base.iterate_image_ids()):
            if image_id in places:
                places[image_id].append(place)
        self._base = base
        self._control = control
        self._more = [caption for caption in written if places[caption.image_id]]
        if not self._more:
            raise DataError("no image of this run's `sources` has a generated caption; check `augment` in params.yaml")
        turns: Counter[str] = Counter()
        self._own: list[int] = []  # the sample of `base` whose image (control: and text) each one uses
        for caption in self._more:
            own = places[caption.image_id]
            self._own.append(own[turns[caption.image_id] % len(own)])
            turns[caption.image_id] += 1

    def __len__(self) -> int:
        return len(self._base) + len(self._more)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        own = len(self._base)
        samples = self._base.__getitems__([i if i < own else self._own[i - own] for i in indices])
        return [s if i < own else self._written(s, self._more[i - own]) for i, s in zip(indices, samples, strict=True)]

    def image_ids(self) -> list[str]:
        """Return the image id of each sample."""
        return [*self._base.image_ids(), *(caption.image_id for caption in self._more)]

    def first_positions(self) -> NDArray[np.uint32]:
        """Return uint32 [N]: for each sample the number of the first sample with its image."""
        of_base = self._base.first_positions()
        return np.concatenate([of_base, of_base[self._own]])

    def find_samples(self, image_ids: Set[str]) -> NDArray[np.int64]:
        """Return the numbers of samples with one of these images."""
        behind = [i for i, caption in enumerate(self._more) if caption.image_id in image_ids]
        return np.concatenate([self._base.find_samples(image_ids), len(self._base) + np.array(behind, np.int64)])

    @property
    def layout(self) -> Layout | None:
        """Return where the samples are; None unless `base` is streamed."""
        return None if self._base.layout is None else Layout.of(self._places, self._base.layout.block_bytes)

    def _places(self) -> Iterator[NDArray[np.int64]]:
        of_base = np.concatenate(list(self._base.places()))
        yield np.concatenate([of_base, of_base[self._own]])

    def _written(self, sample: Sample, caption: GeneratedCaption) -> Sample:
        text = sample.text if self._control else caption.text
        return dataclasses.replace(sample, sample_id=caption.caption_id, text=text)


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
        for place, sample in enumerate(dataset.__getitems__(list(numbers[start : start + POOL_IMAGES])), start):
            if sample.regions is not None and len(sample.regions):
                pooled_NF[place] = sample.regions.features[:max_regions].astype(np.float32).mean(0)
    return normalize_rows(pooled_NF)


def normalize_rows(features_NF: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows with length one; a row of zeros stays."""
    return features_NF / np.maximum(np.linalg.norm(features_NF, axis=1, keepdims=True), 1e-12)
