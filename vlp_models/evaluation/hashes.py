"""What an evaluation was of: hashes by which two of them are known to be of the same test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.io import hash_file
from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table
from vlp_models.data.views import View


def data_hash(shards: Path) -> str:
    """What was evaluated on: the shards' manifest and indexes (ids, texts, detector), first 16 hex digits."""
    files = [shards / "manifest.json", *sorted(shards.glob("index-*.parquet"))]
    return hashlib.sha256("".join(f"{file.name} {hash_file(file)}\n" for file in files).encode()).hexdigest()[:16]


def test_hash(samples: Iterable[Sample], view: View, validated: Path) -> str:
    """What was to be predicted: ids, the view's texts and right answers, and the images' bytes; first 16 hex digits.

    Neither the detector nor the training data count: models with other features answer the same test. Nor do columns of
    other views: a new one leaves every test as it was.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    images = read_table("images", validated, columns=["image_id", "sha256"])
    wanted = pa.array({image_id for sample in ordered for image_id in sample.image_ids}, pa.string())
    images = images.filter(pc.is_in(images["image_id"], value_set=wanted))
    pixels = dict(zip(images["image_id"].to_pylist(), images["sha256"].to_pylist(), strict=True))
    digest = hashlib.sha256()
    for sample in ordered:
        values = {column.name: sample.values.get(column.name) for column in view.indexed if column.name != "text"}
        seen = [pixels.get(image_id, "") for image_id in sample.image_ids]
        row = [sample.sample_id, sample.image_id, sample.source, sample.text, values, *seen]
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]
