"""The nearest training images: by pooled regions, with a caption, of the same dataset, never the image itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.evaluation.predict import NearestTrainImages

FEATURES = {  # image -> the features of its regions, captions
    "s/a": ([[1, 0], [1, 0]], 1),
    "s/b": ([[3, 3], [1, 1]], 1),
    "s/c": ([[0, 5]], 1),
    "s/bare": ([[2, 2]], 0),  # no caption
    "s/empty": ([], 1),
    "t/other": ([[4, 4]], 1),  # another dataset
}


def record(image_id: str, features: list[list[int]], captions: int) -> ImageRecord:
    n = len(features)
    rows = [{"caption_id": f"{image_id}#{k}", "image_id": image_id, "text": "a dog"} for k in range(captions)]
    return ImageRecord(
        image_id=image_id,
        source=image_id.partition("/")[0],
        width=10,
        height=10,
        regions=RegionArrays(
            features=np.array(features, np.float16).reshape(n, 2),
            boxes=np.zeros((n, 4), np.float32),
            class_probs=np.zeros((n, 1), np.float16),
            scores=np.ones(n, np.float32),
        ),
        rows={"captions": rows},
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    counts = {}
    for split, images in (("train", FEATURES), ("test", {"s/x": ([[9, 8]], 1), "s/y": ([[0, 1], [0, 1]], 1)})):
        writer = ShardWriter(tmp_path, split, 3)
        for image_id, (features, captions) in sorted(images.items()):
            writer.add(record(image_id, features, captions))
        counts[split] = writer.close()
    manifest = {"feature_dim": 2, "classes": ["b"], "detector_id": "d", "sources": ["s", "t"], "counts": counts}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_captioned_images_of_the_dataset_nearest_first(shards: Path) -> None:
    found = NearestTrainImages(shards, "s").find("test", ["s/x", "s/y"])
    assert found == {"s/x": ["s/b", "s/a", "s/c", "s/empty"], "s/y": ["s/c", "s/b", "s/a", "s/empty"]}
    assert NearestTrainImages(shards, "s").find("test", ["s/y"], count=2) == {"s/y": ["s/c", "s/b"]}
    # a training image is not its own neighbor
    assert NearestTrainImages(shards, "s").find("train", ["s/c"], count=3) == {"s/c": ["s/b", "s/a", "s/empty"]}


def test_shards_without_regions_give_no_neighbors(shards: Path) -> None:
    manifest = json.loads((shards / "manifest.json").read_text()) | {"feature_dim": 0}
    (shards / "manifest.json").write_text(json.dumps(manifest))
    assert NearestTrainImages(shards, "s").find("test", ["s/x"]) == {}
