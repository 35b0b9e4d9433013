"""The shards as a map-style dataset: sample i of a view, read where the index says.

Texts and offsets are columns of one Arrow table; regions are read from the tar on demand. Worker processes share both
with their parent (the table's memory, the system's file cache), so memory does not grow with their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch.utils.data import Dataset

from vlp_models.data.archive import REGIONS, decode, read_member
from vlp_models.data.index_check import check_index
from vlp_models.data.sample import Sample, SeenImage
from vlp_models.data.shards import INDEX_SCHEMA, PLACE_COLUMNS, index_name, shard_name
from vlp_models.data.views import OTHER_IMAGES, VIEWS, View
from vlp_models.errors import DataError, ParamsError
from vlp_models.limits import check_numbers

_WAYS_OUT = {
    "regions": "no model of params.yaml read any when they were made: add this one to `models`, and `dvc repro shards`",
    "pixels": "set `shards.pixels: true` (or auto, with the model in `models`) and `dvc repro shards`",
}


@dataclass(frozen=True, kw_only=True)
class ShardsManifest:
    """What a model must know about the shards.

    classes  the detector's, background first; with detector_id "" and feature_dim 0 the shards hold no regions
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
        """
        Raises:
            TypeError, ValueError: a field is of another type, or too large to be true.
        """
        check_numbers({"feature_dim": self.feature_dim})
        texts = (self.detector_id, *self.classes, *self.sources)
        counts = (
            [n for split in self.counts.values() for n in split.values()] if isinstance(self.counts, dict) else [""]
        )
        if not isinstance(self.feature_dim, int) or self.feature_dim < 0 or not all(isinstance(t, str) for t in texts):
            raise TypeError("feature_dim is a whole number, the rest are names")
        if not all(isinstance(n, int) and n >= 0 for n in counts):
            raise TypeError("counts are whole numbers, by split and view")


def read_manifest(directory: Path) -> ShardsManifest:
    """
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
        raise DataError(f"{file}: no such file; `dvc repro shards` makes it") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: not the manifest of shards: {error!r}; `dvc repro shards` makes it anew") from None


class ShardDataset(Dataset[Sample]):
    """One view of one split. What each view fills is said in data/views.py."""

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
    ) -> None:
        """
        Args:
            sources: dataset name -> how often an epoch has its samples; None or empty: every dataset once.
            regions, pixels: what of the image to read.
            captioned: of the view `images`, those with a reference caption only.

        Raises:
            DataError: no shards here, or no regions or pixels in them though asked for.
            ParamsError: an unknown view, a source the shards do not hold, or repeats below 1.
        """
        if view not in VIEWS:
            raise ParamsError(f"no view `{view}` of the data; there are: {', '.join(VIEWS)}")
        self.manifest = read_manifest(directory)
        self.split = split
        self.view = view
        self._directory = directory
        self._view = VIEWS[view]
        self._regions = regions and self._view.has_image
        self._pixels = pixels and self._view.has_image
        self._table = _read_index(directory / index_name(split), self._view)
        if captioned:
            self._table = self._table.filter(pc.greater(pc.list_value_length(self._table["captions"]), 0))
        self._rows = _select(self._table["source"], sources or {}, self.manifest.sources)
        several = self._view.images == "several" and (self._regions or self._pixels)
        self._others = _OtherImages(directory / index_name(split), self._table) if several else None
        for kind, asked in (("regions", self._regions), ("pixels", self._pixels)):
            if asked and len(self._rows) and not self._table[f"{kind}_size"][int(self._rows[0])].as_py():
                raise DataError(f"{directory}: the shards hold no {kind}; {_WAYS_OUT[kind]}")

    def __len__(self) -> int:
        return len(self._rows)

    def image_ids(self) -> list[str]:
        """Of each sample, from the index alone."""
        found: list[str] = self._table["image_id"].take(self._rows).to_pylist()
        return found

    def references(self) -> dict[str, tuple[str, ...]]:
        """Every reference caption of each image, from the index alone; of the view `images`."""
        table = self._table.take(np.unique(self._rows)).select(["image_id", "captions"])
        return {row["image_id"]: tuple(row["captions"] or ()) for row in table.to_pylist()}

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A batch at once: what torch's DataLoader asks for where a dataset has it."""
        numbers = self._rows[list(indices)]
        rows = self._table.take(numbers).to_pylist()
        if self._others is None:
            others = [[{"image_id": name} for name in row.get(OTHER_IMAGES.name) or ()] for row in rows]
        else:
            others = [self._others.of(number) for number in numbers]
        return [self._sample(row, behind) for row, behind in zip(rows, others, strict=True)]

    def _sample(self, row: dict[str, Any], others: Sequence[dict[str, Any]]) -> Sample:
        """others: where each image behind the first lies."""
        return Sample(
            sample_id=row["sample_id"],
            image_id=row["image_id"],
            source=row["source"],
            text=row.get("text") or "",
            values={
                column.name: _plain(row[column.name], column.type)
                for column in self._view.indexed
                if column.name != "text"
            },
            others=tuple(SeenImage(image_id=other["image_id"], **self._seen(other)) for other in others),
            **self._seen(row),
        )

    def _seen(self, place: dict[str, Any]) -> dict[str, Any]:
        """What was asked for of the image that lies there."""
        return {
            "regions": self._read(place, "regions", REGIONS) if self._regions else None,
            "pixels": self._read(place, "pixels", place["pixels_extension"]) if self._pixels else None,
        }

    def _read(self, row: dict[str, Any], kind: str, extension: str) -> Any:
        shard = self._directory / shard_name(self.split, row["shard"])
        name = f"{row['key']}.{extension}"
        data = read_member(shard, name, row[f"{kind}_offset"], row[f"{kind}_size"])
        return decode(extension, data, where=f"{shard}: {name}")


