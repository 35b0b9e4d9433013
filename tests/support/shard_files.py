"""Read shards back, and hash shards that no pipeline stage wrote."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlp_models.data.shards.archive import check_tar, decode
from vlp_models.data.shards.contents import Kind, write_contents, write_hashes
from vlp_models.data.tables import SPLITS


def read_shard(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check the whole archive, then yield (key, {extension: decoded value}) in order."""
    members = check_tar(path)
    with path.open("rb") as file:
        key = ""
        values: dict[str, Any] = {}
        for member in members:
            if member.key != key and values:
                yield key, values
                values = {}
            key = member.key
            file.seek(member.offset)
            values[member.extension] = decode(member.extension, file.read(member.size), where=f"{path}: {member.name}")
        if values:
            yield key, values


def hash_shards(shards: Path, kind: Kind) -> None:
    """Write the folder `contents` next to `shards`."""
    manifest = json.loads((shards / "manifest.json").read_text(encoding="utf-8"))
    facts = {name: manifest[name] for name in ("feature_dim", "classes", "detector_id")} if kind == "regions" else {}
    with tempfile.TemporaryDirectory() as temporary:
        files = {split: Path(temporary) / split for split in SPLITS if (shards / f"index-{split}.parquet").exists()}
        for split, file in files.items():
            write_hashes(file, shards, split, [kind])
        hashes = {split: [file] for split, file in files.items()}
        write_contents(shards.parent / "contents", hashes, manifest["sources"], {kind: facts})
