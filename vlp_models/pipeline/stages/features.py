"""features: extract the regions of every validated image, with a detector or backbone, or import them.

Any process can make a chunk. Finished chunks are kept under .work, so a resumed run makes only the rest. Regions of
images that the previous run had are reused if the same code and settings made them. Neither changes the result: it is
bitwise equal to that of a first run. The rows of the images table are sorted on disk and read chunk by chunk.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlp_models.common.device import cpu_count, pick_device
from vlp_models.common.executors import LocalMapper, Mapper, list_chunks
from vlp_models.common.io import link_or_copy, output_directory, write_text
from vlp_models.common.log import get_logger
from vlp_models.common.plugins import import_target
from vlp_models.common.portable import is_portable, use_portable_kernels
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace, fingerprint, require_output, write_manifest
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureCache, cache_features
from vlp_models.data.joins import Database
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, count_values, read_batches, write_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.params.schema import check_known
from vlp_models.pipeline.engines import cluster_mapper, cluster_of
from vlp_models.pipeline.unrecorded_results import remove_chunks, restore_unrecorded_result, save_unrecorded_result
from vlp_models.vision import EXTRACTORS, REGION_SOURCES
from vlp_models.vision.extractors import FROM_IMAGES

if TYPE_CHECKING:
    from vlp_models.vision.region_source import RegionSource

logger = get_logger(__name__)

Row = dict[str, Any]
MAX_MISSING = 0.01  # of a split's images
READ_ROWS = 4096  # rows of the images table that are read from disk at a time
ON_GPU = ("timm", *EXTRACTORS)  # sources that compute on `trainer.accelerator`, or on the GPUs of a cluster


def run(params: Params, workspace: Workspace, key: str = "", mapper: Mapper | None = None) -> None:
    """Write data/features (docs/reference/tables.md, "Features") with a quarantine.parquet of the images left out.

    Args:
        mapper: executes the chunks; default: the cluster of params.yaml, or `cluster.workers` processes of this
            machine, each with one thread on a CPU.

    Raises:
        DataError: an image or an imported file is unreadable, or more than 1% of a split's images have no features.
        CheckpointError: data/detector does not contain what `source: detector` or `timm` needs.
        ParamsError: a missing path, or an invalid number; a worker without the GPU that `cluster.gpus` asks for.
    """
    p = params.features
    validated = require_output(workspace.validated, "validate")
    # An earlier run in this process may have opened the cache before it was filled.
    _open_cache.cache_clear()
    device = _device(params)
    # On a cluster the workers compute; this process only reads the source's description.
    source = _open(params, workspace, device="cpu" if cluster_of(params).address else device)
    # Two folders below .work: regions by image, made by the same code and settings, and this run's chunks.
    identity = _identity(params, source, device)
    cache = None
    if source.by_content:
        cache = workspace.root / ".work" / "features" / "kept" / fingerprint(identity, {})[:16]
    inputs = {"images": validated / "images.parquet"}
    if p.source == "boxes":
        inputs["objects"] = validated / "objects.parquet"
    work = workspace.work("features", fingerprint(identity | {"chunk_images": storage.CHUNK_IMAGES}, inputs))
    if restore_unrecorded_result(workspace, work, "features"):
        return
    if mapper is None:
        mapper = cluster_mapper(params, workspace, gpus=cluster_of(params).gpus if p.source in ON_GPU else 0)
    job = _Job(params=params, root=workspace.root, work=work, cache=cache, device=device)
    # Chunks are made by any process in `work`, then linked into the output.
    with output_directory(workspace.features) as directory:
        with Database.within(directory) as database:
            images = _Images(database, validated)
            source.check_images(images)
            start = time.perf_counter()
            extracted, reused = _make_chunks(mapper, source, job, images)
            seconds = time.perf_counter() - start
            _refuse_missing(images, workspace, work)
        # Linked, not moved: the chunks stay in `work` until the stage has ended, for a run that resumes it.
        for number in range(images.chunks):
            name = storage.chunk_name(number)
            link_or_copy(work / name, directory / name)
        counts = _write_index(directory, work, images.chunks)
        write_table(chain.from_iterable(_notes(work, images.chunks)), "quarantine", directory)
        left_out = count_values("quarantine", directory, "rule")
        write_manifest(
            directory,
            stage="features",
            params=to_plain(p),
            counts={**counts, "left_out": dict(sorted(left_out.items()))},
            feature_dim=source.feature_dim,
            classes=list(source.classes),
            detector_id=source.detector_id,
        )
    # Saved before the chunks go, so that a kill in between leaves one of the two.
    save_unrecorded_result(workspace, work, "features", [workspace.features])
    # For the next run, which reuses the regions of images with the same content.
    if cache is not None:
        columns = read_batches([inputs["images"]], BATCH_ROWS, ["image_id", "sha256"])
        cache_features(workspace.features, (row for table in columns for row in table.to_pylist()), cache)
    remove_chunks(work)
    logger.info(
        "features %s: %s regions of %s images, %d features each%s%s",
        source.detector_id,
        f"{counts['regions']:,}",
        f"{counts['images']:,}",
        source.feature_dim,
        f", {reused:,} images reused from the last run" if reused else "",
        f", {extracted:,} extracted at {_speed(extracted, seconds)}" if extracted else "",
    )
    for rule, count in left_out.items():
        logger.info("  %s: %s images, listed in %s", rule, f"{count:,}", workspace.features / "quarantine.parquet")


def _device(params: Params) -> str:
    """Return the device that computes features, cpu or cuda. On a cluster, `cluster.gpus` decides."""
    gpus, accelerator = cluster_of(params).gpus, params.trainer.accelerator
    if params.features.source not in ON_GPU:
        return "cpu"
    if not cluster_of(params).address:
        return pick_device(accelerator)
    if gpus and accelerator == "cpu":
        raise ParamsError(
            f"params.yaml: `cluster.gpus: {gpus:g}` reserves GPUs that `trainer.accelerator: cpu` does not use; "
            "set `cluster.gpus: 0`, or `trainer.accelerator: auto`"
        )
    return "cuda" if gpus else "cpu"


def _open(params: Params, workspace: Workspace, device: str, origin: Any = None) -> RegionSource:
    """Open the source that params.yaml names. origin: of the same source in another process."""
    from vlp_models.vision.region_source import SourceRequest

    p = params.features
    if p.source in FROM_IMAGES:
        use_portable_kernels()
    if p.source in ON_GPU:
        require_output(workspace.detector, "detector")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ParamsError(
                f"params.yaml: `cluster.gpus: {cluster_of(params).gpus:g}` makes features on GPUs, and torch finds "
                "none; install torch for the node's GPU and driver, or set `cluster.gpus: 0` to use CPUs"
            )
    request = SourceRequest(params=p, workspace=workspace, device=device, origin=origin)
    check_known(p.source, REGION_SOURCES, "features.source")
    source: RegionSource = import_target(REGION_SOURCES[p.source])(request)
    return source


def _identity(params: Params, source: RegionSource, device: str) -> dict[str, Any]:
    """Return everything that an image's regions depend on, except the image."""
    # the backbone's settings are in its id
    backbones = ("timm", *params.features.sections)
    settings = {name: v for name, v in to_plain(params.features).items() if name not in backbones}
    # Other versions of these libraries may compute other digits.
    versions = {name: metadata.version(name) for name in ("numpy", "pillow", "torch", "torchvision", *source.packages)}
    return {
        "features": settings,
        "detector_id": source.detector_id,
        "classes": list(source.classes),
        "code": code_hash([source.module, "vlp_models.vision.region_source", storage.__name__]),
        "versions": versions,
        "portable": is_portable(),
        "device": device,  # not the driver's own: a machine without a GPU may use a cluster of GPUs
    }


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every chunk needs. cache: folder of regions, or None. device: cpu or cuda, where chunks are made."""

    params: Params
    root: Path
    work: Path
    cache: Path | None
    device: str


Chunk = tuple[int, list[Row]]  # number, and rows of the images table


class _Images:
    """The images table in the order of ids, sorted on disk. rows: of the table; chunks: how many they make."""

    def __init__(self, database: Database, validated: Path) -> None:
        self._database = database
        database.load("images", read_batches([validated / "images.parquet"], BATCH_ROWS), SCHEMAS["images"])
        rows = database.value("SELECT count(*) FROM images")
        assert isinstance(rows, int)
        self.rows = rows
        # -(-a // b) rounds up.
        self.chunks = -(-rows // storage.CHUNK_IMAGES)

    def __iter__(self) -> Iterator[Row]:
        for table in self._sorted():
            yield from table.to_pylist()

    def missing(self, finished: set[int]) -> Iterator[Chunk]:
        """Yield the chunks that are not finished."""
        # `rows`: read from the database, and not in a chunk yet
        pieces, rows = self._sorted(), SCHEMAS["images"].empty_table()
        for number in range(self.chunks):
            while len(rows) < storage.CHUNK_IMAGES and (piece := next(pieces, None)) is not None:
                rows = pa.concat_tables([rows, piece])
            if number not in finished:
                yield number, rows.slice(0, storage.CHUNK_IMAGES).to_pylist()
            rows = rows.slice(storage.CHUNK_IMAGES)

    def images_in(self, finished: set[int]) -> int:
        """Return how many images the finished chunks have."""
        # only the last chunk may be shorter
        lacking = self.chunks * storage.CHUNK_IMAGES - self.rows if self.chunks - 1 in finished else 0
        return len(finished) * storage.CHUNK_IMAGES - lacking

    def count_lost(self, notes: Iterator[list[Row]], rules: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Return split -> (images, images with a note of these rules)."""
        schema = SCHEMAS["quarantine"]
        self._database.load("notes", (pa.Table.from_pylist(rows, schema=schema) for rows in notes), schema)
        # The repr of a tuple of names is a list in SQL.
        lost = f"SELECT DISTINCT row_id FROM notes WHERE rule IN {rules!r}"
        # count(row_id) skips images without a note, whose row_id is NULL after the left join.
        query = f"SELECT split, count(*), count(row_id) FROM images LEFT JOIN ({lost}) ON image_id = row_id"
        counts: dict[str, tuple[int, int]] = {}
        for table in self._database.stream(f"{query} GROUP BY split ORDER BY split"):
            for split, total, without in zip(*table.to_pydict().values(), strict=True):
                counts[split] = total, without
        return counts

    def _sorted(self) -> Iterator[pa.Table]:
        return self._database.stream("SELECT * FROM images ORDER BY image_id", READ_ROWS)


