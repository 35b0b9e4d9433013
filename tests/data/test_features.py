"""The store finds an image's rows in whatever order the chunks have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlp_models.data import mapped, tables
from vlp_models.data.features import INDEX_SCHEMA, FeatureCache, FeatureStore, cache_features, write_chunk, write_index
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError

IDS = ("b/2", "a/ü", "a/10", "a/9", "b/二", "b/", "a/𝒳", "a/\ufffd")  # UTF-16 would sort the last two the other way


def regions(number: int) -> RegionArrays:
    count = number % 3
    return RegionArrays(
        features=np.full((count, 2), number, np.float16),
        boxes=np.zeros((count, 4), np.float32),
        class_probs=np.zeros((count, 3), np.float16),
        scores=np.full(count, number / 16, np.float32),
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = [(image_id, regions(number)) for number, image_id in enumerate(IDS)]
    write_chunk(tmp_path, 0, made[:5])
    write_chunk(tmp_path, 1, made[5:])
    assert write_index(tmp_path) == {"images": 8, "regions": 7, "chunks": 2}
    manifest = {"detector_id": "d", "feature_dim": 2, "classes": ["a", "b", "c"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


@pytest.mark.parametrize("mapped_rows", [1, 100], ids=["mapped", "in memory"])
def test_every_image_is_found_in_any_order(directory: Path, mapped_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAPPED", mapped_rows)
    monkeypatch.setattr(mapped, "PIECE", 3)
    store = FeatureStore(directory)
    for number, image_id in enumerate(IDS):
        assert image_id in store
        found = store.get(image_id)
        assert found.features.tolist() == regions(number).features.tolist()
        assert found.scores.tolist() == regions(number).scores.tolist()


@pytest.mark.parametrize("other", ["", "a", "a/1", "a/100", "b/3", "zzz", "\udcff"])
def test_missing_image_is_named(directory: Path, other: str) -> None:
    store = FeatureStore(directory)
    assert other not in store
    with pytest.raises(DataError, match="no features for image"):
        store.get(other)


def test_regions_are_found_by_content(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAPPED", 1)
    monkeypatch.setattr(mapped, "PIECE", 3)
    kept = directory.with_name(f"{directory.name}-kept") / "now"
    images = [{"image_id": image_id, "sha256": f"{7 * number % 8:x}"} for number, image_id in enumerate(IDS)]
    cache_features(directory, iter(images), kept)
    cache = FeatureCache(kept)
    for number, image in enumerate(images):
        found = cache.get(image["sha256"])
        assert found is not None and found.features.tolist() == regions(number).features.tolist()
    assert cache.get("8") is None and cache.get("") is None
    (kept / "hashes.parquet").write_bytes(b"damaged")
    assert FeatureCache(kept).get("1") is None


def test_damaged_index_is_named_also_if_it_is_mapped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAPPED", 1)
    rows = pq.read_table(directory / "index.parquet").to_pylist()
    rows[3]["start"] = -1
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), directory / "index.parquet")
    with pytest.raises(DataError, match=r"index.parquet: column `start` has null or negative values"):
        FeatureStore(directory)
    assert not list(directory.with_name(f".{directory.name}-mapped").iterdir()), "no part of a copy is left"


def test_many_chunks_share_row_groups(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pq.read_table(directory / "index.parquet")
    assert pq.read_metadata(directory / "index.parquet").num_row_groups == 2
    monkeypatch.setattr(tables, "ROW_GROUPS", 1)
    write_index(directory)
    assert pq.read_metadata(directory / "index.parquet").num_row_groups == 1
    assert pq.read_table(directory / "index.parquet") == before
