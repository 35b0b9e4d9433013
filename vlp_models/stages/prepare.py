"""prepare: one dataset in its public format -> the canonical tables.

Every image file is opened and checked (data/images.py); an unreadable one goes to quarantine with its reason, and the
rows that depend on it follow in `validate`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Row, Tables
from vlp_models.data.images import ImageError
from vlp_models.data.tables import SCHEMAS, SPLITS, write_table
from vlp_models.duplicates.hashes import ImageHashes, examine
from vlp_models.duplicates.leaks import PrintWriter
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, SourceParams, ValidateParams, to_plain
from vlp_models.workspace.paths import Workspace, measured, output_directory, write_manifest


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/interim/<key>.

    Raises:
        ParamsError: `key` is not a dataset of params.data.
        DataError: the dataset is missing or not in its format, or holds no readable image.
    """
    if key not in params.data:
        raise ParamsError(f"`vlp stage prepare {key}`: params.data has {', '.join(params.data) or 'no dataset'}")
    source = params.data[key]
    with measured(workspace, f"prepare@{key}"):
        _check_root(params, key, workspace.root / source.root)
        tables = read_source(key, source, workspace.root)
        found = len(tables["images"])
        if not source.outside:
            _keep_inside(tables, key, workspace.root / source.root, source.images)
        with output_directory(workspace.interim(key)) as directory:
            with PrintWriter(directory) as prints:
                _examine_images(tables, params.validate, workspace, prints)
            if not (tables["images"] or tables["texts"]):
                raise DataError(_no_image(key, source, found, tables))
            for name in SCHEMAS:
                write_table(tables[name], name, directory)
            if tables["truth"]:
                lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in tables["truth"])
                (directory / "truth.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
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


def _keep_inside(tables: Tables, key: str, root: Path, images: str) -> None:
    """Moves rows to quarantine whose file lies outside of the dataset: a listing from elsewhere must not bring in what
    else is on this disk. By the path as it is written: a link in the dataset is its owner's."""
    folders = [Path(os.path.abspath(folder)) for folder in (root, root / images)]  # noqa: PTH100 (no links followed)
    good: list[Row] = []
    for row in tables["images"]:
        path = Path(os.path.abspath(row["path"]))  # noqa: PTH100
        if any(path.is_relative_to(folder) for folder in folders):
            good.append(row)
        else:
            reason = f"{path}: outside of data.{key}.root and data.{key}.images; data.{key}.outside: true allows it"
            tables.set_aside("images", row["image_id"], "image_inside", reason, row["provenance"])
    tables["images"][:] = good


def _examine_images(tables: Tables, limits: ValidateParams, workspace: Workspace, prints: PrintWriter) -> None:
    """Fills in width, height and sha256, and writes the prints; rows whose file fails move to quarantine."""
    from rich.console import Console
    from rich.progress import track

    def look(row: Row) -> ImageHashes | ImageError:
        tested = row["split"] != SPLITS[0]
        try:
            return examine(Path(row["path"]), limits.max_image_pixels, keypoints=keypoints, tested=tested)
        except ImageError as error:
            return error

    keypoints = limits.near_duplicates.keypoints
    good: list[Row] = []
    # Pillow's decoders and hashlib let go of the interpreter's lock
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow on odd EXIF and on sizes that `max_pixels` rules on
        results = track(
            pool.map(look, tables["images"]),
            description="checking images",
            total=len(tables["images"]),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        for row, result in zip(tables["images"], results, strict=True):
            path = workspace.relative(Path(row["path"]))
            if isinstance(result, ImageError):
                tables.set_aside("images", row["image_id"], result.rule, f"{path}: {result.reason}", row["provenance"])
            elif row["width"] is not None and (row["width"], row["height"]) != (result.width, result.height):
                reason = f"{path}: {result.width}x{result.height}, listed as {row['width']}x{row['height']}"
                tables.set_aside("images", row["image_id"], "image_size", reason, row["provenance"])
            else:
                prints.add(row["image_id"], result)
                size = {"width": result.width, "height": result.height, "sha256": result.sha256.hex()}
                good.append({**row, **size, "path": path})
    tables["images"][:] = good


def _no_image(key: str, source: SourceParams, found: int, tables: Tables) -> str:
    if not found:
        return f"data.{key}: no image is listed in the dataset under {source.root}; check its files in params.yaml"
    first = next(row for row in tables["quarantine"] if row["table"] == "images")
    return (
        f"data.{key}: none of {found} images is readable; the first, {first['row_id']} ({first['provenance']}): "
        f"{first['reason']}; check data.{key}.images in params.yaml"
    )
