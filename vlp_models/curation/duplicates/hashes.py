"""What a picture is known by: hashes of its bytes and its pixels, a perceptual one, and its print."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vlp_models.curation.duplicates.perceptual import SIDE, hash_of_grey
from vlp_models.curation.duplicates.prints import Print, on_white, take_print
from vlp_models.data.images import as_seen, format_of, open_checked, read_file, turned, undecodable
from vlp_models.errors import VLPError


@dataclass(frozen=True, kw_only=True)
class ImageHashes:
    sha256: bytes  # of the file
    pixels: bytes  # sha256 of size, mode and decoded pixels, as they are to be seen (EXIF rotation applied)
    perceptual: int | None  # 64 bits, unsigned; None for a picture without structure
    width: int  # in pixels as seen (EXIF rotation applied), as height
    height: int
    format: str  # Pillow's name: JPEG, PNG, ...
    print: Print


def hash_image(
    content: bytes, suffix: str, max_pixels: int, *, keypoints: bool = False, tested: bool = False
) -> ImageHashes:
    """Checks and decodes an image file's bytes, whole, and hashes it.

    Args:
        keypoints: its print is to hold some.
        tested: it is tested on, so that its mirrored copies must be known as well.

    Raises:
        ImageError: under one of the rules of `images.open_checked`, or image_decodes (truncated or damaged).
    """
    with open_checked(content, suffix, max_pixels) as image:
        found = format_of(image)
        try:
            image.load()
            seen = turned(image).convert("RGBA") if image.has_transparency_data else as_seen(image)
            perceptual = perceptual_hash(seen)
            taken = take_print(seen, keypoints=keypoints, mirror=tested)
            pixels = hashlib.sha256(f"{seen.width}x{seen.height} {seen.mode}\0".encode())
            pixels.update(seen.tobytes())
        except VLPError:
            raise
        except Exception as error:  # also of a mode that has no way to RGB: no stage could read it
            raise undecodable(error) from None
    return ImageHashes(
        sha256=hashlib.sha256(content).digest(),
        pixels=pixels.digest(),
        perceptual=perceptual,
        width=seen.width,
        height=seen.height,
        format=found,
        print=taken,
    )


def examine(path: Path, max_pixels: int, *, keypoints: bool = False, tested: bool = False) -> ImageHashes:
    """Checks and hashes one file.

    Raises:
        ImageError: as `hash_image`, or under image_present: there is no such file, or it can't be read.
    """
    return hash_image(read_file(path), path.suffix, max_pixels, keypoints=keypoints, tested=tested)


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits of an RGB or RGBA picture; None where it is (nearly) of one colour. Transparent parts count as white."""
    return hash_of_grey(
        np.asarray(on_white(image).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float64)
    )
