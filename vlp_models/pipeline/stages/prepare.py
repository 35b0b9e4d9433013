"""prepare NAME: convert one dataset from its public format to the canonical tables.

Every image file is opened and checked (data/images.py). An unreadable one goes to quarantine with a reason, and
`validate` removes the rows that depend on it. A withdrawn image (`vlp forget`) is left out with all its rows. Rows are
streamed, so memory does not grow with their number, unless the format is a single document (COCO's JSON).
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlp_models.common.device import cpu_count
from vlp_models.common.executors import Mapper
from vlp_models.common.io import output_directory
from vlp_models.common.log import get_logger
from vlp_models.common.progress import progress_bar
from vlp_models.common.workspace import Workspace, write_manifest
from vlp_models.curation.duplicates import read_withdrawn
from vlp_models.curation.duplicates.hashes import HashJob, ImageHashes, Item, hash_all
from vlp_models.curation.duplicates.leakage import FINGERPRINTS, FingerprintWriter, find_near_duplicates
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import EXTRACTED, Row, Tables, remove_images, spooled
from vlp_models.data.formats.splits import Clusters, Division, split_held_out
from vlp_models.data.images import ImageError, is_misnamed, read_file
from vlp_models.data.joins import Database
from vlp_models.data.names import FileNames
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, SPLITS, TableWriter, check_split, read_batches
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import DatasetParams, Params, to_plain
from vlp_models.pipeline.dvc.external import check_roots, find_generator
from vlp_models.pipeline.engines import cluster_mapper

logger = get_logger(__name__)

RENAMED = "images whose name differs from the listing in letter case, Unicode form or slashes"
MISNAMED = "images whose name has the suffix of another format"
REPEATED = "images that are one file under many ids"
TOGETHER = "images moved to the split of a near-duplicate"
CHECKED = ".checked"  # table of the checked images, until near-duplicates are grouped
OPTIONAL = ("group_near_duplicates", "image_column", "caption_column")  # in the manifest only if set
EXAMPLES = 3  # of reasons in an error
MANY = 5  # ids of one file from which it may be a placeholder
MAX_PROCESSES = 8  # each decodes an image of up to `validate.max_image_pixels`


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/interim/KEY.

    Raises:
        ParamsError: `key` is not a dataset of params.data.
        DataError: the dataset is missing or not in its format, or has no readable image.
    """
    if key not in params.data:
        raise ParamsError(f"`vlp stage prepare {key}`: params.data has {', '.join(params.data) or 'no dataset'}")
    source = params.data[key]
    check_roots(params, workspace.root, [key])
    # Missing after `check_roots`, so it is the folder of a generator that has not run.
    if not source.is_remote and not (workspace.root / source.root).is_dir():
        folder, generator = workspace.root / source.root, find_generator(params, key)
        raise DataError(f"{folder}: no such folder; run `vlp stage generate {generator}`")
    # A reader streams its rows to tables in the output directory; nothing of it is there unless all succeeds.
    with output_directory(workspace.interim(key)) as directory:
        with spooled(directory):
            tables = read_source(key, source, workspace.root)
        listed = len(tables["images"])
        # The image files are checked, with their fingerprints: of near-duplicates, and of withdrawn images.
        withdrawn = read_withdrawn(workspace.withdrawn, NearRules.of(params.validate.near_duplicates))
        with FingerprintWriter(directory) as fingerprints:
            notes = _check_images(tables, key, params, workspace, fingerprints, withdrawn)
        if not (tables["images"] or tables["texts"]):
            raise DataError(_no_image(key, source, listed, tables))
        # only if params.yaml asks for it (`group_near_duplicates`)
        if tables.divided or tables.held_out:
            rules = NearRules.of(params.validate.near_duplicates)
            mapper = cluster_mapper(params, workspace)
            notes[TOGETHER] = _group_near_duplicates(tables, directory, rules, source.val_fraction, mapper)
        tables.close()
        if images := tables["images"]:
            assert isinstance(images, TableWriter)
            notes[REPEATED] = _warn_of_placeholders(key, images.path)
        # counts and notes, for the manifest and the log
        counts = {name: len(tables[name]) for name in (*SCHEMAS, "truth")}
        if tables["languages"]:
            counts["languages"] = len(tables["languages"])
        for note, count in tables.notes.items():
            logger.info("prepare %s: %d %s", key, count, note)
        if tables.ignored:
            logger.info("prepare %s: %s", key, tables.describe_ignored())
        write_manifest(
            directory,
            stage="prepare",
            params={
                "data": {name: value for name, value in to_plain(source).items() if name not in OPTIONAL or value},
                "max_image_pixels": params.validate.max_image_pixels,
                "near_duplicates": to_plain(params.validate.near_duplicates),
            },
            counts=counts | {"left_out": dict(tables.skipped), "notes": dict(notes + tables.notes)},
        )
    logger.info("prepare %s: %s", key, ", ".join(f"{count:,} {name}" for name, count in counts.items() if count))


