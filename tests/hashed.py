"""data/contents beside shards that no stage made."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from vlp_models.data.content_hashes import Kind
from vlp_models.data.shards.contents import write_contents, write_hashes
from vlp_models.data.tables import SPLITS


def hash_beside(shards: Path, kind: Kind) -> None:
    """Writes the folder `contents` beside `shards`."""
    manifest = json.loads((shards / "manifest.json").read_text(encoding="utf-8"))
    facts = {name: manifest[name] for name in ("feature_dim", "classes", "detector_id")} if kind == "regions" else {}
    with tempfile.TemporaryDirectory() as temporary:
        files = {split: Path(temporary) / split for split in SPLITS if (shards / f"index-{split}.parquet").exists()}
        for split, file in files.items():
            write_hashes(file, shards, split, [kind])
        found = {split: [file] for split, file in files.items()}
        write_contents(shards.parent / "contents", found, manifest["sources"], {kind: facts})
