"""Hash image files: bytes, pixels, perceptual hash and fingerprint, one by one or in several processes."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from vlp_models.common.executors import LocalMapper, Mapper
from vlp_models.curation.duplicates.fingerprints import Fingerprint, fingerprint_image, perceptual_hash
from vlp_models.data.images import (
    FORMATS,
    ImageError,
    apply_exif_orientation,
    decode_error,
    get_format,
    open_checked,
    read_file,
    read_file_inside,
    to_upright_rgb,
)
from vlp_models.errors import VLPError
from vlp_models.params import ValidateParams

CHUNK = 64  # images a worker hashes at a time
SERIAL_LIMIT = 512  # images; below this, starting workers costs more than it saves
EXTENSIONS = {format_: suffix for suffix, format_ in reversed(FORMATS.items())}  # JPEG -> .jpg


@dataclass(frozen=True, kw_only=True)
class ImageHashes:
    """The identity of one image file.

    sha256         of the file's bytes
    pixels         sha256 of size, mode and decoded pixels, as displayed (EXIF rotation applied)
    perceptual     64 bits, unsigned; None for an image without structure
    width, height  in pixels as displayed
    format         Pillow's name: JPEG, PNG, ...
    """

    sha256: bytes
    pixels: bytes
    perceptual: int | None
    width: int
    height: int
    format: str
    fingerprint: Fingerprint


def hash_image(
    content: bytes, max_pixels: int, *, min_side: int = 0, keypoints: bool = False, held_out: bool = False
) -> ImageHashes:
    """Check, decode and hash an image file's bytes.

    Args:
        min_side: pixels that the shorter side must have, checked before anything is decoded.
        keypoints: include keypoints in the fingerprint.
        held_out: the image is in an evaluation split, so its mirrored copies must be found as well.

    Raises:
        ImageError: a rule of `images.open_checked` is broken, the image is too small (image_side), or the file is
            truncated or damaged (image_decodes).
    """
    with open_checked(content, max_pixels) as image:
        width, height = image.size
        # before anything is decoded
        if min(width, height) < min_side:
            size = f"{width}x{height} pixels; the shorter side must have at least {min_side}"
            raise ImageError("image_side", size)
        image_format = get_format(image)
        try:
            image.load()
            # keep transparency: an image and its copy on white are different pixels, but near-duplicates
            if image.has_transparency_data:
                displayed = apply_exif_orientation(image).convert("RGBA")
            else:
                displayed = to_upright_rgb(image)
            perceptual = perceptual_hash(displayed)
            fingerprint = fingerprint_image(displayed, keypoints=keypoints, mirrored=held_out)
            # Size and mode belong to the hash: the same bytes could be a 2x8 and a 4x4 image.
            pixels = hashlib.sha256(f"{displayed.width}x{displayed.height} {displayed.mode}\0".encode())
            pixels.update(displayed.tobytes())
        except VLPError:
            raise
        except Exception as error:  # a mode without a conversion to RGB raises here, too: no stage could read it
            raise decode_error(error) from None
    return ImageHashes(
        sha256=hashlib.sha256(content).digest(),
        pixels=pixels.digest(),
        perceptual=perceptual,
        width=displayed.width,
        height=displayed.height,
        format=image_format,
        fingerprint=fingerprint,
    )


def hash_image_file(path: Path, max_pixels: int, *, keypoints: bool = False, held_out: bool = False) -> ImageHashes:
    """Check and hash one file. A missing or unreadable one raises an `ImageError`, too (image_present)."""
    return hash_image(read_file(path), max_pixels, keypoints=keypoints, held_out=held_out)


@dataclass(frozen=True, kw_only=True)
class HashJob:
    """Settings shared by all images of one `hash_all` call.

    folder  root of relative paths, which must not leave it; None: paths are used as they are
    keep    where valid images are copied to, by content (`stored_name`); None: nowhere
    """

    folder: Path | None
    keep: Path | None
    max_pixels: int
    min_side: int
    keypoints: bool

    @staticmethod
    def in_place(limits: ValidateParams) -> HashJob:
        """Settings for images that stay where they are; `validate` applies the size limits later."""
        keypoints = limits.near_duplicates.keypoints
        return HashJob(folder=None, keep=None, max_pixels=limits.max_image_pixels, min_side=0, keypoints=keypoints)


Item = tuple[int, str, bool]  # number, path, whether the image is in an evaluation split


def stored_name(hashes: ImageHashes) -> str:
    """Return the path of an image inside an ingested batch: by content, in 256 folders."""
    digest = hashes.sha256.hex()
    return f"images/{digest[:2]}/{digest}{EXTENSIONS[hashes.format]}"


def hash_all(
    items: Iterable[Item], job: HashJob, processes: int, mapper: Mapper | None = None
) -> Iterator[tuple[int, ImageHashes | ImageError]]:
    """Yield (number, hashes or error) of each image, in the order given, with bounded memory.

    Args:
        mapper: executes the chunks; default: `processes` of this machine. A few images are hashed in this process.
    """
    stream = iter(items)
    # look at the first images to learn whether there are few, then put them back
    first = list(islice(stream, SERIAL_LIMIT))
    stream = chain(first, stream)
    # `iter` with a sentinel: chunks until the first empty one.
    chunks = iter(lambda: list(islice(stream, CHUNK)), [])
    if len(first) < SERIAL_LIMIT:
        mapper = LocalMapper(1)
    elif mapper is None:
        mapper = LocalMapper(max(1, processes))
    for results in mapper.map(partial(_hash_chunk, job=job), chunks):
        yield from results


def _hash_chunk(chunk: list[Item], job: HashJob) -> list[tuple[int, ImageHashes | ImageError]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd EXIF, and of sizes that `max_pixels` limits anyway
        return [(number, _hash_one(path, held_out, job)) for number, path, held_out in chunk]


def _hash_one(path: str, held_out: bool, job: HashJob) -> ImageHashes | ImageError:
    try:
        content = read_file_inside(job.folder, path) if job.folder else read_file(Path(path))
        hashes = hash_image(content, job.max_pixels, min_side=job.min_side, keypoints=job.keypoints, held_out=held_out)
        if job.keep:
            _store(content, f"{job.keep}/{stored_name(hashes)}")
        return hashes
    except ImageError as error:
        return error


def _store(content: bytes, target: str) -> None:
    """Write the checked bytes themselves (avoids a check/use race). Identical images share one file."""
    # O_EXCL: of several processes with equal images one writes the file
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(target, flags, 0o644)
    except FileExistsError:
        return
    # The first image of a folder creates it.
    except FileNotFoundError:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        _store(content, target)
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