def _check_images(
    tables: Tables,
    key: str,
    params: Params,
    workspace: Workspace,
    fingerprints: FingerprintWriter,
    withdrawn: Any,
) -> Counter[str]:
    """Add width, height and sha256 to the images table, write fingerprints, and quarantine rows whose file fails.

    The rows go to CHECKED if `_group_near_duplicates` follows. An image that `withdrawn` recognizes is left out with
    its rows; None recognizes none.

    Returns:
        How many of the used images have an unusual name, by kind.
    """
    listed, directory = tables["images"], tables.directory
    assert isinstance(listed, TableWriter) and directory is not None
    listed.close()
    # The listing moves aside, because the table of checked images has its name.
    listing = listed.path.rename(directory / ".listed.parquet")
    divided = bool(tables.divided or tables.held_out)
    checked = TableWriter(CHECKED if divided else "images", directory, SCHEMAS["images"])
    tables.rows["images"] = checked

    # each listed name -> a file; the files are hashed in processes, here or on a cluster
    files = _ImageFiles(key, params.data[key], workspace.root, directory)
    mapper = cluster_mapper(params, workspace, folders=[folder for folder in files.folders if folder.is_dir()])
    job = HashJob.in_place(params.validate)
    notes: Counter[str] = Counter()
    withdrawn_ids: dict[str, str] = {}  # id -> how the image was recognized
    with progress_bar(f"checking images of {key}", len(listed), "images") as bar:
        for row, result in _hash_rows(_read_rows(listing), job, files.locate, mapper, held_out=divided):
            bar.advance()
            file = Path(row["path"])
            is_extracted = file.is_relative_to(directory / EXTRACTED)
            # what was extracted is in a temporary directory, which is renamed to data/interim/KEY at the end
            path = workspace.relative(workspace.interim(key) / file.relative_to(directory) if is_extracted else file)
            how = ""
            if withdrawn and isinstance(result, ImageError):  # an unreadable file is recognized by its id only
                how = "by its id" if withdrawn.has_id(row["image_id"]) else ""
            elif withdrawn:
                how = withdrawn.match(result)
            if how:
                withdrawn_ids[row["image_id"]] = how
                # An extracted copy of a withdrawn image must not stay in the output.
                if is_extracted:
                    file.unlink(missing_ok=True)
                continue
            # A bad file goes to quarantine; `validate` removes the rows that depend on it.
            error = result if isinstance(result, ImageError) else _check_size(row, result)
            if error:
                reason = f"{path}: {error.reason}"
                tables.quarantine("images", row["image_id"], error.rule, reason, row["provenance"])
                continue
            assert isinstance(result, ImageHashes)
            fingerprints.add(row["image_id"], result)
            notes[RENAMED] += row["image_id"] in files.renamed
            notes[MISNAMED] += is_misnamed(file, result.format)
            size = {"width": result.width, "height": result.height, "sha256": result.sha256.hex()}
            checked.append({**row, **size, "path": path})
    listing.unlink()
    if withdrawn_ids:
        tables.skipped["withdrawn images"] += len(withdrawn_ids)
        tables.skipped["rows of withdrawn images"] += remove_images(tables, withdrawn_ids.keys())
        for name, how in withdrawn_ids.items():
            logger.info("prepare %s: %s is left out with its rows: it was withdrawn (%s)", key, name, how)
    notes = +notes  # without zeros
    for note, count in notes.items():
        logger.info("prepare %s: %d %s; they are used", key, count, note)
    return notes


