"""Pictures hashed by several processes, in order, with a bounded number under way. Workers die with their parent."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from vlp_models.common.parallel import die_with_parent, in_flight
from vlp_models.curation.duplicates.hashes import ImageHashes, hash_image
from vlp_models.data.images import FORMATS, ImageError, read_file
from vlp_models.data.inside import read_inside
from vlp_models.params import ValidateParams

TASK = 64  # pictures
FEW = 512  # pictures that this process has done before another one has started
EXTENSIONS = {format_: suffix for suffix, format_ in reversed(FORMATS.items())}  # JPEG -> .jpg


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every picture of a run shares.

    folder: what paths are relative to and may not leave; None: paths are taken as they are.
    keep: where sound pictures are copied to, by their hash (see `stored_name`); None: nowhere.
    """

    folder: Path | None
    keep: Path | None
    max_pixels: int
    min_side: int
    keypoints: bool

    @staticmethod
    def of_dataset(limits: ValidateParams) -> Job:
        """For pictures that stay where they are, judged by `validate`'s limits alone."""
        keypoints = limits.near_duplicates.keypoints
        return Job(folder=None, keep=None, max_pixels=limits.max_image_pixels, min_side=0, keypoints=keypoints)


Item = tuple[int, str, bool]  # number, path, whether it is tested on


def stored_name(hashes: ImageHashes) -> str:
    """Where a batch keeps a picture: by content, 256 folders."""
    digest = hashes.sha256.hex()
    return f"images/{digest[:2]}/{digest}{EXTENSIONS[hashes.format]}"


def hash_all(items: Iterable[Item], job: Job, processes: int) -> Iterator[tuple[int, ImageHashes | ImageError]]:
    """The hashes of each picture, or what is wrong with it, under its number, in the order given."""
    stream = iter(items)
    first = list(islice(stream, FEW))
    stream = chain(first, stream)
    tasks = iter(lambda: list(islice(stream, TASK)), [])
    if processes <= 1 or len(first) < FEW:
        for task in tasks:
            yield from _hash_some(task, job)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads' locks
    with ProcessPoolExecutor(processes, context, initializer=die_with_parent) as pool:
        try:
            for found in in_flight(lambda task: pool.submit(_hash_some, task, job), tasks, 4 * processes):
                yield from found
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _hash_some(task: list[Item], job: Job) -> list[tuple[int, ImageHashes | ImageError]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow on odd EXIF and on sizes that `max_pixels` rules on
        return [(number, _hash_one(path, tested, job)) for number, path, tested in task]


def _hash_one(path: str, tested: bool, job: Job) -> ImageHashes | ImageError:
    try:
        content = read_inside(job.folder, path) if job.folder else read_file(Path(path))
        suffix = os.path.splitext(path)[1]  # noqa: PTH122
        hashes = hash_image(content, suffix, job.max_pixels, keypoints=job.keypoints, tested=tested)
        if min(hashes.width, hashes.height) < job.min_side:
            side = f"{hashes.width}x{hashes.height} pixels; the shorter side must have {job.min_side}"
            raise ImageError("image_side", side)
        if job.keep:
            _keep(content, f"{job.keep}/{stored_name(hashes)}")
        return hashes
    except ImageError as error:
        return error


def _keep(content: bytes, target: str) -> None:
    """Writes what was judged, so that nobody can exchange it in between. Equal pictures meet in one file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(target, flags, 0o644)
    except FileExistsError:
        return None
    except FileNotFoundError:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        return _keep(content, target)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return None