def _make_chunks(mapper: Mapper | None, source: RegionSource, job: _Job, images: _Images) -> tuple[int, int]:
    """Make the chunks that `work` lacks; return how many images were extracted and how many were reused."""
    from vlp_models.common.progress import progress_bar

    done = reused = 0
    start = time.perf_counter()
    finished = list_chunks(job.work, images.chunks, storage.chunk_name)
    missing = images.missing(finished)
    if mapper is None:
        # one process per CPU, but at least two chunks per process; one for a GPU
        workers = 1 if source.device == "cuda" else max(1, min(cpu_count(), (images.chunks - len(finished)) // 2))
        mapper = LocalMapper(cluster_of(job.params).workers or workers)
    with progress_bar("features", images.rows, "images") as bar:
        bar.advance(by=images.images_in(finished))

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.advance(_speed(done, time.perf_counter() - start), by=count)

        if isinstance(mapper, LocalMapper) and mapper.workers == 1:  # in this process, with progress by image
            for chunk in missing:
                reused += _make_chunk(chunk, source, job, advance)
        else:
            make = functools.partial(_make_chunk_elsewhere, job=job, origin=source.origin)
            for count, reused_count in mapper.map(make, missing):
                advance(count)
                reused += reused_count
    return done - reused, reused


def _write_index(directory: Path, work: Path, chunks: int) -> dict[str, int]:
    """Write the index of the chunks; delete a damaged one from `work`, so that the next run makes it again."""
    # The index reads the header of every chunk, so that a damaged one is found here.
    try:
        return storage.write_index(directory)
    except DataError as error:
        for number in range(chunks):
            try:
                storage.read_listing(work / storage.chunk_name(number))
            except DataError:
                (work / storage.chunk_name(number)).unlink(missing_ok=True)
        raise DataError(f"{error}; the damaged chunk was deleted, run the stage again") from None


def _speed(images: int, seconds: float) -> str:
    """Format a rate with three significant digits, so that a slow one does not round to 0."""
    rate = images / seconds
    return f"{rate:,.0f} images/s" if rate >= 100 else f"{rate:.3g} images/s"


def _make_chunk(chunk: Chunk, source: RegionSource, job: _Job, advance: Callable[[int], None]) -> int:
    """Make one chunk; return how many of its images were reused."""
    number, rows = chunk
    # cached[i]: regions of the i-th image from an earlier run, or None
    cache = _open_cache(job.cache) if job.cache is not None else None
    cached = [cache.get(row["sha256"]) if cache else None for row in rows]
    new = [row for row, regions in zip(rows, cached, strict=True) if regions is None]
    advance(len(rows) - len(new))
    extracted, notes = source.regions(new, advance) if new else ([], [])
    if notes:
        write_text(job.work / _notes_name(number), json.dumps(notes))  # before the chunk, which marks completion
    # In the order of the rows: the cached regions of an image, or the next extracted ones.
    remaining = iter(extracted)
    regions_of = [next(remaining) if regions is None else regions for regions in cached]
    image_ids = (row["image_id"] for row in rows)
    storage.write_chunk(job.work, number, list(zip(image_ids, regions_of, strict=True)))
    return len(rows) - len(new)


@functools.lru_cache(maxsize=1)
def _open_cache(directory: Path) -> FeatureCache:
    """Open the cache once per process, not once per chunk."""
    return FeatureCache(directory)


def _notes_name(number: int) -> str:
    """Return the file of a chunk's rows of the quarantine table; a chunk without such rows has no file."""
    return f"notes-{number:08d}.json"


def _notes(work: Path, chunks: int) -> Iterator[list[Row]]:
    """Yield the rows of the quarantine table, chunk by chunk."""
    for number in sorted(list_chunks(work, chunks, _notes_name)):
        yield json.loads((work / _notes_name(number)).read_text("utf-8"))


def _make_chunk_elsewhere(chunk: Chunk, *, job: _Job, origin: Any) -> tuple[int, int]:
    """Make a chunk in a worker process, which opens the source for its first chunk.

    Returns:
        The number of images, and how many of them were reused.
    """
    # A worker may get chunks of several jobs: the last source stays open.
    key = (job.work, job.device, origin)
    if key not in _opened:
        _opened.clear()
        _opened[key] = _open(job.params, Workspace(job.root), job.device, origin)
    reused = _make_chunk(chunk, _opened[key], job, lambda count: None)
    return len(chunk[1]), reused


_opened: dict[tuple[Path, str, Any], RegionSource] = {}  # the source of this worker process


def _refuse_missing(images: _Images, workspace: Workspace, work: Path) -> None:
    """Refuse features that too many images lack, and forget them: the next run reads the files again."""
    from vlp_models.vision.region_source import MISSING, UNREADABLE

    rules = (MISSING, UNREADABLE)
    # split -> (images, those without usable features)
    lost = images.count_lost(_notes(work, images.chunks), rules)
    lines = [
        f"  {split}: {without:,} of {count:,}"
        for split, (count, without) in lost.items()
        if without > MAX_MISSING * count
    ]
    if lines:
        # Outside of `work`, which is deleted below.
        refused = workspace.work("features", "refused")
        write_table(chain.from_iterable(_notes(work, images.chunks)), "quarantine", refused)
        notes = chain.from_iterable(_notes(work, images.chunks))
        example = next(row for row in notes if row["rule"] in rules)
        shutil.rmtree(work)
        raise DataError(
            f"features: more than {MAX_MISSING:.0%} of the images have no usable features:\n"
            + "\n".join(lines)
            + f"\n  e.g. {example['row_id']}: {example['reason']}"
            + f"\n  All: {refused / 'quarantine.parquet'}."
            + "\n  Complete the files at features.path, or leave these images out of the dataset."
        )