class _ImageFiles:
    """Finds the files of listed images.

    folders: of the dataset, whose files it may name besides those that were inside other files and are extracted.
    renamed: ids of images whose file has another name than the listing (data/names.py).
    """

    def __init__(self, key: str, source: DatasetParams, root: Path, directory: Path) -> None:
        folders = () if source.is_remote else (root / source.root, root / source.root / source.images)
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]  # noqa: PTH100 (no links followed)
        self._extracted = Path(os.path.abspath(directory / EXTRACTED))  # noqa: PTH100
        self.renamed: set[str] = set()
        self._key, self._allow_external = key, source.allow_external_images
        self._names = FileNames()

    def locate(self, row: Row) -> ImageError | None:
        """Set the row's path to that of its file; return why it cannot be used, if it has no known split or no file."""
        folders = [*self.folders, self._extracted]
        try:
            check_split(row["split"])  # the search for leaks, in `validate`, needs it
        except ValueError as error:
            return ImageError("split_known", str(error))
        if not self._allow_external and (outside := _outside(Path(row["path"]), folders, self._key)):
            return outside
        path = Path(os.path.abspath(row["path"]))  # noqa: PTH100
        # A broken link counts as present: opening it gives the reason.
        if os.path.lexists(path):
            return None
        # exactly one file must have a name that differs in letter case, Unicode form or slashes only
        folder = next((folder for folder in folders if path.is_relative_to(folder)), path.parent)
        name = str(path.relative_to(folder))
        matches = self._names.find(folder, name)
        if len(matches) != 1:
            return ImageError("image_present", f"no such file{self._names.explain(folder, name, matches)}")
        row["path"] = str(matches[0])
        self.renamed.add(row["image_id"])
        return None


def _check_size(row: Row, hashes: ImageHashes) -> ImageError | None:
    """Return an error if the listing has another size than the file."""
    if row["width"] is None or (row["width"], row["height"]) == (hashes.width, hashes.height):
        return None
    sizes = f"{hashes.width}x{hashes.height}, listed as {row['width']}x{row['height']}"
    return ImageError("image_size", sizes)


def _group_near_duplicates(
    tables: Tables, directory: Path, rules: NearRules, val_fraction: float, mapper: Mapper | None
) -> int:
    """Divide the images again, so that near-duplicates of each other, and their groups, are in one split.

    Reads CHECKED and writes the images table. Images whose split the dataset names stay in it. `val_fraction` applies
    to `tables.held_out`.

    Returns:
        How many images changed their split.
    """
    checked = tables["images"]
    assert isinstance(checked, TableWriter)
    checked.close()
    unit_of = tables.divided or tables.held_out  # image id -> what decides its split
    # Join the units of near-duplicates.
    fixed = {row["image_id"] for row in _read_rows(checked.path) if row["image_id"] not in unit_of}
    fingerprints = directory / FINGERPRINTS
    pairs = find_near_duplicates(fingerprints, rules, fixed=fixed, workers=cpu_count(MAX_PROCESSES), mapper=mapper)
    clusters = Clusters()
    for image_id, copy_id in pairs:
        if image_id in unit_of and copy_id in unit_of:
            clusters.join(unit_of[image_id], unit_of[copy_id])
    units = {image_id: clusters.first(unit) for image_id, unit in unit_of.items()}
    # Divide the joined units as the reader divided the single ones.
    if tables.divided:
        split_of = Division(units[row["image_id"]] for row in _read_rows(checked.path)).split_of
    else:
        split_of = partial(split_held_out, share=val_fraction)
    moved = 0
    images = TableWriter("images", directory)
    for row in _read_rows(checked.path):
        split = split_of(units[row["image_id"]]) if row["image_id"] in units else row["split"]
        moved += split != row["split"]
        images.append({**row, "split": split})
    checked.path.unlink()
    tables.rows["images"] = images
    logger.info("prepare: %d %s", moved, TOGETHER)
    return moved


def _warn_of_placeholders(key: str, images: Path) -> int:
    """Log the first files that are an image under many ids, and return how many images all of them are.

    Such a file is mostly a website's "no photo available", and its captions describe other photos.
    """
    query = f"""
        SELECT count(*) AS copies, min(image_id) AS image_id FROM images
        GROUP BY sha256 HAVING copies >= {MANY} ORDER BY image_id
    """
    with Database.within(images.parent) as database:
        schema = pa.schema([(name, "string") for name in ("image_id", "sha256")])
        database.load("images", read_batches([images], BATCH_ROWS), schema)
        rows = [row for piece in database.stream(query) for row in piece.to_pylist()]
    for row in rows[:EXAMPLES]:
        logger.warning(
            "prepare %s: %d images are the same file, the first %s; if it is a placeholder, leave their rows out",
            key,
            row["copies"],
            row["image_id"],
        )
    return sum(row["copies"] for row in rows)


