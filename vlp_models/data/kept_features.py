"""The regions that the last run of the features stage made, by their image's content.

data/features is an output, deleted before its stage starts. Its chunks stay as hard links, which take no room; the next
run takes the regions of every image it knows from there, and extracts those of the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.common.io import link_or_copy, output_directory
from vlp_models.data.features import FeatureStore
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError

HASHES = "hashes.parquet"  # image_id, sha256 of the image file


class KeptFeatures:
    """What `keep_features` put into `directory`; of a missing or damaged one, nothing."""

    def __init__(self, directory: Path) -> None:
        self._ids: dict[str, str] = {}
        self._store: FeatureStore | None = None
        try:
            table = pq.read_table(directory / HASHES)
            self._store = FeatureStore(directory)
            self._ids = dict(zip(table["sha256"].to_pylist(), table["image_id"].to_pylist(), strict=True))
        except (OSError, pa.ArrowException, DataError, KeyError):
            return

    def get(self, sha256: str) -> RegionArrays | None:
        """The regions of the image with this content; None where they are not known, or can't be read."""
        if self._store is None or sha256 not in self._ids:
            return None
        try:
            return self._store.get(self._ids[sha256])
        except DataError:
            return None


def keep_features(features: Path, images: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Keeps a finished data/features for the next run; whatever lies beside `directory`, of other detectors, goes.

    Args:
        images: rows of the images table.
    """
    with output_directory(directory) as new:
        for path in features.iterdir():
            link_or_copy(path, new / path.name)
        rows = [{"image_id": row["image_id"], "sha256": row["sha256"]} for row in images if row["sha256"]]
        schema = pa.schema([("image_id", pa.string()), ("sha256", pa.string())])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), new / HASHES)
    for other in directory.parent.iterdir():
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
