"""features: the regions of every validated image, from the detector or backbone, from symbols or imported.

Each chunk is a part that any process can make. Finished ones wait under .work; after an interruption only the others
are made. The regions of an image that the last run has seen are taken over from it, if the same code and settings made
them. The result depends on neither: it is, byte for byte, that of a first run.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.device import cpu_count
from vlp_models.common.executors import LocalMapper, Mapper
from vlp_models.common.io import link_or_copy, output_directory, write_text
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace, fingerprint, record_timing, require_output, write_manifest
from vlp_models.data import features as storage
from vlp_models.data.features import KeptFeatures, keep_features
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import FeaturesParams, Params, to_plain
from vlp_models.pipeline.unrecorded import keep, restore

if TYPE_CHECKING:
    from vlp_models.vision.region_source import RegionSource

Row = dict[str, Any]
MAX_MISSING = 0.01  # of a split's images


def run(params: Params, workspace: Workspace, key: str = "", mapper: Mapper | None = None) -> None:
    """Writes data/features (docs/contracts.md, "Features"), with a quarantine.parquet of what was left out.

    Args:
        mapper: who makes the chunks; by default `cluster.workers` processes, each with one thread on a CPU.

    Raises:
        DataError: an image or an imported file can't be read, or a split has more than 1% of images without features.
        CheckpointError: `source: detector` or `timm`, and data/detector does not hold that.
        ParamsError: a missing path, or a number that can't be.
    """
    p = params.features
    _check(p)
    with record_timing(workspace, "features"):
        validated = require_output(workspace.validated, "validate")
        images = read_table("images", validated).sort_by("image_id").to_pylist()
        _kept.cache_clear()
        source = _open(params, workspace)
        _check_names(source, images)
        kept = _kept_directory(params, source, workspace) if source.by_content else None
        inputs = {"images": validated / "images.parquet"}
        inputs |= {"objects": validated / "objects.parquet"} if p.source == "boxes" else {}
        work = workspace.work("features", fingerprint(_identity(params, source), inputs))
        if restore(workspace, work, "features"):
            return
        start = time.perf_counter()
        made, taken = _make_chunks(mapper, source, params, images, workspace.root, work, kept)
        seconds = time.perf_counter() - start
        notes = [row for path in sorted(work.glob("notes-*.json")) for row in json.loads(path.read_text("utf-8"))]
        _refuse_missing(notes, images, workspace)
        with output_directory(workspace.features) as directory:
            for path in sorted(work.glob("features-*.safetensors")):
                link_or_copy(path, directory / path.name)  # until the stage has ended, they are worth keeping
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
        keep(workspace, work, "features", [workspace.features])
        if kept is not None:
            keep_features(workspace.features, images, kept)
        for path in [*work.glob("features-*.safetensors"), *work.glob("notes-*.json")]:
            path.unlink()
        with suppress(OSError):  # not empty: it keeps the result
            work.rmdir()
    print(
        f"features {source.detector_id}: {counts['regions']:,} regions of {counts['images']:,} images, "
        f"{source.feature_dim} numbers each"
        + (f", {taken:,} images taken over from the last run" if taken else "")
        + (f", {made:,} extracted at {_speed(made, seconds)}" if made else "")
    )
    for rule, count in Counter(row["rule"] for row in notes).items():
        print(f"  {rule}: {count:,} images, listed in {workspace.features / 'quarantine.parquet'}")


def _check(p: FeaturesParams) -> None:
    if p.source in ("tsv", "npz") and not p.path:
        raise ParamsError(f"params.yaml: `features.source: {p.source}` needs `features.path`")
    if p.max_regions < 1 or not 0 <= p.min_score < 1:
        raise ParamsError(
            "params.yaml: `features.max_regions` must be at least 1, `min_score` from 0 to below 1; "
            f"found {p.max_regions}, {p.min_score}"
        )


def _open(params: Params, workspace: Workspace) -> RegionSource:
    p = params.features
    if p.source == "boxes":
        from vlp_models.vision.simple_regions import SymbolSource

        return SymbolSource(read_table("objects", workspace.validated).to_pylist(), p.max_regions)
    if p.source == "tsv":
        from vlp_models.vision.imported_features import open_tsv

        return open_tsv(workspace.root / p.path, p.max_regions, p.order)
    if p.source == "npz":
        from vlp_models.vision.imported_features import open_npz

        return open_npz(workspace.root / p.path, p.max_regions, p.order)
    import torch

    from vlp_models.vision.extractors import open_source

    if p.source != "grid":
        require_output(workspace.detector, "detector")
    cuda = torch.cuda.is_available() and params.trainer.accelerator != "cpu"
    return open_source(to_plain(p), workspace.detector, workspace.root, "cuda" if cuda else "cpu")


def _identity(params: Params, source: RegionSource) -> dict[str, Any]:
    """What an image's regions depend on besides the image."""
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