class _OtherImages:
    """Where the images lie that rows name behind their first: each has a row of its own in the view `images`."""

    def __init__(self, index: Path, rows: pa.Table) -> None:
        """
        Raises:
            DataError: a row names an image that the split does not hold.
        """
        ids = rows[OTHER_IMAGES.name].combine_chunks()
        self._places = _read_index(index, VIEWS["images"]).select(PLACE_COLUMNS)
        found = pc.index_in(ids.flatten(), value_set=self._places["image_id"].combine_chunks())
        if found.null_count:
            lost = ids.flatten().filter(pc.is_null(found))[0].as_py()
            raise DataError(f"{index}: no image {lost}, which a row names; `dvc repro shards` makes the shards anew")
        self._numbers = found.to_numpy()
        self._ends = np.cumsum(pc.fill_null(pc.list_value_length(ids), 0).to_numpy())

    def of(self, row: int) -> list[dict[str, Any]]:
        """The places of one row's, in order."""
        first = self._ends[row - 1] if row else 0
        found: list[dict[str, Any]] = self._places.take(self._numbers[first : self._ends[row]]).to_pylist()
        return found


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Lists as tuples, all the way down; a null list as an empty one."""
    if not pa.types.is_list(kind):
        return value
    return tuple(_plain(item, kind.value_type) for item in value or ())


def _read_index(file: Path, view: View) -> pa.Table:
    try:
        columns = [*PLACE_COLUMNS, *(column.name for column in view.indexed)]
        table = pq.read_table(file, schema=INDEX_SCHEMA, columns=columns, filters=[("view", "=", view.name)])
        table = table.combine_chunks()
        check_index(table)
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; the shards have no split of this name, or are not built yet") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}: not an index of shards: {error}; `dvc repro shards` makes it anew") from None
    return table


def _select(column: pa.ChunkedArray, sources: Mapping[str, int], known: tuple[str, ...]) -> np.ndarray:
    """int64: the rows of an epoch, those of a dataset that is seen k times k times over."""
    if not sources:
        return np.arange(len(column))
    for name, repeats in sources.items():
        if name not in known:
            raise ParamsError(f"sources: no dataset `{name}` in the shards; there are: {', '.join(known)}")
        if repeats < 1:
            raise ParamsError(f"sources: `{name}: {repeats}`; leave a dataset out to not see it at all")
    names = np.asarray(column.to_pylist(), dtype=object)
    return np.concatenate([np.tile(np.flatnonzero(names == name), repeats) for name, repeats in sources.items()])
