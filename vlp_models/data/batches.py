"""Batches: the immutable folders of a dataset that `vlp ingest` (contrib/ingest) adds to, one for each submission.

<batch>/pairs.jsonl           image, caption, split, and group and lang if the submission names them; the image's hashes
                              and size; the line it came from
<batch>/fingerprints.parquet  image fingerprints (curation/duplicates/fingerprints.py), in the order of pairs.jsonl
<batch>/images/ab/....jpg     by sha256
<batch>/quarantine.jsonl      every rejected pair, with rule and reason
<batch>/manifest.json         the submission, the counts, the params
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from vlp_models.data.tables import open_parquet
from vlp_models.errors import DataError, first_line
from vlp_models.params import Params

PAIRS, FINGERPRINTS, MANIFEST = "pairs.jsonl", "fingerprints.parquet", "manifest.json"
# keys of a row that `vlp ingest` writes for later ingests; training reads none of them
MEASURED = ("width", "height", "sha256", "pixels", "perceptual", "from")
FINGERPRINT_ROWS = 512  # that are read or written at a time; each has several kilobytes


def batch_folders(dataset: Path) -> list[Path]:
    """Return the folders of a dataset's complete batches, sorted by name."""
    return sorted(path.parent for path in dataset.glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))


def read_fingerprints(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (image, fingerprint) of a batch's images in their order.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        for block in open_parquet(path).iter_batches(FINGERPRINT_ROWS):
            yield from zip(block["image"].to_pylist(), block["fingerprint"].to_pylist(), strict=True)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: missing or damaged ({first_line(error)}); run `dvc checkout {path.parent}.dvc`, or remove the "
            "batch and ingest its submission again"
        ) from None


def ingested_dataset(params: Params) -> str:
    """Return the name under which params.yaml reads the dataset of batches; "ingested" where it does not."""
    root = Path(params.ingest.dataset)
    return next((name for name, source in params.data.items() if Path(source.root) == root), "ingested")
