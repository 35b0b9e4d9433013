"""shards: pack the validated tables with what the models read of images (region features, image files) for training.

Any process can make a shard. Finished ones are kept under .work, so a resumed run makes only the rest, with an equal
result. Images are joined with their rows on disk, and handed out shard by shard.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.executors import LocalMapper, Mapper, list_chunks
from vlp_models.common.io import output_directory, read_json, stat_file, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.progress import progress_bar
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace, fingerprint, require_output, write_manifest
from vlp_models.data.features import FeatureStore, chunk_name
from vlp_models.data.inputs import ModelInputs, RequiredContent, required_content
from vlp_models.data.joins import Database, RowCursor
from vlp_models.data.shards.archive import check_tar
from vlp_models.data.shards.contents import write_contents, write_hashes
from vlp_models.data.shards.write import ImageRecord, ShardWriter, join_parts
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, SPLITS, read_batches, read_table
from vlp_models.data.views import TABLES, VIEW_MODULES, VIEWS
from vlp_models.errors import DataError
from vlp_models.models.meta_model import model_inputs
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.engines import cluster_mapper, cluster_of
from vlp_models.pipeline.unrecorded_results import remove_chunks, restore_unrecorded_result, save_unrecorded_result

logger = get_logger(__name__)

Shard = tuple[str, int, list[dict[str, Any]]]  # split, number, rows of images with their texts
COUNTS = "counts.json"
HASHES = "contents.parquet"
PART_FORMAT = 4  # version of the format of a part


def run(
    params: Params,
    workspace: Workspace,
    key: str = "",
    inputs: Iterable[ModelInputs] | None = None,
) -> None:
    """Write data/shards (tars and an index per split, an empty index for a split without images) and data/contents,
    the hashes of the shards' content.

    Args:
        inputs: what the models read; default: the models of params.yaml. If none reads regions, data/features is not
            needed.

    Raises:
        DataError: an image has no entry in data/features, or (with pixels) no readable file.
        ParamsError: `shards.pixels: false` although a model reads pixels,
            `validate.min_image_side` below a model's patch size, or `validate.max_image_pixels` above what is decoded.
    """
    p = params.shards
    mapper = cluster_mapper(params, workspace) or LocalMapper(cluster_of(params).workers or 1)
    validated = require_output(workspace.validated, "validate")
    v = params.validate
    inputs = model_inputs(params.models) if inputs is None else inputs
    required = required_content(inputs, p.pixels, v.min_image_side, v.max_image_pixels)
    store = FeatureStore(require_output(workspace.features, "features")) if required.regions else None
    if store is not None:
        _check_features(validated, store, workspace)
    # tables without images, which are in no tar
    texts = {name: read_table(name, validated) for name, view in TABLES.items() if not view.has_image}
    work = _work(workspace, to_plain(p), required)
    if restore_unrecorded_result(workspace, work, "shards"):
        return
    # what a model of these regions depends on; models that read none get zeros
    facts = {
        "feature_dim": store.feature_dim if store else 0,
        "classes": store.classes if store else [],
        "detector_id": store.detector_id if store else "",
    }
    sources = _sources(validated, texts)
    counts: dict[str, dict[str, int]] = {}
    hashes: dict[str, Iterable[Path]] = {}  # split -> the files with the hashes of its images
    with output_directory(workspace.shards) as directory, output_directory(workspace.contents) as contents:
        for split, parts in _make_parts(params, workspace, texts, work, required, mapper, directory).items():
            totals = Counter(dict.fromkeys((*VIEWS, "regions", "shards"), 0))
            for part in parts:
                totals.update(read_json(part / COUNTS))
            counts[split], hashes[split] = dict(totals), (part / HASHES for part in parts)
            # the parts, in order, become the shards of the split, and their indexes one index
            join_parts(directory, split, parts)
        write_manifest(
            directory,
            stage="shards",
            params=to_plain(p),
            counts=counts,
            sources=sources,
            **facts,
            num_classes=len(store.classes) if store else 0,
            pixels=required.pixels,
        )
        facts_of = {kind: facts if kind == "regions" else {} for kind in required.kinds}
        write_contents(contents, hashes, sources, facts_of, params.parts)
    # Saved before the parts go, so that a kill in between leaves one of the two.
    save_unrecorded_result(workspace, work, "shards", [workspace.shards, workspace.contents])
    remove_chunks(work)
    described = []
    for split, numbers in counts.items():
        described.append(f"{split} " + ", ".join(f"{count:,} {name}" for name, count in numbers.items() if count))
    logger.info("shards: %s", "; ".join(described))


def _make_parts(
    params: Params,
    workspace: Workspace,
    texts: Mapping[str, pa.Table],
    work: Path,
    required: RequiredContent,
    mapper: Mapper,
    scratch: Path,
) -> dict[str, _Parts]:
    """Make the parts that `work` lacks, one shard each; return those of each split, in order.

    Args:
        texts: rows without an image, by table.
        scratch: folder of a temporary database.
    """
    size = params.shards.images_per_shard
    features = workspace.features if required.regions else None
    make = functools.partial(_make_shard, root=workspace.root, features=features, work=work, required=required)
    with Database.within(scratch) as database:
        joined = _ImageRows(database, workspace.validated)
        # -(-a // b) rounds up.
        shard_counts = {split: -(-joined.count(split) // size) for split in SPLITS}
        # Run for its effect: each shard is in `work` when it is done.
        for _ in mapper.map(make, _missing_shards(joined, shard_counts, size, work)):
            pass
    return {
        split: _Parts(work, split, count, _without_images(texts, split, work, required))
        for split, count in shard_counts.items()
    }


def part_name(split: str, number: int) -> str:
    """Return the name of a shard's folder in the work directory."""
    return f"{split}-{number:08d}"


