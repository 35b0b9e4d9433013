"""Fixtures: small shards, made the way the stage makes them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.write import ImageRecord, ShardWriter

FEATURE_DIM = 6
CLASSES = ["background", "cube", "ball"]


def make_regions(seed: int, n: int) -> RegionArrays:
    rng = np.random.default_rng(seed)
    return RegionArrays(
        features=rng.standard_normal((n, FEATURE_DIM)).astype(np.float16),
        boxes=rng.random((n, 4), dtype=np.float32),
        class_probs=rng.random((n, len(CLASSES))).astype(np.float16),
        scores=np.sort(rng.random(n, dtype=np.float32))[::-1].copy(),
    )


def make_record(number: int, source: str = "scenes", pixels: bool = False) -> ImageRecord:
    """Image `number`: `number % 4` regions, two captions, one question, one statement."""
    image_id = f"{source}/{number:03d}.a b"
    data = io.BytesIO()
    Image.new("RGB", (8, 4), (number, 0, 0)).save(data, "PNG")
    return ImageRecord(
        image_id=image_id,
        source=source,
        width=8,
        height=4,
        regions=make_regions(number, number % 4),
        rows={
            "captions": [{"caption_id": f"{image_id}#{i}", "text": f"caption {i} of {number}, “é”"} for i in range(2)],
            "questions": [
                {
                    "question_id": f"{image_id}?",
                    "text": "how many?",
                    "question_type": "how many",
                    "answer_type": "number",
                    "answers": [str(number)] * 9 + ["many"],
                }
            ],
            "statements": [
                {
                    "statement_id": f"{image_id}!",
                    "text": "true?",
                    "label": [True, False, None][number % 3],
                    "group": "g",
                }
            ],
        },
        pixels=data.getvalue() if pixels else None,
        pixels_extension="png" if pixels else "",
    )


@pytest.fixture
def build_shards(tmp_path: Path) -> Callable[..., Path]:
    """build_shards(name, train=..., val=..., pixels=...): a directory of shards, three images a tar."""

    def build(name: str = "shards", *, pixels: bool = False, **splits: list[ImageRecord]) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        counts = {}
        for split, records in splits.items():
            writer = ShardWriter(directory, split, images_per_shard=3)
            for record in records:
                writer.add(record)
            counts[split] = writer.close()
        sources = sorted({record.source for records in splits.values() for record in records})
        manifest = {
            "feature_dim": FEATURE_DIM,
            "classes": CLASSES,
            "detector_id": "test",
            "sources": sources,
            "counts": counts,
        }
        (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return directory

    return build


@pytest.fixture
def record() -> Callable[..., ImageRecord]:
    return make_record


@pytest.fixture
def regions() -> Callable[[int, int], RegionArrays]:
    return make_regions
