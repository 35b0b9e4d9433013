"""The perceptual hash: 64 bits that survive scaling and compression.

The sign of the 64 lowest frequencies (without the mean) of the discrete cosine transform of a 32 x 32 grey copy,
against their median: the "pHash" of Zauner (2010, section 3.2.1), with the frequencies taken along the diagonals. It is
blind to colour, and a picture without structure (one flat colour) has none.
"""

from __future__ import annotations

import numpy as np

SIDE = 32  # pixels of the grey copy along each side
BITS = 64
FLAT = 1.0  # grey levels (of 256, root mean square) below which there is no structure to hash
_REACH = 11  # frequencies needed along each axis

_ORDER = sorted(((u, v) for u in range(_REACH) for v in range(_REACH) if u + v), key=lambda f: (f[0] + f[1], f[0]))
_ROWS, _COLUMNS = (np.array(axis) for axis in zip(*_ORDER[:BITS], strict=True))
_COSINES = np.cos(np.pi * np.outer(np.arange(_REACH), 2 * np.arange(SIDE) + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
_COSINES[0] /= np.sqrt(2)  # now orthonormal


def grey_of(pixels_HWC: np.ndarray) -> np.ndarray:
    """Grey levels [H, W] of RGB pixels."""
    return pixels_HWC.astype(np.float64) @ (0.299, 0.587, 0.114)


def hash_of_grey(grey: np.ndarray) -> int | None:
    """64 bits of 32 x 32 grey levels; None where they are (nearly) all one."""
    frequencies = (_COSINES @ grey @ _COSINES.T)[_ROWS, _COLUMNS]
    if np.sqrt((frequencies**2).sum()) / SIDE < FLAT:
        return None
    middle = np.sort(frequencies)[BITS // 2 - 1 : BITS // 2 + 1].mean()  # the median
    bits = frequencies > middle
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
