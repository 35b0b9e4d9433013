"""features: extract the regions of every validated image, with a detector or backbone, or import them.

Any process can make a chunk. Finished chunks are kept under .work, so a resumed run makes only the rest. Regions of
images that the previous run had are reused if the same code and settings made them. Neither changes the result: it is
bitwise equal to that of a first run.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.device import cpu_count, pick_device
from vlp_models.common.executors import LocalMapper, Mapper
from vlp_models.common.io import link_or_copy, output_directory, write_text
from vlp_models.common.log import get_logger
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace, fingerprint, record_timing, require_output, write_manifest
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureCache, cache_features
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import FeaturesParams, Params, to_plain
from vlp_models.pipeline.unrecorded import restore_unrecorded_result, save_unrecorded_result

if TYPE_CHECKING:
    from vlp_models.vision.imported_features import Origin
    from vlp_models.vision.region_source import RegionSource

logger = get_logger(__name__)

Row = dict[str, Any]
MAX_MISSING = 0.01  # of a split's images


def run(params: Params, workspace: Workspace, key: str = "", mapper: Mapper | None = None) -> None:
    """Write data/features (docs/reference/tables.md, "Features") with a quarantine.parquet of the images left out.

    Args:
        mapper: executes the chunks; default: `cluster.workers` processes, each with one thread on a CPU.

    Raises:
        DataError: an image or an imported file is unreadable, or more than 1% of a split's images have no features.
        CheckpointError: data/detector does not contain what `source: detector` or `timm` needs.
        ParamsError: a missing path, or an invalid number.
    """
    p = params.features
    _check(p)
    with record_timing(workspace, "features"):
        validated = require_output(workspace.validated, "validate")
        images = read_table("images", validated).sort_by("image_id").to_pylist()
        _kept.cache_clear()
        source = _open(params, workspace)
        _check_names(source, images)
        identity = _identity(params, source)
        kept = None  # or the cache of regions made by the same code and settings
        if source.by_content:
            kept = workspace.root / ".work" / "features" / "kept" / fingerprint(identity, {})[:16]
        inputs = {"images": validated / "images.parquet"}
        inputs |= {"objects": validated / "objects.parquet"} if p.source == "boxes" else {}
        work = workspace.work("features", fingerprint(identity, inputs))
        if restore_unrecorded_result(workspace, work, "features"):
            return
        start = time.perf_counter()
        made, reused = _make_chunks(mapper, source, params, images, workspace.root, work, kept)
        seconds = time.perf_counter() - start
        notes = [row for path in sorted(work.glob("notes-*.json")) for row in json.loads(path.read_text("utf-8"))]
        _refuse_missing(notes, images, workspace, work)
        with output_directory(workspace.features) as directory:
            for path in sorted(work.glob("features-*.safetensors")):
                link_or_copy(path, directory / path.name)  # kept in `work` until the stage has ended
            counts = storage.write_index(directory)
            write_table(notes, "quarantine", directory)
            write_manifest(
                directory,
                stage="features",
                params=to_plain(p),
                counts={**counts, "left_out": dict(sorted(Counter(row["rule"] for row in notes).items()))},
                feature_dim=source.feature_dim,
                classes=list(source.classes),
                detector_id=source.detector_id,
            )
        save_unrecorded_result(workspace, work, "features", [workspace.features])
        if kept is not None:
            cache_features(workspace.features, images, kept)
        for path in [*work.glob("features-*.safetensors"), *work.glob("notes-*.json")]:
            path.unlink()
        with suppress(OSError):  # not empty while it keeps the result for DVC
            work.rmdir()
    logger.info(
        "features %s: %s regions of %s images, %d features each%s%s",
        source.detector_id,
        f"{counts['regions']:,}",
        f"{counts['images']:,}",
        source.feature_dim,
        f", {reused:,} images reused from the last run" if reused else "",
        f", {made:,} extracted at {_speed(made, seconds)}" if made else "",
    )
    for rule, count in Counter(row["rule"] for row in notes).items():
        logger.info("  %s: %s images, listed in %s", rule, f"{count:,}", workspace.features / "quarantine.parquet")


def _check(p: FeaturesParams) -> None:
    if p.source in ("tsv", "npz") and not p.path:
        raise ParamsError(f"params.yaml: `features.source: {p.source}` needs `features.path`")
    if p.max_regions < 1 or not 0 <= p.min_score < 1:
        raise ParamsError(
            "params.yaml: `features.max_regions` must be at least 1, `min_score` from 0 to below 1; "
            f"found {p.max_regions}, {p.min_score}"
        )


def _open(params: Params, workspace: Workspace, known: Origin | None = None) -> RegionSource:
    """known: origin of the files to import, if another process has hashed them."""
    p = params.features
    if p.source == "boxes":
        from vlp_models.vision.simple_regions import SymbolSource

        return SymbolSource(read_table("objects", workspace.validated).to_pylist(), p.max_regions)
    if p.source == "tsv":
        from vlp_models.vision.imported_features import open_tsv

        return open_tsv(workspace.root / p.path, p.max_regions, p.order, known)
    if p.source == "npz":
        from vlp_models.vision.imported_features import open_npz

        return open_npz(workspace.root / p.path, p.max_regions, p.order, known)
    from vlp_models.vision.extractors import open_source

    if p.source != "grid":
        require_output(workspace.detector, "detector")
    return open_source(to_plain(p), workspace.detector, workspace.root, pick_device(params.trainer.accelerator))


def _identity(params: Params, source: RegionSource) -> dict[str, Any]:
    """Return everything that an image's regions depend on, except the image."""
    settings = {name: v for name, v in to_plain(params.features).items() if name != "timm"}
    module = type(source).__module__
    packages = ["numpy", "pillow", "torch", "torchvision", *(["timm"] if params.features.source == "timm" else [])]
    versions = {name: metadata.version(name) for name in packages}
    return {
        "features": settings,
        "detector_id": source.detector_id,
        "classes": list(source.classes),
        "code": code_hash([module, storage.__name__]),
        "versions": versions,
        "device": source.device,
    }


