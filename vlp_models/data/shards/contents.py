"""data/contents: what the shards hold, as hashes, and which of them a run goes by.

Shards are packed anew whenever a dataset or a kind of model is added. What a run reads of them mostly stays, so a run
depends on the hashes of that: of its view, in the datasets that it learns from, with regions, pixels or neither.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.common.io import hash_file, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.archive import REGIONS, read_member
from vlp_models.data.shards.write import index_name, shard_name
from vlp_models.data.tables import SPLITS, open_parquet
from vlp_models.data.views import VIEWS

Kind = Literal["regions", "pixels", "texts"]  # what of an image is read; texts: nothing
CONTENTS = "data/contents"  # below it: a folder of each kind that a model is of


def facts_file(kind: Kind) -> str:
    """What such a model must know before its first step."""
    return f"{kind}/facts.json"


def trained_on_file(kind: Kind, view: str, sources: Collection[str]) -> str:
    """What a run learns from and is validated on.

    Args:
        sources: datasets; empty: all. Of one dataset there is a file of its own; several go by that of all.
    """
    name = f"of/{next(iter(sources))}" if len(sources) == 1 else "all"
    return f"{kind}/learnt/{view}/{name}.json"


def held_out_file(kind: Kind, view: str) -> str:
    """The test split."""
    return f"{kind}/held_out/{view}.json"


def find_changed_data(workspace: Workspace, inputs: Mapping[str, str]) -> list[str]:
    """Of the data that a checkpoint says it learned from, what is not here, or is other data now.

    Args:
        inputs: `provenance.inputs` of its config.json. Checkpoints of earlier versions name the shards' indexes.
    """
    here = {
        name: workspace.shards / name if name.startswith("index-") else workspace.root / name
        for name in trained_on_inputs(inputs)
    }
    return [name for name, path in here.items() if not path.exists() or hash_file(path) != inputs[name]]


def trained_on_inputs(inputs: Mapping[str, str]) -> list[str]:
    """The names among a checkpoint's inputs that stand for data of the shards."""
    return [name for name in inputs if name.startswith((f"{CONTENTS}/", "index-"))]


BATCH = 4096  # samples


def write_hashes(file: Path, shards: Path, split: str, kinds: Sequence[Kind]) -> None:
    """Writes, of each sample in the index that lies in `shards`, view, dataset and hashes, in their order."""
    schema = pa.schema([("view", pa.string()), ("source", pa.string()), *((kind, pa.binary(32)) for kind in kinds)])
    with pq.ParquetWriter(file, schema) as writer, open_parquet(shards / index_name(split)) as index:
        last: tuple[tuple[int, str], dict[Kind, bytes]] | None = None
        for batch in index.iter_batches(batch_size=BATCH):
            found: dict[str, list[Any]] = {name: [] for name in schema.names}
            for row in batch.to_pylist():
                place = (row["shard"], row["key"])
                if last is None or last[0] != place:  # an image's samples stand together
                    last = place, {kind: _of_image(shards, split, row, kind) for kind in kinds}
                columns = VIEWS[row["view"]].indexed
                told = [row["sample_id"], row["image_id"], *(row[column.name] for column in columns)]
                text = json.dumps(told, ensure_ascii=False).encode()
                found["view"].append(row["view"])
                found["source"].append(row["source"])
                for kind in kinds:
                    found[kind].append(hashlib.sha256(text + last[1][kind]).digest())
            writer.write_batch(pa.record_batch(found, schema))


def write_contents(
    directory: Path,
    hashes: Mapping[str, Iterable[Path]],
    sources: Sequence[str],
    facts: Mapping[Kind, Mapping[str, Any]],
) -> None:
    """Writes data/contents into `directory`.

    Args:
        hashes: split -> what `write_hashes` wrote, in the order of the shards.
        sources: every dataset, also one without samples.
        facts: of each kind that the models are of, what such a model must know.
    """
    found: dict[tuple[Kind, str, str], dict[str, _Hash]] = defaultdict(dict)  # kind, view, dataset -> split -> hash
    for split in SPLITS:
        for file in hashes.get(split, ()):
            table = pq.read_table(file)
            for kind in facts:
                for (view, source), samples in _grouped(table, kind).items():
                    found[kind, view, source].setdefault(split, _Hash()).add(samples)
    for kind, known in facts.items():
        write_json(directory / facts_file(kind), known)
        for name, columns in VIEWS.items():
            # rows that name several images are read with all of them
            read = (name, "images") if columns.images == "several" else (name,)
            learnt = {source: _told(found, kind, read, source, SPLITS[:2]) for source in sources}
            tested = {source: _told(found, kind, read, source, SPLITS[2:]) for source in sources}
            for whole, each in ((trained_on_file(kind, name, ()), learnt), (held_out_file(kind, name), tested)):
                write_json(directory / whole, {source: told for source, told in each.items() if told})
            for source, told in learnt.items():
                write_json(directory / trained_on_file(kind, name, [source]), told)


class _Hash:
    """Of samples' hashes behind each other."""

    def __init__(self) -> None:
        self._samples = 0
        self._sha256 = hashlib.sha256()

    def add(self, hashes: Sequence[bytes]) -> None:
        self._samples += len(hashes)
        self._sha256.update(b"".join(hashes))

    def told(self) -> dict[str, Any]:
        return {"samples": self._samples, "sha256": self._sha256.hexdigest()}


def _told(
    found: Mapping[tuple[Kind, str, str], Mapping[str, _Hash]],
    kind: Kind,
    views: Sequence[str],
    source: str,
    splits: Sequence[str],
) -> dict[str, Any]:
    """Of these splits of a dataset, what there is of each view; nothing where there is nothing of the first one."""
    of_views = {view: found.get((kind, view, source), {}) for view in views}
    if not any(split in of_views[views[0]] for split in splits):
        return {}
    return {view: {split: h[split].told() for split in splits if split in h} for view, h in of_views.items()}


def _of_image(shards: Path, split: str, row: Mapping[str, Any], kind: Kind) -> bytes:
    """The sha256 of what a model of this kind reads of a row's image."""
    if kind == "texts" or row["shard"] < 0:
        return b""
    extension = REGIONS if kind == "regions" else row["pixels_extension"]
    name, size = f"{row['key']}.{extension}", row[f"{kind}_size"]
    member = read_member(shards / shard_name(split, row["shard"]), name, row[f"{kind}_offset"], size)
    return hashlib.sha256(member).digest()


def _grouped(table: pa.Table, kind: Kind) -> dict[tuple[str, str], list[bytes]]:
    """(view, dataset) -> its samples' hashes, in their order."""
    found: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    columns = (table[name].to_pylist() for name in ("view", "source", kind))
    for view, source, sample in zip(*columns, strict=True):
        found[view, source].append(sample)
    return found
