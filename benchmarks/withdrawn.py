"""Recognition of withdrawn images by hashes alone: `python benchmarks/withdrawn.py IMAGES.tar [COUNT]`.

Each image is changed in each way and searched among the hashes of all images; and every image is searched among those
of all others (vlp_models/curation/duplicates/withdrawn.py). Prints the share of images within some distances in bits.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageOps

from vlp_models.curation.duplicates.fingerprints import (
    ORIENTATIONS,
    Fingerprint,
    fingerprint_image,
    perceptual_hash_of_gray,
    to_gray,
)
from vlp_models.curation.duplicates.withdrawn import HASH_ONLY_DISTANCE

BITS = (2, 4, HASH_ONLY_DISTANCE, 8)


def pictures(tar: str, count: int) -> Iterator[Image.Image]:
    with tarfile.open(tar) as archive:
        names = (m for m in archive if m.isfile() and m.name.lower().endswith((".jpg", ".jpeg", ".png")))
        for member, _ in zip(names, range(count), strict=False):
            file = archive.extractfile(member)
            assert file is not None
            yield Image.open(io.BytesIO(file.read())).convert("RGB")


def saved(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "re-encoded, JPEG quality 50": lambda image: saved(image, 50),
    "scaled to a half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "scaled by 1.5": lambda image: image.resize((image.width * 3 // 2, image.height * 3 // 2)),
    "bordered, 10% on each side": lambda image: saved(ImageOps.expand(image, image.width // 10, "white"), 90),
    "mirrored": ImageOps.mirror,
    "rotated by 90 degrees": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "grayscale": lambda image: image.convert("L").convert("RGB"),
}


def fingerprint(image: Image.Image) -> Fingerprint:
    return fingerprint_image(image, keypoints=False, mirrored=False)


def main(tar: str, count: int = 1000) -> None:
    held, changed = [], {name: [] for name in CHANGES}  # type: ignore[var-annotated]
    for image in pictures(tar, count):
        own = fingerprint(image)
        hashes = [perceptual_hash_of_gray(to_gray(own.oriented(turn))) for turn in range(ORIENTATIONS)]
        turned = [value for value in hashes if value is not None]
        if len(turned) < ORIENTATIONS:  # an image of one color
            continue
        held.append(turned)
        for name, change in CHANGES.items():
            value = fingerprint(change(image)).perceptual
            changed[name].append(~turned[0] & (1 << 64) - 1 if value is None else value)
    hashes_N8 = np.array(held, np.uint64)
    print(f"{len(held)} pictures")
    for name, values in changed.items():
        apart_N = np.bitwise_count(hashes_N8 ^ np.array(values, np.uint64)[:, None]).min(axis=1)
        print(f"{name:30}" + "".join(f"  {bits} bits {100 * (apart_N <= bits).mean():5.1f}%" for bits in BITS))
    others = dict.fromkeys(BITS, 0)
    for number, own_8 in enumerate(hashes_N8):
        apart_N = np.bitwise_count(hashes_N8[:, :1] ^ own_8).min(axis=1)
        apart_N[number] = 64
        for bits in BITS:
            others[bits] += int((apart_N <= bits).sum())
    pairs = len(held) * (len(held) - 1)
    print(f"{pairs:,} pairs of others         " + "".join(f"  {bits} bits {n}" for bits, n in others.items()))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
