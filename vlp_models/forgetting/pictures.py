"""The pictures that are meant, and their copies in every dataset: by the rules that every door asks by.

A picture is named by its id, by where it lies, or by a file that shows it.
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
from vlp_models.ingest.index import MANIFEST, PAIRS, read_prints
from vlp_models.ingest.ingest import dataset_name
from vlp_models.params import Params


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What a picture is known by."""

    sha256: str
    pixels: str
    fingerprint: Fingerprint = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Known(Picture):
    """A picture of a dataset."""

    image_id: str
    source: str
    split: str
    path: str  # relative to the project where it lies inside it


@dataclass(frozen=True, kw_only=True)
class Asked(Picture):
    """A picture that is to be forgotten. name: as it was given."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """A picture of a dataset that is one of those asked for, or a copy of it. how: it is known to be one."""

    picture: Known
    of: str
    how: str


def rules_of(params: Params) -> NearRules:
    near = params.validate.near_duplicates
    return NearRules(max_hash_distance=near.max_hash_distance, keypoints=near.keypoints)


@dataclass(frozen=True)
class Catalogue:
    """Every picture of the workspace's datasets, as `prepare` last saw them, and of batches that it has not seen. Read
    anew each time: prints are too many to be held.

    Iterating raises:
        DataError: a dataset is not prepared yet, or what `prepare` left is damaged.
    """

    params: Params
    workspace: Workspace

    def __iter__(self) -> Iterator[Known]:
        own, seen = dataset_name(self.params), set[str]()
        for name in self.params.data:
            for known in prepared(require_output(self.workspace.interim(name), f"prepare@{name}")):
                if known.source == own:
                    seen.add(known.image_id.removeprefix(f"{own}/").partition("/")[0])
                yield known
        for manifest in sorted((self.workspace.root / self.params.ingest.dataset).glob(f"*/{MANIFEST}")):
            batch = manifest.parent
            if batch.name not in seen and not batch.name.startswith("."):
                yield from _of_batch(batch, own, self.workspace)


def prepared(directory: Path) -> Iterator[Known]:
    """The pictures in data/interim/NAME.

    Raises:
        DataError: damaged, or of an earlier version, without prints.
    """
    fingerprints, images = directory / FINGERPRINTS, directory / "images.parquet"
    columns = ["image_id", "source", "split", "path", "sha256"]
    try:
        rows = zip(_rows(images, columns), _rows(fingerprints), strict=True)
        for row, fingerprint in rows:
            if row["image_id"] != fingerprint["image_id"]:
                raise ValueError(f"{fingerprint['image_id']} where {row['image_id']} is expected")
            yield Known(
                **row,
                pixels=fingerprint["pixels"].hex(),
                fingerprint=Fingerprint.from_bytes(fingerprint["fingerprint"]),
            )
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{fingerprints}: {error}; `dvc repro -f prepare@{directory.name}` makes it anew") from None


def _rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    with open_parquet(path) as file:
        for batch in file.iter_batches(BATCH, columns=None if columns is None else list(columns)):
            yield from batch.to_pylist()


def _of_batch(batch: Path, name: str, workspace: Workspace) -> Iterator[Known]:
    fingerprints, last = read_prints(batch / BATCH_FINGERPRINTS), ""
    if fingerprints is None:
        raise DataError(
            f"{batch}: of an earlier version, without prints; with `vlp use presets/ingest.yaml` and `dvc repro "
            "prepare@ingested` its pictures are looked at"
        )
    with (batch / PAIRS).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["image"] != last:  # captions of one picture are neighbours
                last, (_, fingerprint) = row["image"], next(fingerprints)
                yield Known(
                    image_id=f"{name}/{batch.name}/{last}",
                    source=name,
                    split=row["split"],
                    path=workspace.relative(batch / last),
                    sha256=row["sha256"],
                    pixels=row["pixels"],
                    fingerprint=Fingerprint.from_bytes(fingerprint),
                )


def resolve(names: Sequence[str], pictures: Iterable[Known], params: Params, workspace: Workspace) -> list[Asked]:
    """What is meant by an id, a path in a dataset, or a picture file.

    Raises:
        DataError: a name is none of them; it names them all.
    """
    wanted: dict[str, str] = {}
    for name in names:
        wanted[name] = name
        wanted[workspace.relative(Path(name))] = name
    known: dict[str, Known] = {}
    for picture in pictures:
        for key in (picture.image_id, picture.path):
            if key in wanted:
                known[wanted[key]] = picture
    asked, lost = [], []
    for name in dict.fromkeys(names):
        file = workspace.root / known[name].path if name in known else Path(name)
        shown = _look(name, file, params) if file.is_file() else None
        if name in known and (shown is None or shown.sha256 != known[name].sha256):
            own = known[name]
            shown = Asked(name=name, sha256=own.sha256, pixels=own.pixels, fingerprint=own.fingerprint)
        if shown is None:
            lost.append(name)
        else:
            asked.append(shown)
    if lost:
        raise DataError(
            f"{', '.join(lost)}: neither the id nor the path of a picture in a dataset of params.yaml, nor a picture "
            "file. An id is as in data/interim/NAME/images.parquet, such as scenes/17"
        )
    return asked


def _look(name: str, file: Path, params: Params) -> Asked:
    limits = params.validate
    try:
        # as of what is tested on: its mirrored copies must be known, too
        found = hash_image_file(
            file, limits.max_image_pixels, keypoints=limits.near_duplicates.keypoints, held_out=True
        )
    except ImageError as error:
        raise DataError(f"{file}: {error.reason}") from None
    return Asked(name=name, sha256=found.sha256.hex(), pixels=found.pixels.hex(), fingerprint=found.fingerprint)


def find(asked: Sequence[Asked], pictures: Iterable[Known], rules: NearRules, *, exact: bool = False) -> list[Found]:
    """Every picture that is one of those asked for, or a copy; by image id.

    Args:
        exact: equal bytes or pixels only.
    """
    by_bytes, by_pixels = {one.sha256: one for one in asked}, {one.pixels: one for one in asked}
    names, near = [one.name for one in asked], NearDuplicateIndex([one.fingerprint for one in asked], rules)
    found: dict[str, Found] = {}
    for held, fingerprints in batches((picture, picture.fingerprint) for picture in pictures):
        for picture in held:
            if picture.sha256 in by_bytes:
                one, how = by_bytes[picture.sha256], "byte for byte"
            elif picture.pixels in by_pixels:
                one, how = by_pixels[picture.pixels], "pixel for pixel"
            else:
                continue
            how = "as asked" if one.name in (picture.image_id, picture.path) else how
            found[picture.image_id] = Found(picture=picture, of=one.name, how=how)
        for match in () if exact else near.search(fingerprints):
            picture = held[match.query]
            found.setdefault(
                picture.image_id, Found(picture=picture, of=names[match.indexed], how=describe_match(match))
            )
    return [found[name] for name in sorted(found)]
