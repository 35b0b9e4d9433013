"""The index as it is looked up: mapped from a file or held, in pieces, it gives the same rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vlp_models.data.shards import index
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord


@pytest.fixture
def shards(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> Path:
    records = [record(i, source="nlvr" if i % 3 == 0 else "scenes") for i in range(11)]
    return build_shards(train=sorted(records, key=lambda r: r.image_id))


def everything(shards: Path) -> list[object]:
    """What a dataset tells, in another order than it lies."""
    captions = ShardDataset(shards, "train", "captions")
    images = ShardDataset(shards, "train", "images", {"nlvr": 2}, captioned=True)
    order = [(7 * i) % len(captions) for i in range(len(captions))]
    samples = [(s.sample_id, s.text, s.regions.features.tobytes()) for s in captions.__getitems__(order) if s.regions]
    return [samples, captions.image_ids(), images.image_ids(), images.references(), len(images)]


def test_a_mapped_index_gives_the_same_rows(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = everything(shards)
    monkeypatch.setattr(index, "PIECE", 4)
    assert everything(shards) == held
    monkeypatch.setattr(index, "MAPPED", 1)
    assert everything(shards) == held
    mapped = shards.with_name(".shards-mapped")
    files = sorted(mapped.iterdir())
    assert [file.name.split("-")[2] for file in files] == ["captions", "images"]
    times = [file.stat().st_mtime_ns for file in files]
    assert everything(shards) == held
    assert [file.stat().st_mtime_ns for file in sorted(mapped.iterdir())] == times, "written once"
    os.utime(shards / "index-train.parquet", ns=(1, 1))
    assert everything(shards) == held
    assert len(list(mapped.iterdir())) == 2 and sorted(mapped.iterdir()) != files, "another index, another file"


def test_where_nothing_can_be_written_the_rows_are_held(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = everything(shards)
    monkeypatch.setattr(index, "MAPPED", 1)
    shards.with_name(".shards-mapped").write_text("a file in the folder's place")
    assert everything(shards) == held
