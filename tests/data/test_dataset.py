from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord
from vlp_models.errors import DataError, ParamsError

Build = Callable[..., Path]
Record = Callable[..., ImageRecord]


@pytest.fixture
def shards(build_shards: Build, record: Record) -> Path:
    scenes = [record(i, pixels=True) for i in range(5)]
    return build_shards(train=[*scenes, *(record(i, "nlvr", pixels=True) for i in range(2))], val=[record(8)], test=[])


def test_each_view_gives_its_samples(shards: Path, record: Record) -> None:
    image = record(2)
    sample = ShardDataset(shards, "train", "captions")[5]
    assert (sample.sample_id, sample.image_id, sample.source) == (f"{image.image_id}#1", image.image_id, "scenes")
    assert sample.text == image.rows["captions"][1]["text"] and not sample.values and sample.pixels is None

    sample = ShardDataset(shards, "train", "questions")[2]
    assert sample["answers"] == ("2",) * 9 + ("many",)
    assert (sample["question_type"], sample["answer_type"], sample.text) == ("how many", "number", "how many?")

    statements = ShardDataset(shards, "train", "statements")
    assert [statements[i]["label"] for i in range(3)] == [True, False, None] and statements[0]["group"] == "g"

    images = ShardDataset(shards, "train", "images")
    assert len(images) == 7 and images[2]["captions"] == tuple(c["text"] for c in image.rows["captions"])
    assert images[2].text == ""


def test_regions_and_pixels_are_the_images_own(shards: Path, record: Record) -> None:
    for view in ("captions", "questions", "statements", "images"):
        dataset = ShardDataset(shards, "train", view, pixels=True)
        for sample in dataset:
            number = int(sample.image_id.split("/")[1][:3])
            wanted = record(number, sample.source, pixels=True)
            assert sample.regions is not None
            np.testing.assert_array_equal(sample.regions.features, wanted.regions.features)
            assert sample.regions.features.dtype == np.float16
            assert sample.pixels == wanted.pixels
    assert ShardDataset(shards, "train", "images", regions=False)[0].regions is None


def test_sources_select_and_repeat_datasets(shards: Path) -> None:
    assert len(ShardDataset(shards, "train", "captions")) == len(ShardDataset(shards, "train", "captions", {})) == 14
    both = ShardDataset(shards, "train", "captions", {"scenes": 1, "nlvr": 3})
    ids = [sample.sample_id for sample in both]
    assert len(ids) == 10 + 3 * 4 and ids.count("nlvr/000.a b#0") == 3 and ids.count("scenes/000.a b#0") == 1
    turned = ShardDataset(shards, "train", "captions", {"nlvr": 3, "scenes": 1})
    assert ids == [sample.sample_id for sample in turned], "whatever the order in params.yaml"
    assert {s.source for s in ShardDataset(shards, "train", "captions", {"nlvr": 1})} == {"nlvr"}
    assert len(ShardDataset(shards, "val", "captions", {"nlvr": 1})) == 0
    with pytest.raises(ParamsError, match=r"no dataset `coco`.*nlvr, scenes"):
        ShardDataset(shards, "train", "captions", {"coco": 1})


def test_empty_and_unknown_splits(shards: Path) -> None:
    assert len(ShardDataset(shards, "test", "questions")) == 0
    with pytest.raises(DataError, match=r"index-dev.parquet: no such file"):
        ShardDataset(shards, "dev", "questions")


def test_manifest(shards: Path) -> None:
    manifest = ShardDataset(shards, "val", "images").manifest
    assert (manifest.feature_dim, manifest.num_classes, manifest.detector_id) == (6, 3, "test")
    assert manifest.classes[0] == "background" and manifest.sources == ("nlvr", "scenes")
    assert manifest.counts["train"]["captions"] == 14
    (shards / "manifest.json").write_text('{"stage": "other"}', encoding="utf-8")
    with pytest.raises(DataError, match="not a manifest of shards"):
        ShardDataset(shards, "val", "images")


def test_missing_parts_are_named(shards: Path, build_shards: Build, record: Record) -> None:
    dataset = ShardDataset(shards, "train", "captions")
    (shards / "train-00000000.tar").unlink()
    with pytest.raises(DataError, match=r"train-00000000\.tar: no such shard"):
        dataset[0]
    with pytest.raises(DataError, match="have no pixels"):
        ShardDataset(build_shards("bare", train=[record(1)]), "train", "images", pixels=True)
    with pytest.raises(DataError, match="dvc repro shards"):
        ShardDataset(shards / "nowhere", "train", "captions")


def test_dataset_works_in_a_spawned_worker(shards: Path) -> None:
    dataset = ShardDataset(shards, "train", "captions")
    copy = pickle.loads(pickle.dumps(dataset))  # our own object, in this process
    assert copy[3].sample_id == dataset[3].sample_id