def _kept_directory(params: Params, source: RegionSource, workspace: Workspace) -> Path:
    """Where the last run's regions are, if they were made as these will be."""
    return workspace.root / ".work" / "features" / "kept" / fingerprint(_identity(params, source), {})[:16]


Chunk = tuple[int, list[Row]]  # its number, and its rows of the images table


def _make_chunks(
    mapper: Mapper | None,
    source: RegionSource,
    params: Params,
    images: list[Row],
    root: Path,
    work: Path,
    kept: Path | None,
) -> tuple[int, int]:
    """Makes the chunks that `work` lacks; returns how many images were extracted for that, and how many taken over."""
    from vlp_models.common.progress import progress_bar

    made = taken = 0
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

        if isinstance(mapper, LocalMapper) and mapper.workers == 1:  # with the source at hand, image by image
            for chunk in missing:
                taken += _make_chunk(chunk, source, work, kept, advance)
        else:
            make = functools.partial(_make_chunk_elsewhere, params=params, root=root, work=work, kept=kept)
            for count, known in mapper.map(make, missing):
                advance(count)
                taken += known
    return made - taken, taken


def _speed(images: int, seconds: float) -> str:
    """Three digits, or all before the point: slow is not 0."""
    rate = images / seconds
    return f"{rate:,.0f} images/s" if rate >= 100 else f"{rate:.3g} images/s"


def _processes(source: RegionSource, chunks: int) -> int:
    """One a CPU, but each with two chunks to do: fewer are not worth starting a process. A GPU has one."""
    return 1 if source.device == "cuda" else max(1, min(cpu_count(), chunks // 2))


def _make_chunk(
    chunk: Chunk, source: RegionSource, work: Path, kept: Path | None, advance: Callable[[int], None]
) -> int:
    """Returns how many images it has taken over."""
    number, rows = chunk
    before = _kept(kept) if kept is not None else None
    known = [before.get(row["sha256"]) if before else None for row in rows]
    new = [row for row, regions in zip(rows, known, strict=True) if regions is None]
    advance(len(rows) - len(new))
    regions, notes = source.regions(new, advance) if new else ([], [])
    write_text(work / f"notes-{number:05d}.json", json.dumps(notes))  # before the chunk, which says "done"
    made = iter(regions)
    whole = [(row["image_id"], next(made) if old is None else old) for row, old in zip(rows, known, strict=True)]
    storage.write_chunk(work, number, whole)
    return len(rows) - len(new)


@functools.lru_cache(maxsize=1)
def _kept(directory: Path) -> KeptFeatures:
    """Opened once a process, not once a chunk."""
    return KeptFeatures(directory)


def _make_chunk_elsewhere(
    chunk: Chunk, *, params: Params, root: Path, work: Path, kept: Path | None
) -> tuple[int, int]:
    """In a process of its own, which opens the source for its first chunk. Returns the numbers of images and, of those,
    of images taken over."""
    taken = _make_chunk(chunk, _source(work, params, root), work, kept, lambda count: None)
    return len(chunk[1]), taken


_opened: dict[Path, RegionSource] = {}  # of the run that this process works for; `work` is its identity


def _source(work: Path, params: Params, root: Path) -> RegionSource:
    if work not in _opened:
        _opened.clear()
        _opened[work] = _open(params, Workspace(root))
    return _opened[work]


def _finished(path: Path, rows: list[Row]) -> bool:
    if not path.exists():
        return False
    try:
        return [image_id for image_id, _ in storage.read_listing(path)] == [row["image_id"] for row in rows]
    except DataError:  # damaged: make it anew
        return False


def _check_names(source: RegionSource, images: list[Row]) -> None:
    from vlp_models.vision.imported_features import ImportedSource

    if isinstance(source, ImportedSource):
        source.check_names(images)


def _refuse_missing(notes: list[Row], images: list[Row], workspace: Workspace) -> None:
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
        write_table(notes, "quarantine", workspace.work("features", "refused"))
        example = next(iter(lost.values()))
        raise DataError(
            f"features: more than {MAX_MISSING:.0%} of the images have no usable features:\n"
            + "\n".join(lines)
            + f"\n  e.g. {example['row_id']}: {example['reason']}"
            + f"\n  All: {workspace.root / '.work' / 'features' / 'refused' / 'quarantine.parquet'}."
            + "\n  Complete the files at features.path, or leave these images out of the dataset."
        )