Chunk = tuple[int, list[Row]]  # number, and rows of the images table


def _make_chunks(
    mapper: Mapper | None,
    source: RegionSource,
    params: Params,
    images: list[Row],
    root: Path,
    work: Path,
    kept: Path | None,
) -> tuple[int, int]:
    """Make the chunks that `work` lacks; return how many images were extracted and how many were reused."""
    from vlp_models.common.progress import progress_bar

    made = reused = 0
    start = time.perf_counter()
    chunks = [
        (number, images[first : first + storage.CHUNK_IMAGES])
        for number, first in enumerate(range(0, len(images), storage.CHUNK_IMAGES))
    ]
    missing = [(number, rows) for number, rows in chunks if not _finished(work / storage.chunk_name(number), rows)]
    mapper = mapper or LocalMapper(params.cluster.workers or _processes(source, len(missing)))
    with progress_bar("features", len(images), "images") as bar:
        bar.advance(by=len(images) - sum(len(rows) for _, rows in missing))

        def advance(count: int) -> None:
            nonlocal made
            made += count
            bar.advance(_speed(made, time.perf_counter() - start), by=count)

        if isinstance(mapper, LocalMapper) and mapper.workers == 1:  # in this process, with progress by image
            for chunk in missing:
                reused += _make_chunk(chunk, source, work, kept, advance)
        else:
            origin = getattr(source, "origin", None)
            make = functools.partial(
                _make_chunk_elsewhere, params=params, root=root, work=work, kept=kept, origin=origin
            )
            for count, known in mapper.map(make, missing):
                advance(count)
                reused += known
    return made - reused, reused


