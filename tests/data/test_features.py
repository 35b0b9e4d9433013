"""The store finds an image's rows in whatever order the chunks have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vlp_models.data.features import FeatureStore, write_chunk, write_index
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


def test_every_image_is_found_in_any_order(directory: Path) -> None:
    store = FeatureStore(directory)
    assert len(store) == len(IDS)
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
