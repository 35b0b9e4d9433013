"""Write a batch: the accepted pairs of a submission, in a folder named by its content (data/batches.py)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.common.io import sync_to_disk
from vlp_models.contrib.ingest.index import unsigned
from vlp_models.contrib.ingest.reading import Staging
from vlp_models.data.batches import FINGERPRINT_ROWS, FINGERPRINTS, MANIFEST, PAIRS

FORMAT = "vlp-batch/1"
QUARANTINE = "quarantine.jsonl"


def write_batch(folder: Path, staging: Staging, about: dict[str, Any]) -> str:
    """Turn `folder`, which holds the submission's valid images, into a batch; return its name, a hash of the pairs.

    Rejected images are deleted. `about` goes into the manifest.
    """
    # A null verdict means accepted, in both tables: a pair needs an accepted image and its own.
    run = staging.connection.execute
    # files of rejected images that no accepted image shares
    for (stored,) in run(
        "SELECT DISTINCT stored FROM images WHERE verdict IS NOT NULL AND stored IS NOT NULL AND stored NOT IN "
        "(SELECT stored FROM images WHERE verdict IS NULL AND stored IS NOT NULL)"
    ):
        (folder / stored).unlink(missing_ok=True)
    splits: Counter[str] = Counter()

    def rows() -> Iterable[dict[str, Any]]:
        for stored, caption, split, together, language, sha256, pixels, perceptual, width, height, provenance in run(
            "SELECT i.stored, p.caption, i.split, i.together, p.language, i.sha256, i.pixels, i.perceptual, i.width, "
            "i.height, p.provenance "
            "FROM pairs p JOIN images i ON i.id = p.image "
            "WHERE p.verdict IS NULL AND i.verdict IS NULL ORDER BY i.id, p.id"
        ):
            splits[split] += 1
            yield {
                "image": stored,
                "caption": caption,
                "split": split,
                **({"group": together} if together else {}),
                **({"lang": language} if language else {}),
                "width": width,
                "height": height,
                "sha256": sha256.hex(),
                "pixels": pixels.hex(),
                # 16 hexadecimal digits of the unsigned hash, whatever sign SQLite stores.
                "perceptual": None if perceptual is None else f"{unsigned(perceptual):016x}",
                "from": provenance,
            }

    digest = _write_lines(folder / PAIRS, rows())
    cursor = run(
        "SELECT stored, fingerprint FROM images WHERE verdict IS NULL AND id IN "
        "(SELECT image FROM pairs WHERE verdict IS NULL) ORDER BY id"
    )
    schema = pa.schema([("image", pa.string()), ("fingerprint", pa.binary())])
    with pq.ParquetWriter(folder / FINGERPRINTS, schema, compression="zstd") as writer:
        while block := cursor.fetchmany(FINGERPRINT_ROWS):
            images, fingerprints = zip(*block, strict=True)
            writer.write_table(pa.table({"image": images, "fingerprint": fingerprints}, schema=schema))
    write_quarantine(folder / QUARANTINE, staging)
    manifest = {
        "format": FORMAT,
        **about,
        "counts": staging.counts(),
        "splits": splits,
        "rules": count_by_rule(staging),
    }
    # Written last: a folder without a manifest is not a batch.
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # the name of the batch
    return digest[:16]


def write_quarantine(path: Path, staging: Staging) -> None:
    """Write every rejected pair as a JSON line with verdict, rule and reason."""
    # A pair's own verdict counts before its image's; lines that cannot be read have no image.
    rows = staging.connection.execute(
        "SELECT p.provenance, i.path, coalesce(p.verdict, i.verdict), coalesce(p.rule, i.rule), "
        "coalesce(p.reason, i.reason) FROM pairs p LEFT JOIN images i ON i.id = p.image "
        "WHERE p.verdict IS NOT NULL OR i.verdict IS NOT NULL ORDER BY p.id"
    )
    _write_lines(path, (dict(zip(("from", "image", "verdict", "rule", "reason"), row, strict=True)) for row in rows))


def count_by_rule(staging: Staging) -> dict[str, int]:
    """Count the rejected pairs by the rule they broke, most frequent first."""
    query = (
        "SELECT coalesce(p.rule, i.rule), count(*) FROM pairs p LEFT JOIN images i ON i.id = p.image "
        "WHERE p.verdict IS NOT NULL OR i.verdict IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
    )
    return dict(staging.connection.execute(query).fetchall())


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write one JSON object a line, flushed to disk; return the sha256 of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
            digest.update(line)
            file.write(line)
    sync_to_disk(path)  # a batch is complete once it is renamed, so its content must be on disk before
    return digest.hexdigest()
