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
from vlp_models.data.batches import FINGERPRINTS as BATCH_FINGERPRINTS
from vlp_models.data.batches import PAIRS, batch_folders, ingested_dataset, read_fingerprints
from vlp_models.data.images import ImageError
from vlp_models.data.tables import open_parquet
from vlp_models.errors import DataError
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
    """An image that the user named; `name` as on the command line."""

    name: str


@dataclass(frozen=True, kw_only=True)
class ImageCopy:
    """A dataset image that is the queried image `of`, or a copy of it; `how` describes the match."""

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
        ingested, batches_seen = ingested_dataset(self.params), set[str]()
        for name in self.params.data:
            # Batches that `prepare` has read: they must not be listed again below.
            for image in read_prepared(require_output(self.workspace.interim(name), f"prepare@{name}")):
                if image.source == ingested:
                    batches_seen.add(image.image_id.removeprefix(f"{ingested}/").partition("/")[0])
                yield image
        # Batches ingested after the last `prepare`.
        for batch in batch_folders(self.workspace.root / self.params.ingest.dataset):
            if batch.name not in batches_seen:
                yield from _of_batch(batch, ingested, self.workspace)


def read_prepared(directory: Path) -> Iterator[DatasetImage]:
    """Yield the images in data/interim/NAME.

    Raises:
        DataError: a file is damaged or missing.
    """
    fingerprints, images = directory / FINGERPRINTS, directory / "images.parquet"
    columns = ["image_id", "source", "split", "path", "sha256"]
    try:
        # Both files have one row per image in the same order; `strict` fails if one of them is longer.
        for row, fingerprint in zip(_rows(images, columns), _rows(fingerprints, None), strict=True):
            if row["image_id"] != fingerprint["image_id"]:
                raise ValueError(f"{fingerprint['image_id']} where {row['image_id']} is expected")
            yield DatasetImage(
                **row,
                pixels=fingerprint["pixels"].hex(),
                fingerprint=Fingerprint.from_bytes(fingerprint["fingerprint"]),
            )
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{fingerprints}: {error}; run `dvc repro -f prepare@{directory.name}`") from None


def _rows(path: Path, columns: list[str] | None) -> Iterator[dict[str, Any]]:
    with open_parquet(path) as file:
        for batch in file.iter_batches(BATCH, columns=columns):
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
    name_of: dict[str, str] = {}  # id or path -> the name on the command line
    for name in names:
        name_of[name] = name
        # A path is also looked up relative to the project's root, as the datasets store it.
        name_of[workspace.relative(Path(name))] = name
    listed: dict[str, DatasetImage] = {}
    for image in images:
        # Ids and paths share one dictionary: a name is either of them.
        for key in (image.image_id, image.path):
            if key in name_of:
                listed[name_of[key]] = image
    queries, unknown = [], []
    for name in dict.fromkeys(names):
        dataset_image = listed.get(name)
        file = workspace.root / dataset_image.path if dataset_image else Path(name)
        query = _hash_query(name, file, params) if file.is_file() else None
        # The file of a listed image may be gone or changed since `prepare` read it.
        if dataset_image and (query is None or query.sha256 != dataset_image.sha256):
            query = Query(
                name=name,
                sha256=dataset_image.sha256,
                pixels=dataset_image.pixels,
                fingerprint=dataset_image.fingerprint,
            )
        if query is None:
            unknown.append(name)
        else:
            queries.append(query)
    if unknown:
        raise DataError(
            f"{', '.join(unknown)}: not an image id, an image path in a dataset of params.yaml or an image file. "
            "Ids are listed in data/interim/NAME/images.parquet, for example scenes/17"
        )
    return queries


def _hash_query(name: str, file: Path, params: Params) -> Query:
    limits = params.validate
    try:
        # held_out: describe the mirror image as well, so that mirrored copies are found
        keypoints = limits.near_duplicates.keypoints
        hashes = hash_image_file(file, limits.max_image_pixels, keypoints=keypoints, held_out=True)
    except ImageError as error:
        raise DataError(f"{file}: {error.reason}") from None
    return Query(name=name, sha256=hashes.sha256.hex(), pixels=hashes.pixels.hex(), fingerprint=hashes.fingerprint)


def find_copies(
    queries: Sequence[Query], images: Iterable[DatasetImage], rules: NearRules, *, exact: bool = False
) -> list[ImageCopy]:
    """Find every dataset image that is a queried image or a copy of one, sorted by image id.

    Args:
        exact: only equal bytes or pixels count.
    """
    by_bytes, by_pixels = {query.sha256: query for query in queries}, {query.pixels: query for query in queries}
    index = NearDuplicateIndex([query.fingerprint for query in queries], rules)
    copies: dict[str, ImageCopy] = {}
    for batch, fingerprints in batches((image, image.fingerprint) for image in images):
        for image in batch:
            if image.sha256 in by_bytes:
                name, how = by_bytes[image.sha256].name, "byte for byte"
            elif image.pixels in by_pixels:
                name, how = by_pixels[image.pixels].name, "pixel for pixel"
            else:
                continue
            # The name on the command line was the id or path of this very image.
            how = "as named" if name in (image.image_id, image.path) else how
            copies[image.image_id] = ImageCopy(image=image, of=name, how=how)
        # `setdefault`: an exact match is the better explanation and stays.
        for match in () if exact else index.search(fingerprints):
            image, name = batch[match.query], queries[match.indexed].name
            copies.setdefault(image.image_id, ImageCopy(image=image, of=name, how=describe_match(match)))
    return [copies[image_id] for image_id in sorted(copies)]
