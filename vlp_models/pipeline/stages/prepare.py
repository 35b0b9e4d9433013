"""prepare: one dataset in its public format -> the canonical tables.

Every image file is opened and checked (data/images.py); an unreadable one goes to quarantine with its reason, and the
rows that depend on it follow in `validate`. One that was withdrawn (`vlp forget`) is left out, with all its rows.
Rows pass through: memory does not grow with them, unless a format is one document that its reader must hold (COCO's
JSON).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vlp_models.common.device import cpu_count
from vlp_models.common.io import output_directory
from vlp_models.common.workspace import Workspace, record_timing, write_manifest
from vlp_models.curation.duplicates.hashes import HashJob, ImageHashes, Item, hash_all
from vlp_models.curation.duplicates.leakage import FingerprintWriter
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.curation.duplicates.withdrawn import WithdrawnList, read_withdrawn
from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Row, Tables, leave_out, spooled
from vlp_models.data.images import ImageError
from vlp_models.data.tables import HELD, SCHEMAS, SPLITS, TableWriter, read_batches
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, SourceParams, to_plain

MOST = 8  # processes: each decodes a picture of up to `validate.max_image_pixels`


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/interim/<key>.

    Raises:
        ParamsError: `key` is not a dataset of params.data.
        DataError: the dataset is missing or not in its format, or holds no readable image.
    """
    if key not in params.data:
        raise ParamsError(f"`vlp stage prepare {key}`: params.data has {', '.join(params.data) or 'no dataset'}")
    source = params.data[key]
    with record_timing(workspace, f"prepare@{key}"):
        _check_root(params, key, workspace.root / source.root)
        with output_directory(workspace.interim(key)) as directory:
            with spooled(directory):
                tables = read_source(key, source, workspace.root)
            found = len(tables["images"])
            near = params.validate.near_duplicates
            withdrawn = read_withdrawn(
                workspace.withdrawn, NearRules(max_hash_distance=near.max_hash_distance, keypoints=near.keypoints)
            )
            with FingerprintWriter(directory) as fingerprints:
                failed = _check_images(tables, key, params, workspace, fingerprints, withdrawn)
            if not (tables["images"] or tables["texts"]):
                raise DataError(_no_image(key, source, found, failed))
            tables.close()
            counts = {name: len(tables[name]) for name in (*SCHEMAS, "truth")}
            write_manifest(
                directory,
                stage="prepare",
                params={
                    "data": to_plain(source),
                    "max_image_pixels": params.validate.max_image_pixels,
                    "near_duplicates": to_plain(params.validate.near_duplicates),
                },
                counts=counts | {"left_out": dict(tables.left_out)},
            )
    print(f"prepare {key}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items() if count))


def _check_root(params: Params, key: str, root: Path) -> None:
    if root.is_dir():
        return
    if key in params.generate:
        way_out = f"`vlp stage generate {key}` makes it"
    elif params.data[key].format == "nlvr":
        way_out = f"clone https://github.com/lil-lab/nlvr and set data.{key}.root to its `nlvr` directory"
    else:
        way_out = f"put the dataset there, or set data.{key}.root in params.yaml to where it is"
    raise DataError(f"{root.absolute()}: no such directory, so there is no dataset `{key}`; {way_out}")


def _check_images(
    tables: Tables,
    key: str,
    params: Params,
    workspace: Workspace,
    fingerprints: FingerprintWriter,
    withdrawn: WithdrawnList,
) -> str:
    """Fills in width, height and sha256, and writes the prints; rows whose file fails move to quarantine. Returns what
    is said of the first that does."""
    from rich.console import Console
    from rich.progress import track

    source = params.data[key]
    folders = _folders(workspace.root / source.root, source.images)
    listed = tables["images"]
    assert isinstance(listed, TableWriter) and tables.directory is not None
    listed.close()
    waiting = listed.path.rename(tables.directory / ".listed.parquet")
    checked = tables.rows["images"] = TableWriter("images", tables.directory)
    first = ""
    gone: dict[str, str] = {}

    rows = (row for table in read_batches([waiting], HELD) for row in table.to_pylist())
    job = HashJob.in_place(params.validate)
    results = track(
        _examined(rows, job, lambda path: None if source.allow_external_images else _outside(path, folders, key)),
        description="checking images",
        total=len(listed),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    for row, result in results:
        path = workspace.relative(Path(row["path"]))
        if how := _withdrawn(row["image_id"], result, withdrawn):
            gone[row["image_id"]] = how
            continue
        if isinstance(result, ImageError):
            rule, reason = result.rule, f"{path}: {result.reason}"
        elif row["width"] is None or (row["width"], row["height"]) == (result.width, result.height):
            size = {"width": result.width, "height": result.height, "sha256": result.sha256.hex()}
            fingerprints.add(row["image_id"], result)
            checked.append({**row, **size, "path": path})
            continue
        else:
            rule = "image_size"
            reason = f"{path}: {result.width}x{result.height}, listed as {row['width']}x{row['height']}"
        tables.set_aside("images", row["image_id"], rule, reason, row["provenance"])
        first = first or f"{row['image_id']} ({row['provenance']}): {reason}"
    waiting.unlink()
    if gone:
        tables.left_out.update(
            {"withdrawn images": len(gone), "rows of withdrawn images": leave_out(tables, gone.keys())}
        )
        for name, how in gone.items():
            print(f"prepare {key}: {name} is left out with its rows: it was withdrawn ({how})")
    return first


def _examined(
    rows: Iterable[Row], job: HashJob, refused: Callable[[Path], ImageError | None]
) -> Iterator[tuple[Row, ImageHashes | ImageError]]:
    """The rows in their order, each with what its picture is, or what is wrong with it. Those refused aren't opened."""
    under_way: deque[tuple[Row, ImageError | None]] = deque()

    def asked() -> Iterator[Item]:
        for number, row in enumerate(rows):
            error = refused(Path(row["path"]))
            under_way.append((row, error))
            if error is None:
                yield number, row["path"], row["split"] != SPLITS[0]

    def refusals() -> Iterator[tuple[Row, ImageError]]:
        while under_way and (error := under_way[0][1]):
            yield under_way.popleft()[0], error

    for _, result in hash_all(asked(), job, cpu_count(MOST)):
        yield from refusals()
        yield under_way.popleft()[0], result
    yield from refusals()


def _withdrawn(image_id: str, found: ImageHashes | ImageError, withdrawn: WithdrawnList) -> str:
    """How a picture is known to be a withdrawn one; empty: it is none. Of a file that is gone its id tells."""
    if isinstance(found, ImageError):
        return "by its id" if withdrawn.has_id(image_id) else ""
    return withdrawn.match(found)


def _folders(root: Path, images: str) -> list[Path]:
    return [Path(os.path.abspath(folder)) for folder in (root, root / images)]  # noqa: PTH100 (no links followed)


def _outside(path: Path, folders: list[Path], key: str) -> ImageError | None:
    """Why a file is not looked at that lies outside of the dataset: a listing from elsewhere must not bring in what
    else is on this disk. By the path as it is written: a link in the dataset is its owner's."""
    path = Path(os.path.abspath(path))  # noqa: PTH100
    if any(path.is_relative_to(folder) for folder in folders):
        return None
    reason = f"outside of data.{key}.root and data.{key}.images; data.{key}.allow_external_images: true allows it"
    return ImageError("image_inside", reason)


def _no_image(key: str, source: SourceParams, found: int, failed: str) -> str:
    if not found:
        return f"data.{key}: no image is listed in the dataset under {source.root}; check its files in params.yaml"
    return (
        f"data.{key}: none of {found} images is readable; the first, {failed}; check data.{key}.images in params.yaml"
    )
