"""data/contents: hashes of the samples in the shards, independent of their packing, and the hashes a run depends on.

Shards are packed again whenever a dataset or a kind of model is added, but most runs read the same as before. So a run
depends on the hashes of the fields it reads: its view, in its training datasets, with regions, pixels or neither.

The hash of a sample covers its ids, its columns and, depending on what a model reads, its image's regions, its image
file or neither. The hash of a dataset covers its samples' hashes in order, so neither other datasets nor other contents
of the tars change it.
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

Kind = Literal["regions", "pixels", "texts"]  # what a model reads of an image; texts: nothing
CONTENTS = "data/contents"  # has a folder per kind
BATCH = 4096  # samples


def part_of(source: str, image_id: str, parts: int) -> str:
    """Return the part of a dataset that an image is in, such as `scenes/1-of-4`: a name that `sources` may have.

    It follows from the id alone, so an image that comes or leaves moves no other.
    """
    number = int.from_bytes(hashlib.sha256(image_id.encode()).digest()[:8]) % parts + 1
    return f"{source}/{number}-of-{parts}"


def facts_file(kind: Kind) -> str:
    """Return the path of the facts that a model of this kind needs before its first step."""
    return f"{kind}/facts.json"


def trained_on_file(kind: Kind, view: str, sources: Collection[str]) -> str:
    """Return the path of the hashes of a run's training and validation samples.

    Args:
        sources: datasets; empty: all. One dataset has a file of its own; several use the file of all.
    """
    name = f"of/{next(iter(sources))}" if len(sources) == 1 else "all"
    return f"{kind}/trained_on/{view}/{name}.json"


def evaluation_file(kind: Kind, view: str) -> str:
    """Return the path of the hashes of the test split."""
    return f"{kind}/test/{view}.json"


def find_changed_data(workspace: Workspace, inputs: Mapping[str, str]) -> list[str]:
    """Return the data among a checkpoint's inputs that is missing or has changed.

    Args:
        inputs: `provenance.inputs` of its config.json.
    """
    # indexes are in data/shards, data/contents below the root
    folders = {
        name: workspace.shards if name.startswith("index-") else workspace.root for name in trained_on_inputs(inputs)
    }
    paths = {name: folder / name for name, folder in folders.items()}
    return [name for name, path in paths.items() if not path.exists() or hash_file(path) != inputs[name]]


def trained_on_inputs(inputs: Mapping[str, str]) -> list[str]:
    """Return the names among a checkpoint's inputs that are data of the shards.

    A streamed run has the indexes among them: the packing decides its order of samples.
    """
    return [name for name in inputs if name.startswith((f"{CONTENTS}/", "index-"))]


def write_hashes(file: Path, shards: Path, split: str, kinds: Sequence[Kind]) -> None:
    """Write view, dataset, image and hashes of each sample in the index in `shards`, in order."""
    names = ("view", "source", "image_id")
    schema = pa.schema([*((name, pa.string()) for name in names), *((kind, pa.binary(32)) for kind in kinds)])
    with pq.ParquetWriter(file, schema) as writer, open_parquet(shards / index_name(split)) as index:
        last: tuple[tuple[int, str], dict[Kind, bytes]] | None = None
        for batch in index.iter_batches(batch_size=BATCH):
            columns: dict[str, list[Any]] = {name: [] for name in schema.names}
            for row in batch.to_pylist():
                image = (row["shard"], row["key"])
                if last is None or last[0] != image:  # samples of one image are adjacent
                    last = image, {kind: _hash_image(shards, split, row, kind) for kind in kinds}
                view = VIEWS[row["view"]]
                values = [row["sample_id"], row["image_id"], *(row[column.name] for column in view.indexed)]
                text = json.dumps(values, ensure_ascii=False).encode()
                for name in names:
                    columns[name].append(row[name])
                for kind in kinds:
                    # The row's own values, then its image's: the hash changes with either.
                    columns[kind].append(hashlib.sha256(text + last[1][kind]).digest())
            writer.write_batch(pa.record_batch(columns, schema))


def write_contents(
    directory: Path,
    hashes: Mapping[str, Iterable[Path]],
    sources: Sequence[str],
    facts: Mapping[Kind, Mapping[str, Any]],
    parts: Sequence[int] = (),
) -> None:
    """Write data/contents into `directory`.

    Args:
        hashes: split -> files of `write_hashes`, in the order of the shards.
        sources: every dataset, including those without samples.
        facts: per kind of model, what such a model must know.
        parts: into how many parts the images of a dataset are divided; each part's hashes are written as well.
    """
    # kind, view, dataset -> split -> number of samples, and the hash of their concatenated hashes
    dataset_hashes: dict[tuple[Kind, str, str], dict[str, list[Any]]] = defaultdict(dict)
    # hashes of one dataset are joined in the order of the shards
    for split in SPLITS:
        for file in hashes.get(split, ()):
            table = pq.read_table(file)
            for kind in facts:
                values = (table[name].to_pylist() for name in ("view", "source", "image_id", kind))
                for view, source, image_id, sample_hash in zip(*values, strict=True):
                    for name in (source, *(part_of(source, image_id, count) for count in parts)):
                        counted = dataset_hashes[kind, view, name].setdefault(split, [0, hashlib.sha256()])
                        counted[0] += 1
                        counted[1].update(sample_hash)
    part_names = sorted({source for *_, source in dataset_hashes}.difference(sources))
    for kind, kind_facts in facts.items():
        write_json(directory / facts_file(kind), kind_facts)
        for name, columns in VIEWS.items():
            # rows with several images depend on all of these
            read = (name, "images") if columns.images == "several" else (name,)
            # Train and val are what a training reads, test is what an evaluation reads.
            trained_on = {source: _summarize(dataset_hashes, kind, read, source, SPLITS[:2]) for source in sources}
            tested = {source: _summarize(dataset_hashes, kind, read, source, SPLITS[2:]) for source in sources}
            # one file for all datasets, then one per dataset: a run depends on those it reads
            for path, summaries in (
                (trained_on_file(kind, name, ()), trained_on),
                (evaluation_file(kind, name), tested),
            ):
                write_json(directory / path, {source: summary for source, summary in summaries.items() if summary})
            for source in (*sources, *part_names):
                summary = _summarize(dataset_hashes, kind, read, source, SPLITS[:2])
                write_json(directory / trained_on_file(kind, name, [source]), summary)


def _summarize(
    dataset_hashes: Mapping[tuple[Kind, str, str], Mapping[str, list[Any]]],
    kind: Kind,
    views: Sequence[str],
    source: str,
    splits: Sequence[str],
) -> dict[str, Any]:
    """Return counts and hashes of these splits per view; empty if the first view has no samples in them."""
    summaries = {}
    for view in views:
        hashes = dataset_hashes.get((kind, view, source), {})  # by split
        summaries[view] = {
            split: {"samples": hashes[split][0], "sha256": hashes[split][1].hexdigest()}
            for split in splits
            if split in hashes
        }
    return summaries if summaries[views[0]] else {}


def _hash_image(shards: Path, split: str, row: Mapping[str, Any], kind: Kind) -> bytes:
    """Return the sha256 of the parts of a row's image that a model of this kind reads."""
    # no image, or none that is read
    if kind == "texts" or row["shard"] < 0:
        return b""
    extension = REGIONS if kind == "regions" else row["pixels_extension"]
    name, size = f"{row['key']}.{extension}", row[f"{kind}_size"]
    member = read_member(shards / shard_name(split, row["shard"]), name, row[f"{kind}_offset"], size)
    return hashlib.sha256(member).digest()