def _speed(images: int, seconds: float) -> str:
    """Format a rate with three significant digits, so that a slow one does not round to 0."""
    rate = images / seconds
    return f"{rate:,.0f} images/s" if rate >= 100 else f"{rate:.3g} images/s"


def _processes(source: RegionSource, chunks: int) -> int:
    """Return one process per CPU, but at least two chunks per process; one for a GPU."""
    return 1 if source.device == "cuda" else max(1, min(cpu_count(), chunks // 2))


def _make_chunk(
    chunk: Chunk, source: RegionSource, work: Path, kept: Path | None, advance: Callable[[int], None]
) -> int:
    """Make one chunk; return how many of its images were reused."""
    number, rows = chunk
    before = _kept(kept) if kept is not None else None
    known = [before.get(row["sha256"]) if before else None for row in rows]
    new = [row for row, regions in zip(rows, known, strict=True) if regions is None]
    advance(len(rows) - len(new))
    regions, notes = source.regions(new, advance) if new else ([], [])
    write_text(work / f"notes-{number:05d}.json", json.dumps(notes))  # before the chunk, which marks completion
    made = iter(regions)
    whole = [(row["image_id"], next(made) if old is None else old) for row, old in zip(rows, known, strict=True)]
    storage.write_chunk(work, number, whole)
    return len(rows) - len(new)


@functools.lru_cache(maxsize=1)
def _kept(directory: Path) -> FeatureCache:
    """Open the cache once per process, not once per chunk."""
    return FeatureCache(directory)


def _make_chunk_elsewhere(
    chunk: Chunk, *, params: Params, root: Path, work: Path, kept: Path | None, origin: Origin | None
) -> tuple[int, int]:
    """Make a chunk in a worker process, which opens the source for its first chunk.

    Returns:
        The number of images, and how many of them were reused.
    """
    reused = _make_chunk(chunk, _source(work, params, root, origin), work, kept, lambda count: None)
    return len(chunk[1]), reused


_opened: dict[tuple[Path, Origin | None], RegionSource] = {}  # by work directory and imported files, in this process


def _source(work: Path, params: Params, root: Path, origin: Origin | None) -> RegionSource:
    if (work, origin) not in _opened:
        _opened.clear()
        _opened[work, origin] = _open(params, Workspace(root), origin)
    return _opened[work, origin]


def _finished(path: Path, rows: list[Row]) -> bool:
    if not path.exists():
        return False
    try:
        return [image_id for image_id, _ in storage.read_listing(path)] == [row["image_id"] for row in rows]
    except DataError:  # damaged: make it again
        return False


def _check_names(source: RegionSource, images: list[Row]) -> None:
    from vlp_models.vision.imported_features import ImportedSource

    if isinstance(source, ImportedSource):
        source.check_names(images)


def _refuse_missing(notes: list[Row], images: list[Row], workspace: Workspace, work: Path) -> None:
    """Refuse features that too many images lack, and forget them: the next run reads the files again."""
    from vlp_models.vision.imported_features import MISSING, UNREADABLE

    lost = {row["row_id"]: row for row in notes if row["rule"] in (MISSING, UNREADABLE)}
    total = Counter(row["split"] for row in images)
    without = Counter(row["split"] for row in images if row["image_id"] in lost)
    lines = [
        f"  {split}: {without[split]:,} of {count:,}"
        for split, count in sorted(total.items())
        if without[split] > MAX_MISSING * count
    ]
    if lines:
        shutil.rmtree(work)
        write_table(notes, "quarantine", workspace.work("features", "refused"))
        example = next(iter(lost.values()))
        raise DataError(
            f"features: more than {MAX_MISSING:.0%} of the images have no usable features:\n"
            + "\n".join(lines)
            + f"\n  e.g. {example['row_id']}: {example['reason']}"
            + f"\n  All: {workspace.root / '.work' / 'features' / 'refused' / 'quarantine.parquet'}."
            + "\n  Complete the files at features.path, or leave these images out of the dataset."
        )
