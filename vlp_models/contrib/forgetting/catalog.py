"""Find the images a user names, and their copies in every dataset, by the rules of near-duplicates.

An image is named by its id, by its path in a dataset, or by any image file that shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlp_models.common.workspace import Workspace, require_output
from vlp_models.curation.duplicates.fingerprints import Fingerprint
from vlp_models.curation.duplicates.hashes import hash_image_file
from vlp_models.curation.duplicates.leakage import BATCH, FINGERPRINTS, batches, describe_match
from vlp_models.curation.duplicates.search import NearDuplicateIndex, NearRules
from vlp_models.data.images import ImageError
from vlp_models.data.tables import open_parquet
from vlp_models.errors import DataError
from vlp_models.ingest.index import FINGERPRINTS as BATCH_FINGERPRINTS
from vlp_models.ingest.index import PAIRS, batch_folders, read_fingerprints
from vlp_models.ingest.ingest import dataset_name
from vlp_models.params import Params


@dataclass(frozen=True, kw_only=True)
class ImageIdentity:
    """The hashes that identify an image."""

    sha256: str
    pixels: str
    fingerprint: Fingerprint = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class DatasetImage(ImageIdentity):
    """An image of a dataset."""

    image_id: str
    source: str
    split: str
    path: str  # relative to the project root if it is inside


@dataclass(frozen=True, kw_only=True)
class Query(ImageIdentity):
    """An image that the user asked to forget; `name` as it was given."""

    name: str


@dataclass(frozen=True, kw_only=True)
class FoundImage:
    """A dataset image that is a queried image or a copy of it; `how` describes the match."""

    image: DatasetImage
    of: str
    how: str


@dataclass(frozen=True)
class Catalog:
    """All images of the workspace's datasets: as `prepare` last read them, plus batches ingested since.

    Iterating reads the files each time: fingerprints are too many to keep in memory.

    Raises (while iterating):
        DataError: a dataset is not prepared yet, or the output of `prepare` is damaged.
    """

    params: Params
    workspace: Workspace

    def __iter__(self) -> Iterator[DatasetImage]:
        own, seen = dataset_name(self.params), set[str]()
        for name in self.params.data:
            for known in read_prepared(require_output(self.workspace.interim(name), f"prepare@{name}")):
                if known.source == own:
                    seen.add(known.image_id.removeprefix(f"{own}/").partition("/")[0])
                yield known
        for batch in batch_folders(self.workspace.root / self.params.ingest.dataset):
            if batch.name not in seen:
                yield from _of_batch(batch, own, self.workspace)


def read_prepared(directory: Path) -> Iterator[DatasetImage]:
    """Yield the images in data/interim/NAME.

    Raises:
        DataError: a file is damaged or missing.
    """
    fingerprints, images = directory / FINGERPRINTS, directory / "images.parquet"
    columns = ["image_id", "source", "split", "path", "sha256"]
    try:
        rows = zip(_rows(images, columns), _rows(fingerprints), strict=True)
        for row, fingerprint in rows:
            if row["image_id"] != fingerprint["image_id"]:
                raise ValueError(f"{fingerprint['image_id']} where {row['image_id']} is expected")
            yield DatasetImage(
                **row,
                pixels=fingerprint["pixels"].hex(),
                fingerprint=Fingerprint.from_bytes(fingerprint["fingerprint"]),
            )
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{fingerprints}: {error}; run `dvc repro -f prepare@{directory.name}`") from None


def _rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    with open_parquet(path) as file:
        for batch in file.iter_batches(BATCH, columns=None if columns is None else list(columns)):
            yield from batch.to_pylist()


def _of_batch(batch: Path, name: str, workspace: Workspace) -> Iterator[DatasetImage]:
    fingerprints, last = read_fingerprints(batch / BATCH_FINGERPRINTS), ""
    with (batch / PAIRS).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["image"] != last:  # captions of one image are adjacent
                last, (_, fingerprint) = row["image"], next(fingerprints)
                yield DatasetImage(
                    image_id=f"{name}/{batch.name}/{last}",
                    source=name,
                    split=row["split"],
                    path=workspace.relative(batch / last),
                    sha256=row["sha256"],
                    pixels=row["pixels"],
                    fingerprint=Fingerprint.from_bytes(fingerprint),
                )


def resolve_queries(
    names: Sequence[str], images: Iterable[DatasetImage], params: Params, workspace: Workspace
) -> list[Query]:
    """Resolve ids, paths in a dataset and image files to images.

    Raises:
        DataError: names that are none of them.
    """
    wanted: dict[str, str] = {}
    for name in names:
        wanted[name] = name
        wanted[workspace.relative(Path(name))] = name
    known: dict[str, DatasetImage] = {}
    for image in images:
        for key in (image.image_id, image.path):
            if key in wanted:
                known[wanted[key]] = image
    queries, lost = [], []
    for name in dict.fromkeys(names):
        file = workspace.root / known[name].path if name in known else Path(name)
        shown = _hash_query(name, file, params) if file.is_file() else None
        if name in known and (shown is None or shown.sha256 != known[name].sha256):
            own = known[name]
            shown = Query(name=name, sha256=own.sha256, pixels=own.pixels, fingerprint=own.fingerprint)
        if shown is None:
            lost.append(name)
        else:
            queries.append(shown)
    if lost:
        raise DataError(
            f"{', '.join(lost)}: not an image id, an image path in a dataset of params.yaml or an image file. "
            "Ids are listed in data/interim/NAME/images.parquet, for example scenes/17"
        )
    return queries


def _hash_query(name: str, file: Path, params: Params) -> Query:
    limits = params.validate
    try:
        # held_out: describe the mirror image as well, so that mirrored copies are found
        found = hash_image_file(
            file, limits.max_image_pixels, keypoints=limits.near_duplicates.keypoints, held_out=True
        )
    except ImageError as error:
        raise DataError(f"{file}: {error.reason}") from None
    return Query(name=name, sha256=found.sha256.hex(), pixels=found.pixels.hex(), fingerprint=found.fingerprint)


def find_copies(
    queries: Sequence[Query], images: Iterable[DatasetImage], rules: NearRules, *, exact: bool = False
) -> list[FoundImage]:
    """Find every dataset image that is a queried image or a copy of one, sorted by image id.

    Args:
        exact: only equal bytes or pixels count.
    """
    by_bytes, by_pixels = {one.sha256: one for one in queries}, {one.pixels: one for one in queries}
    names, index = [one.name for one in queries], NearDuplicateIndex([one.fingerprint for one in queries], rules)
    found: dict[str, FoundImage] = {}
    for batch, fingerprints in batches((image, image.fingerprint) for image in images):
        for image in batch:
            if image.sha256 in by_bytes:
                one, how = by_bytes[image.sha256], "byte for byte"
            elif image.pixels in by_pixels:
                one, how = by_pixels[image.pixels], "pixel for pixel"
            else:
                continue
            how = "as named" if one.name in (image.image_id, image.path) else how
            found[image.image_id] = FoundImage(image=image, of=one.name, how=how)
        for match in () if exact else index.search(fingerprints):
            image = batch[match.query]
            found.setdefault(
                image.image_id, FoundImage(image=image, of=names[match.indexed], how=describe_match(match))
            )
    return [found[name] for name in sorted(found)]
