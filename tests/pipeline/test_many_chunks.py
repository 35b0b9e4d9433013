"""features and shards with more chunks than five digits count, and with more images than a process should hold."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_workspace import params_with
from peak_memory import peak_mb
from PIL import Image

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore, chunk_name
from vlp_models.data.joins import Database
from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.write import shard_name
from vlp_models.data.tables import TableWriter, read_table
from vlp_models.params import Params
from vlp_models.pipeline.engines import Cluster
from vlp_models.pipeline.stages import features, shards
from vlp_models.vision.region_source import ImageRegionSource, quarantine_row

ENDS = (0, 9, 10, 99_999, 100_000, 999_999, 1_000_000, 10**8 - 1)  # of chunks with one image, up to 100 million
FEWER = 256  # rows that are held at a time


@pytest.mark.parametrize("name", [chunk_name, features._notes_name, lambda n: shard_name("train", n)])
def test_names_sort_like_numbers(name: Callable[[int], str]) -> None:
    names = [name(number) for number in ENDS]
    assert sorted(names) == names
    assert sorted(shards.part_name("val", number) for number in ENDS) == [shards.part_name("val", n) for n in ENDS]


def make(root: Path, images: int) -> Workspace:
    """One file as many images, half of them in train; no other rows."""
    workspace = Workspace(root)
    workspace.validated.mkdir(parents=True)
    Image.new("RGB", (8, 8), (200, 0, 0)).save(root / "one.png")
    with TableWriter("images", workspace.validated) as table:
        for number in range(images):
            row = {"image_id": f"d/{number * 7919 % images:08d}", "source": "d", "split": ("train", "val")[number % 2]}
            table.append(row | {"path": "one.png", "width": 8, "height": 8, "sha256": "", "provenance": ""})
    for name in ("captions", "questions", "statements", "choices"):
        TableWriter(name, workspace.validated).close()
    return workspace


def constant_regions(
    self: ImageRegionSource, images: list[dict[str, Any]], advance: Callable[[int], None]
) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
    """A region whose feature is the image's number; a note on every tenth image."""
    found = [
        RegionArrays(
            features=np.full((1, 2), int(row["image_id"][2:]) % 2048, np.float16),
            boxes=np.zeros((1, 4), np.float32),
            class_probs=np.zeros((1, 0), np.float16),
            scores=np.ones(1, np.float32),
        )
        for row in images
    ]
    advance(len(images))
    return found, [quarantine_row(row, "max_regions", "", "") for row in images if row["image_id"].endswith("0")]


class Elsewhere:
    """A mapper that makes only the chunks of these numbers, and is then interrupted; None: all. made: the numbers."""

    def __init__(self, numbers: Sequence[int] | None = None) -> None:
        self.numbers = numbers
        self.made: list[int] = []

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if self.numbers is None or item[0] in self.numbers:
                self.made.append(item[0])
                yield function(item)
        if self.numbers is not None:
            raise KeyboardInterrupt


def settings(per_shard: int) -> Params:
    params = params_with(features={"source": "grid"}, detector={"source": "none"})
    return dataclasses.replace(
        params,
        shards=dataclasses.replace(params.shards, images_per_shard=per_shard),
        sections={"cluster": Cluster(workers=1)},  # in this process, which has the patches
    )


@pytest.mark.slow
@pytest.mark.long
def test_memory_of_features_and_shards_is_constant_in_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageRegionSource, "regions", constant_regions)
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 64)
    monkeypatch.setattr(features, "READ_ROWS", FEWER)
    monkeypatch.setattr(Database.stream, "__defaults__", (FEWER,))
    monkeypatch.setattr(features, "cache_features", lambda *_: None)  # data/features.py
    for module in (features, shards):
        monkeypatch.setattr(module, "BATCH_ROWS", FEWER)
    most = {}
    params = settings(64)
    for images in (100, 800, 2400):
        workspace = make(tmp_path / str(images), images)
        steps = {
            "features": lambda w=workspace: features.run(params, w),
            "shards": lambda w=workspace: shards.run(params, w, inputs=[]),
        }
        if images == 100:  # what is loaded once
            for step in steps.values():
                step()
            monkeypatch.setattr(sys, "intern", str)  # Python's table of all names grows by megabytes at a stroke
        else:
            most[images] = {name: peak_mb(step) for name, step in steps.items()}
    for name in most[2400]:  # the rows of 1,600 images take more than 1 MB as objects
        assert most[2400][name] < most[800][name] + 0.5, most


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_more_chunks_than_five_digits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageRegionSource, "regions", constant_regions)
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 1)
    monkeypatch.setattr(features, "cache_features", lambda *_: None)
    images = 100_003
    workspace = make(tmp_path, images)
    features.run(settings(1), workspace)
    last = workspace.features / "features-00100002.safetensors"
    assert last.exists() and len(list(workspace.features.glob("features-*"))) == images
    store = FeatureStore(workspace.features)
    for number in (0, 9, 10, 99_999, 100_000, 100_002):
        assert store.get(f"d/{number:08d}").features[0, 0] == number % 2048
    noted = read_table("quarantine", workspace.features)["row_id"].to_pylist()
    assert noted == [f"d/{number:08d}" for number in range(0, images, 10)]


@pytest.mark.slow
def test_resumed_chunks_in_the_middle_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chunks may be finished: those of lost nodes are missing in between."""
    monkeypatch.setattr(ImageRegionSource, "regions", constant_regions)
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 3)
    workspace = make(tmp_path, 32)  # the last chunk has two
    features.run(settings(1), workspace)
    whole = hash_path(workspace.features)
    with pytest.raises(KeyboardInterrupt):
        features.run(settings(1), workspace, mapper=Elsewhere([0, 4, 5, 10]))
    rest = Elsewhere()
    features.run(settings(1), workspace, mapper=rest)
    assert rest.made == [1, 2, 3, 6, 7, 8, 9]
    assert hash_path(workspace.features) == whole