class _Parts:
    """The folders of a split's shards in their order, then that of its rows without an image, if there is one."""

    def __init__(self, work: Path, split: str, count: int, texts: list[Path]) -> None:
        self._work, self._split, self._count, self._texts = work, split, count, texts

    def __len__(self) -> int:
        return self._count + len(self._texts)

    def __iter__(self) -> Iterator[Path]:
        yield from (self._work / part_name(self._split, number) for number in range(self._count))
        yield from self._texts


def _work(workspace: Workspace, settings: dict[str, Any], required: RequiredContent) -> Path:
    """Return the folder of finished shards.

    Chunks of features are identified by `stat_file`, since there may be terabytes of them.
    """
    features = workspace.features
    chunks = hashlib.sha256()
    for number in count() if required.regions else ():
        try:
            chunks.update(repr(stat_file((features / chunk_name(number)).stat())).encode())
        except FileNotFoundError:  # after the last chunk
            break
    inputs = {"validated": workspace.validated}
    if required.regions:
        inputs["features"] = features / "manifest.json"
    identity = {
        "shards": settings,
        "held": dataclasses.asdict(required),
        "chunks": chunks.hexdigest(),
        "parts": PART_FORMAT,
        "views": code_hash(VIEW_MODULES.values()),
    }
    return workspace.work("shards", fingerprint(identity, inputs))


def _missing_shards(joined: _ImageRows, shard_counts: Mapping[str, int], size: int, work: Path) -> Iterator[Shard]:
    """Yield the shards that `work` lacks. shard_counts: by split."""
    for split, total in shard_counts.items():
        finished = list_chunks(work, total, functools.partial(part_name, split))
        if len(finished) == total:
            continue
        images = joined.choose(split)
        records = joined.records(size)
        with progress_bar(f"packing {split}", images, "images") as bar:
            for number in range(total):
                # The rows of finished shards are read as well, because they come in one stream.
                rows = list(islice(records, size))
                if number not in finished:
                    yield split, number, rows
                bar.advance(by=len(rows))


def _make_shard(shard: Shard, *, root: Path, features: Path | None, work: Path, required: RequiredContent) -> str:
    """Make one shard with its index, unless `work` has it; return the name of its folder there."""
    split, number, records = shard
    part = work / part_name(split, number)
    if part.exists():  # a lost worker had finished it
        return part.name
    store = _open_store(features, stat_file((features / "manifest.json").stat())) if features else None
    with output_directory(part, keep=True) as directory:
        # one tar and its index; the numbers of tars continue those of the parts before
        writer = ShardWriter(directory, split, len(records), first=number)
        for record in records:
            data, extension = _read_pixels(root / record["path"], record["sha256"]) if required.pixels else (None, "")
            writer.add(
                ImageRecord(
                    image_id=record["image_id"],
                    source=record["source"],
                    width=record["width"],
                    height=record["height"],
                    regions=store.get(record["image_id"]) if store else None,
                    rows=record["rows"],
                    pixels=data,
                    pixels_extension=extension,
                )
            )
        write_json(directory / COUNTS, writer.close())
        # a training that reads a damaged shard would end much later
        for tar in directory.glob("*.tar"):
            check_tar(tar)
        write_hashes(directory / HASHES, directory, split, required.kinds)
    return part.name


