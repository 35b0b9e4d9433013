"""Shards that somebody has made to hurt: refused where they are read, by file and record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.archive import REGIONS, decode, encode_regions
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord
from vlp_models.errors import DataError

Build = Callable[..., Path]
Record = Callable[..., ImageRecord]
Regions = Callable[[int, int], RegionArrays]


def changed(regions: RegionArrays, name: str, value: float) -> RegionArrays:
    array = getattr(regions, name).copy()
    array.flat[0] = value
    return dataclasses.replace(regions, **{name: array})


HOSTILE = [
    ("features", np.nan, "features has a value that is not finite"),
    ("features", np.inf, "features has a value that is not finite"),
    ("class_probs", -np.inf, "class_probs has a value that is not finite"),
    ("scores", np.nan, "scores has a value that is not finite"),
    ("boxes", 9e9, "boxes from .* to 9e.09"),
    ("boxes", -1.0, "boxes from -1 to"),
    ("boxes", np.nan, "boxes has a value that is not finite"),
]


@pytest.mark.parametrize(("name", "value", "words"), HOSTILE, ids=[f"{name}-{value}" for name, value, _ in HOSTILE])
def test_invalid_regions_are_neither_read_nor_written(
    name: str, value: float, words: str, regions: Regions, build_shards: Build, record: Record
) -> None:
    bad = changed(regions(1, 2), name, value)
    data = safetensors.numpy.save({field.name: getattr(bad, field.name) for field in dataclasses.fields(bad)})
    with pytest.raises(DataError, match=rf"train-00000000.tar: x: not a valid .regions.safetensors: {words}"):
        decode(REGIONS, data, where="train-00000000.tar: x")
    hostile = dataclasses.replace(record(1), regions=bad)
    with pytest.raises(DataError, match=rf"image scenes/001.a b: {words}"):
        build_shards(train=[hostile])


def test_regions_of_another_type_or_shape_are_refused(regions: Regions) -> None:
    good = safetensors.numpy.load(encode_regions(regions(1, 2)))
    for name, array in (
        ("features", good["features"].astype(np.float64)),
        ("features", good["features"][:1]),
        ("features", good["features"].reshape(-1)),
        ("boxes", good["boxes"][:, :3].copy()),
        ("scores", good["scores"][:, None].copy()),
    ):
        with pytest.raises(DataError, match="not a valid"):
            decode(REGIONS, safetensors.numpy.save({**good, name: array}), where="x")


def rewrite(index: Path, **cells: Any) -> None:
    """Other values in the second row of an index."""
    table = pq.read_table(index)
    rows = table.to_pylist()
    rows[1].update(cells)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), index)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"shard": None}, "row 0: `shard` is missing"),
        ({"shard": -7}, "`shard` '-7' is not a shard number"),
        ({"key": "../../outside"}, "`key` '../../outside' is not a member name"),
        ({"key": None}, "`key` is missing"),
        ({"sample_id": None}, "`sample_id` is missing"),
        ({"regions_offset": -512}, "`regions_offset` '-512' is before the first member"),
        ({"regions_size": -1}, "`regions_size` '-1' is negative"),
        ({"pixels_extension": "pickle"}, "`pixels_extension` 'pickle' is not one of"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_inconsistent_index_is_refused(cells: dict[str, Any], words: str, build_shards: Build, record: Record) -> None:
    directory = build_shards(train=[record(1), record(2)])
    index = directory / "index-train.parquet"
    rewrite(index, **cells)
    with pytest.raises(DataError, match=rf"index-train.parquet: not an index of shards: .*{words}.*dvc repro shards"):
        ShardDataset(directory, "train", "captions")


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "empty", "no parquet"])
def test_damaged_index_is_a_data_error(damage: str, build_shards: Build, record: Record) -> None:
    directory = build_shards(train=[record(1), record(2)])
    index = directory / "index-train.parquet"
    data = index.read_bytes()
    middle = len(data) // 2
    index.write_bytes(
        {
            "cut off": data[:-9],
            "overwritten": data[: middle - 40] + b"\xff" * 80 + data[middle + 40 :],
            "empty": b"",
            "no parquet": b"PAR1" * 30,
        }[damage]
    )
    with pytest.raises(DataError, match=r"index-train.parquet: not an index of shards"):
        dataset = ShardDataset(directory, "train", "captions")
        [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize(
    "change",
    [
        {"feature_dim": 10**12},
        {"feature_dim": -1},
        {"feature_dim": "6"},
        {"classes": [1, 2]},
        {"counts": {"train": {"captions": -1}}},
        {"counts": []},
        {"detector_id": None},
    ],
    ids=str,
)
def test_invalid_manifest_is_refused(change: dict[str, Any], build_shards: Build, record: Record) -> None:
    directory = build_shards(train=[record(1)])
    file = directory / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=r"manifest.json: not a manifest of shards"):
        ShardDataset(directory, "train", "captions")


def test_id_of_five_thousand_digits_is_a_data_error(tmp_path: Path) -> None:
    """Python refuses to make such a number, by an error that is no JSON error."""
    from vlp_models.data.formats.base import Tables
    from vlp_models.data.formats.files import read_json, read_lines

    file = tmp_path / "captions.json"
    file.write_text('{"annotations": [{"id": ' + "9" * 5000 + "}]}")
    with pytest.raises(DataError, match=r"captions.json: not COCO captions: .*4300 digits"):
        read_json(file, "COCO captions")
    tables = Tables()
    file.write_text('{"id": 1}\n{"id": ' + "9" * 5000 + "}\n")
    assert [record["id"] for _, record in read_lines(file, tables, "captions", "lines")] == [1]
    assert "digits" in tables["quarantine"][0]["reason"]