def _read_rows(path: Path) -> Iterator[Row]:
    for table in read_batches([path], BATCH_ROWS):
        yield from table.to_pylist()


def _hash_rows(
    rows: Iterable[Row],
    job: HashJob,
    locate: Callable[[Row], ImageError | None],
    mapper: Mapper | None,
    *,
    held_out: bool,
) -> Iterator[tuple[Row, ImageHashes | ImageError]]:
    """Yield each row, in order, with the hashes of its image or the reason why it is unusable.

    Images that `locate` returns an error for are not opened.

    Args:
        mapper: executes the hashing; default: processes of this machine.
        held_out: fingerprint training images as well so that their mirrored copies are found.
    """
    # Refused rows skip the hashing processes; the queue merges both back in order.
    pending: deque[tuple[Row, ImageError | None]] = deque()

    def items() -> Iterator[Item]:
        for number, row in enumerate(rows):
            error = locate(row)
            pending.append((row, error))
            if error is None:
                yield number, row["path"], held_out or row["split"] != SPLITS[0]

    def leading_refusals() -> Iterator[tuple[Row, ImageError]]:
        while pending and (error := pending[0][1]):
            yield pending.popleft()[0], error

    # the refused rows in front of each result, then its own row
    for _, result in hash_all(items(), job, cpu_count(MAX_PROCESSES), mapper):
        yield from leading_refusals()
        row, _ = pending.popleft()
        if mapper and isinstance(result, ImageError) and result.rule == "image_present":
            _check_is_absent(row["path"], result)
        yield row, result
    yield from leading_refusals()


def _check_is_absent(path: str, error: ImageError) -> None:
    """Check that this machine cannot read a file either, so that no image is lost to a node without its folder."""
    try:
        read_file(Path(path))
    except ImageError:
        return
    raise DataError(
        f"{path}: a node of the cluster cannot read it ({error.reason}); mount the file's folder there, under the same "
        "path"
    )


def _outside(path: Path, folders: list[Path], key: str) -> ImageError | None:
    """Return an error for a file outside of the dataset: a downloaded listing must not read other files of this disk.

    Only the path as written counts: links inside the dataset are followed.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100
    if any(path.is_relative_to(folder) for folder in folders):
        return None
    reason = f"outside of data.{key}.root and data.{key}.images; data.{key}.allow_external_images: true allows it"
    return ImageError("image_inside", reason)


def _no_image(key: str, source: DatasetParams, listed: int, tables: Tables) -> str:
    """Return why the dataset has no image and no text: the first reasons in quarantine, or the skipped records.

    Args:
        listed: number of images that it lists.
    """
    rows = list(tables["quarantine"])
    fault = f"none of {len(rows):,} records can be read"
    if listed:
        rows = [row for row in rows if row["table"] == "images"]
        fault = f"none of {listed:,} images is readable"
    if rows:
        lines = []
        for row in rows[:EXAMPLES]:
            where = f"{row['row_id']} ({row['provenance']})" if row["row_id"] else row["provenance"]
            lines.append(f"  {where}: {row['reason']}")
        if len(rows) > EXAMPLES:
            lines.append(f"  and {len(rows) - EXAMPLES:,} more")
        if all(row["rule"] == "image_present" for row in rows):
            listing = f"  paths of images are relative to the file that data.{key}.pairs names"
            folder = f"  check data.{key}.images in params.yaml, the folder of the images"
            lines.append(listing if source.format == "pairs" else folder)
        return f"data.{key}: {fault}:\n" + "\n".join(lines)
    # no row in quarantine: the records were left out by the reader, or there are none
    if tables.skipped:
        skipped = ", ".join(f"{count:,} {kind}" for kind, count in tables.skipped.items())
        return f"data.{key}: no image of the dataset under {source.root} is left; skipped: {skipped}"
    return f"data.{key}: the dataset under {source.root} lists no image; check its files in params.yaml"
