"""Samples per second from shards to padded batches, in one process: `python benchmarks/loader.py`.

Writes its own shards (16 regions of 256 dimensions per image, five captions) to a temporary directory. CPU seconds are
what one core needs; wall-clock seconds depend on the machine's load.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from vlp_models.data.batch import Batch, collate_regions
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.data.tokenizer import Tokenizer

IMAGES, REGIONS, FEATURE_DIM, CLASSES, BATCH_SIZE = 2000, 16, 256, 40, 128
TEXT = "a large red circle left of a small blue square"


def write_shards(directory: Path) -> None:
    rng = np.random.default_rng(0)
    writer = ShardWriter(directory, "train", images_per_shard=500)
    for number in range(IMAGES):
        image_id = f"scenes/{number:06d}"
        regions = RegionArrays(
            features=rng.standard_normal((REGIONS, FEATURE_DIM)).astype(np.float16),
            boxes=rng.random((REGIONS, 4), dtype=np.float32),
            class_probs=rng.random((REGIONS, CLASSES)).astype(np.float16),
            scores=rng.random(REGIONS, dtype=np.float32),
        )
        captions = [{"caption_id": f"{image_id}#{i}", "text": TEXT} for i in range(5)]
        writer.add(
            ImageRecord(
                image_id=image_id, source="scenes", width=128, height=128, regions=regions, rows={"captions": captions}
            )
        )
    manifest = {
        "feature_dim": FEATURE_DIM,
        "classes": [str(i) for i in range(CLASSES)],
        "detector_id": "random",
        "sources": ["scenes"],
        "counts": {"train": writer.close()},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def main() -> None:
    tokenizer = Tokenizer.train([TEXT] * 2, 100, 1, True)

    def collate(samples: list[Sample]) -> Batch:
        return Batch(
            sample_ids=tuple(sample.sample_id for sample in samples),
            image_ids=tuple(sample.image_id for sample in samples),
            image=collate_regions([sample.regions for sample in samples if sample.regions is not None], REGIONS),
            text=tokenizer.encode_batch([sample.text for sample in samples], 32),
        )

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_shards(directory)
        dataset = ShardDataset(directory, "train", "captions")
        loader = ResumableLoader(dataset, batch_size=BATCH_SIZE, collate=collate, seed=1, shuffle=True)
        for label in ("first epoch", "second epoch"):
            wall, cpu = time.perf_counter(), time.process_time()
            count = sum(len(batch) for batch in loader)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{label}: {count:,} samples, {count / cpu:,.0f}/s CPU, {count / wall:,.0f}/s wall clock")


if __name__ == "__main__":
    main()