def _without_images(tables: Mapping[str, pa.Table], split: str, work: Path, required: RequiredContent) -> list[Path]:
    """Make a part with an index only, for rows without an image, if there are any."""
    # in the order of ids, as everything in the shards
    of_split = {name: table.filter(pc.equal(table["split"], split)) for name, table in tables.items()}
    if not any(len(table) for table in of_split.values()):
        return []
    part = work / f"{split}-texts"
    with output_directory(part) as directory:
        writer = ShardWriter(directory, split, 1)
        for name, table in of_split.items():
            writer.add_without_image(name, table.sort_by(TABLES[name].id_column).to_pylist())
        write_json(directory / COUNTS, writer.close())
        write_hashes(directory / HASHES, directory, split, required.kinds)
    return [part]


@functools.lru_cache(maxsize=1)
def _open_store(features: Path, changed: tuple[int, ...]) -> FeatureStore:
    """Open the features once per process, not once per shard. changed: differs after they were written again."""
    return FeatureStore(features)


def _check_features(validated: Path, store: FeatureStore, workspace: Workspace) -> None:
    total, missing = 0, 0
    examples: list[str] = []
    for table in read_batches([validated / "images.parquet"], BATCH_ROWS, ["image_id"]):
        lost = [image_id for image_id in table["image_id"].to_pylist() if image_id not in store]
        total += len(table)
        missing += len(lost)
        # The first three by id, whatever the order of the rows.
        examples = sorted([*examples, *lost])[:3]
    if missing:
        raise DataError(
            f"{workspace.features}: no features for {missing:,} of {total:,} images, such as "
            f"{', '.join(examples)}; run `dvc repro features`, or import the missing ones"
        )


def _sources(validated: Path, texts: Mapping[str, pa.Table]) -> list[str]:
    names = {name for table in texts.values() for name in table["source"].unique().to_pylist()}
    for table in read_batches([validated / "images.parquet"], BATCH_ROWS, ["source"]):
        names.update(table["source"].unique().to_pylist())
    return sorted(names)


class _ImageRows:
    """The images of a split, ordered by id, each with its rows of every table."""

    def __init__(self, database: Database, validated: Path) -> None:
        self._database = database
        self._tables = [name for name, view in TABLES.items() if view.has_image]
        for name in ("images", *self._tables):
            path = validated / f"{name}.parquet"
            database.load(name, read_batches([path] if path.exists() else [], BATCH_ROWS), SCHEMAS[name])

    def count(self, split: str) -> int:
        """Return the number of a split's images."""
        images = self._database.value(f"SELECT count(*) FROM images WHERE split = '{split}'")
        assert isinstance(images, int)
        return images

    def choose(self, split: str) -> int:
        """Select a split; return the number of its images."""
        self._database.run(
            "CREATE OR REPLACE TABLE places AS SELECT image_id, row_number() OVER (ORDER BY image_id) - 1 AS row "
            f"FROM images WHERE split = '{split}'"
        )
        return self.count(split)

    def records(self, block: int) -> Iterator[dict[str, Any]]:
        """Yield each image with its rows of every table in `rows`, reading `block` images at a time."""
        # `row` is the image's number in the split, which `places` has (`choose`): all tables are read in its order.
        joined = "p.row, t.* FROM {} t JOIN places p ON t.image_id = p.image_id ORDER BY p.row"
        images = RowCursor(self._database.stream(f"SELECT {joined.format('images')}"))
        texts = {
            name: RowCursor(self._database.stream(f"SELECT {joined.format(name)}, t.{TABLES[name].id_column}"))
            for name in self._tables
        }
        # `before` returns the rows of this block only, so memory holds one block of images and their texts.
        for start in count(0, block):
            rows = images.before(start + block)
            if not rows:
                return
            for row in rows:
                del row["row"]
                row["rows"] = {name: [] for name in self._tables}
            for name, cursor in texts.items():
                for text in cursor.before(start + block):
                    rows[text.pop("row") - start]["rows"][name].append(text)
            yield from rows


def _read_pixels(path: Path, sha256: str) -> tuple[bytes, str]:
    """Return the bytes and extension of a PNG or JPEG file; convert others (WebP, GIF, BMP) to PNG."""
    from PIL import Image

    from vlp_models.data.images import to_upright_rgb

    try:
        data = path.read_bytes()
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            raise DataError(f"{path}: has changed since `prepare`; run `dvc repro validate`, or `vlp run`")
        with Image.open(io.BytesIO(data)) as image:  # validate has checked its size
            if image.format in ("PNG", "JPEG"):
                return data, {"PNG": "png", "JPEG": "jpg"}[image.format]
            buffer = io.BytesIO()
            to_upright_rgb(image).save(buffer, "PNG")
            return buffer.getvalue(), "png"
    except OSError as error:
        raise DataError(f"{path}: {error}; it was readable in `validate`, run `dvc repro validate`") from None
