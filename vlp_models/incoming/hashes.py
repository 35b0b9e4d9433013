"""Three hashes of a picture: of its bytes, of its pixels, and a perceptual one that survives scaling and compression.

The perceptual hash is the sign of the 64 lowest frequencies (without the mean) of the discrete cosine transform of a
32 x 32 grey copy, against their median: the "pHash" of Zauner (2010, section 3.2.1), with the frequencies taken along
the diagonals. It is blind to colour, and a picture without structure (one flat colour) has none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlp_models.data.images import as_seen, format_of, open_checked, turned, undecodable

SIDE = 32  # pixels of the grey copy along each side
BITS = 64
FLAT = 1.0  # grey levels (of 256, root mean square) below which there is no structure to hash
_REACH = 11  # frequencies needed along each axis

_ORDER = sorted(((u, v) for u in range(_REACH) for v in range(_REACH) if u + v), key=lambda f: (f[0] + f[1], f[0]))
_ROWS, _COLUMNS = (np.array(axis) for axis in zip(*_ORDER[:BITS], strict=True))
_COSINES = np.cos(np.pi * np.outer(np.arange(_REACH), 2 * np.arange(SIDE) + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
_COSINES[0] /= np.sqrt(2)  # now orthonormal


@dataclass(frozen=True, kw_only=True)
class ImageHashes:
    sha256: bytes  # of the file
    pixels: bytes  # sha256 of size, mode and decoded pixels, as they are to be seen (EXIF rotation applied)
    perceptual: int | None  # 64 bits, unsigned; None for a picture without structure
    width: int  # as seen, as height
    height: int
    format: str


def hash_image(content: bytes, suffix: str, max_pixels: int) -> ImageHashes:
    """Checks and decodes an image file's bytes, whole, and hashes it.

    Raises:
        ImageError: as `images.probe`, but for a file that is not there.
    """
    with open_checked(content, suffix, max_pixels) as image:
        found = format_of(image)
        try:
            image.load()
            seen = turned(image).convert("RGBA") if image.has_transparency_data else as_seen(image)
            perceptual = perceptual_hash(seen)
            pixels = hashlib.sha256(f"{seen.width}x{seen.height} {seen.mode}\0".encode())
            pixels.update(seen.tobytes())
        except Exception as error:  # also of a mode that has no way to RGB: no stage could read it
            raise undecodable(error) from None
    return ImageHashes(
        sha256=hashlib.sha256(content).digest(),
        pixels=pixels.digest(),
        perceptual=perceptual,
        width=seen.width,
        height=seen.height,
        format=found,
    )


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits of an RGB or RGBA picture; None where it is (nearly) of one colour. Transparent parts count as white."""
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    grey = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float64)
    frequencies = (_COSINES @ grey @ _COSINES.T)[_ROWS, _COLUMNS]
    if np.sqrt((frequencies**2).sum()) / SIDE < FLAT:
        return None
    middle = np.sort(frequencies)[BITS // 2 - 1 : BITS // 2 + 1].mean()  # the median
    bits = frequencies > middle
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
