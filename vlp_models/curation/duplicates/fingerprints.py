"""Image fingerprints: what must be stored of an image to recognize a changed copy of it, 7 to 12 kB.

A fingerprint holds a 32 x 32 thumbnail and up to 120 keypoints. Two searches propose copies: the perceptual hash of the
thumbnail survives scaling and compression; the keypoints survive cropping, borders, small rotations and text laid over
the image. alignment.py then verifies a proposal by laying one thumbnail on the other.

Shape suffixes: H, W, C an image; K keypoints; B the 32 bytes of a descriptor; 2 the coordinates x, y.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from PIL import Image

from vlp_models.errors import ParamsError

THUMB = 32  # pixels of the thumbnail along each side, whatever the image's shape
ORIENTATIONS = 8  # ways to lay a square on itself: four quarter turns, each as it is and mirrored

# Perceptual hash
HASH_BITS = 64
FLAT = 1.0  # gray levels (of 256, root mean square) below which an image has no structure to hash
_REACH = 11  # frequencies needed along each axis

# Keypoints
CANONICAL_SIDE = 224  # pixels of the longer side at which keypoints are described, so that copies share one scale
MAX_KEYPOINTS = 120
FIELDS = 4  # the image is cut into FIELDS x FIELDS fields, so that one busy corner does not take all keypoints
CANDIDATES = 1000  # corners detected before the selection: overlaid text has many strong ones
FAST_THRESHOLD = 10  # gray levels; low, so that smooth images have keypoints as well
EDGE = 10  # pixels at the rim without keypoints
DESCRIPTOR_BYTES = 32
KEYPOINT_BYTES = DESCRIPTOR_BYTES + 4
_UNIT = 64.0  # positions are stored in 1/64 pixels

# Frames
PLAIN = 10  # gray levels by which the pixels of a border may differ, and the borders of opposite sides
MIN_INNER = 0.4  # share of each side that must be left of an image without its frame
_FIXED_BYTES = 12 + THUMB * THUMB * 3


# --- Perceptual hash -----------------------------------------------------------------------------------------------

# The 64 lowest frequencies along the diagonals, without the mean.
_ORDER = sorted(((u, v) for u in range(_REACH) for v in range(_REACH) if u + v), key=lambda f: (f[0] + f[1], f[0]))
_ROWS, _COLUMNS = (np.array(axis) for axis in zip(*_ORDER[:HASH_BITS], strict=True))
# (11, 32): the rows of the discrete cosine transform that are needed.
_COSINES = np.cos(np.pi * np.outer(np.arange(_REACH), 2 * np.arange(THUMB) + 1) / (2 * THUMB)) * np.sqrt(2 / THUMB)
_COSINES[0] /= np.sqrt(2)  # now orthonormal


def to_gray(pixels_HWC: np.ndarray) -> np.ndarray:
    """Convert RGB pixels to gray levels [H, W] (float64)."""
    return pixels_HWC.astype(np.float64) @ (0.299, 0.587, 0.114)


def perceptual_hash_of_gray(gray: np.ndarray) -> int | None:
    """Return the 64-bit perceptual hash ("pHash") of 32 x 32 gray levels; None for an image without structure.

    Each bit is the sign of one of the 64 lowest frequencies of the discrete cosine transform against their median
    (Zauner, 2010, section 3.2.1, with the frequencies taken along the diagonals). The hash ignores color.
    """
    # discrete cosine transform, [32, 32] -> the 64 lowest frequencies
    frequencies = (_COSINES @ gray @ _COSINES.T)[_ROWS, _COLUMNS]
    if np.sqrt((frequencies**2).sum()) / THUMB < FLAT:
        return None
    median = np.sort(frequencies)[HASH_BITS // 2 - 1 : HASH_BITS // 2 + 1].mean()
    return int.from_bytes(np.packbits(frequencies > median).tobytes(), "big")


def perceptual_hash(image: Image.Image) -> int | None:
    """Return the perceptual hash of an RGB or RGBA image; None for a (nearly) uniform one. Transparency is white."""
    small = flatten_on_white(image).convert("L").resize((THUMB, THUMB), Image.Resampling.BILINEAR)
    return perceptual_hash_of_gray(np.asarray(small, np.float64))


# --- Keypoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Keypoints:
    """K corners of an image whose longer side is `CANONICAL_SIDE` pixels.

    points_K2       uint16, x and y in 1/64 pixels
    descriptors_KB  uint8, 32 bytes each
    """

    points_K2: np.ndarray
    descriptors_KB: np.ndarray

    @staticmethod
    def empty() -> Keypoints:
        return Keypoints(np.zeros((0, 2), np.uint16), np.zeros((0, DESCRIPTOR_BYTES), np.uint8))

    def __len__(self) -> int:
        return len(self.points_K2)

    @property
    def positions_K2(self) -> np.ndarray:
        """x and y in pixels, float32."""
        return self.points_K2.astype(np.float32) / _UNIT

    def to_bytes(self) -> bytes:
        return self.points_K2.astype("<u2").tobytes() + self.descriptors_KB.tobytes()

    @staticmethod
    def from_bytes(content: bytes) -> Keypoints:
        """Decode what `to_bytes` returned.

        Raises:
            ValueError: the length is not a multiple of a keypoint's.
        """
        count, rest = divmod(len(content), KEYPOINT_BYTES)
        if rest:
            raise ValueError(f"{len(content)} bytes are not a whole number of keypoints")
        points = np.frombuffer(content, "<u2", 2 * count).reshape(count, 2)
        descriptors = np.frombuffer(content, np.uint8, offset=4 * count).reshape(count, DESCRIPTOR_BYTES)
        return Keypoints(points, descriptors)


def detect_keypoints(image: Image.Image) -> Keypoints:
    """Detect and describe the keypoints of a gray image of canonical size: ORB (Rublee et al., 2011), by OpenCV.

    Mirroring an image changes the descriptors, so a search that must find mirrored copies describes both.
    """
    cv2, gray = opencv(), np.asarray(image)
    if min(gray.shape) <= 2 * EDGE:  # the rim is all of it; OpenCV fails on the narrowest
        return Keypoints.empty()
    orb = cv2.ORB_create(
        nfeatures=CANDIDATES, scaleFactor=1.25, nlevels=5, edgeThreshold=EDGE, fastThreshold=FAST_THRESHOLD
    )
    corners = orb.detect(gray, None)
    if not corners:
        return Keypoints.empty()
    positions = np.array([corner.pt for corner in corners], np.float32)
    strengths = np.array([corner.response for corner in corners])
    selected = _select_spread_out(positions, strengths, gray.shape[1], gray.shape[0])
    described, descriptors = orb.compute(gray, [corners[i] for i in selected])
    if descriptors is None:
        return Keypoints.empty()
    points = np.rint(np.array([corner.pt for corner in described], np.float32) * _UNIT).astype(np.uint16)
    return Keypoints(points, np.ascontiguousarray(descriptors))


def canonical_size(width: int, height: int) -> tuple[int, int]:
    """Return width and height scaled so that the longer side is `CANONICAL_SIDE`."""
    scale = CANONICAL_SIDE / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _select_spread_out(positions: np.ndarray, strengths: np.ndarray, width: int, height: int) -> np.ndarray:
    """Choose `MAX_KEYPOINTS` corners: in turns, the strongest one left in each field of the image."""
    # K corners: the field of each, row by row
    column, row = (positions * FIELDS / (width, height)).astype(int).T
    field = row * FIELDS + column
    # `lexsort` sorts by its last key first: by field, then by strength, and ties by position.
    order = np.lexsort((positions[:, 0], positions[:, 1], -strengths, field))
    # rank within its field: 0 for the strongest corner of each field, 1 for the second, ...
    rank = np.arange(len(order)) - np.searchsorted(field[order], field[order])
    return order[np.lexsort((-strengths[order], rank))[:MAX_KEYPOINTS]]


@lru_cache
def opencv() -> Any:
    """Import OpenCV, limited to one thread: images are processed in parallel already.

    Raises:
        ParamsError: OpenCV is not installed.
    """
    try:
        import cv2
    except ImportError:
        raise ParamsError(
            "validate.near_duplicates.keypoints needs OpenCV, which is not installed: `pip install "
            "opencv-python-headless`, or set it to false (hashes alone miss cropped copies)"
        ) from None
    cv2.setNumThreads(1)
    return cv2


# --- Fingerprints --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """What is stored of an image to recognize its copies.

    width, height  of the image without its frame, in pixels
    thumb_HWC      uint8 [32, 32, 3]
    keypoints      of the image; empty where keypoints are switched off
    mirrored       keypoints of the mirrored image; empty unless it is in an evaluation split
    """

    width: int
    height: int
    thumb_HWC: np.ndarray
    keypoints: Keypoints
    mirrored: Keypoints

    @cached_property
    def perceptual(self) -> int | None:
        """The perceptual hash of the thumbnail; None for an image without structure."""
        return perceptual_hash_of_gray(to_gray(self.thumb_HWC))

    def oriented(self, orientation: int) -> np.ndarray:
        """Return the thumbnail after `orientation % 4` quarter turns, mirrored first from orientation 4 on."""
        thumb = self.thumb_HWC[:, ::-1] if orientation >= ORIENTATIONS // 2 else self.thumb_HWC
        return np.rot90(thumb, orientation % 4)

    def to_bytes(self) -> bytes:
        header = np.array([self.width, self.height, len(self.keypoints)], "<u4").tobytes()
        return header + self.thumb_HWC.tobytes() + self.keypoints.to_bytes() + self.mirrored.to_bytes()

    @staticmethod
    def from_bytes(content: bytes) -> Fingerprint:
        """Decode what `to_bytes` returned.

        Raises:
            ValueError: the bytes are not a fingerprint, or are cut short.
        """
        if len(content) < _FIXED_BYTES:
            raise ValueError(f"{len(content)} bytes are too short for a fingerprint")
        width, height, count = np.frombuffer(content, "<u4", 3).tolist()
        thumb = np.frombuffer(content, np.uint8, _FIXED_BYTES - 12, 12).reshape(THUMB, THUMB, 3)
        end = _FIXED_BYTES + KEYPOINT_BYTES * count
        if not width or not height or len(content) < end:
            raise ValueError("the fingerprint is cut short")
        keypoints = Keypoints.from_bytes(content[_FIXED_BYTES:end])
        return Fingerprint(width, height, thumb, keypoints, Keypoints.from_bytes(content[end:]))


def fingerprint_image(image: Image.Image, *, keypoints: bool, mirrored: bool) -> Fingerprint:
    """Fingerprint an RGB or RGBA image as it is displayed, without its frame. Transparent parts count as white.

    Args:
        mirrored: describe the mirrored image as well (for evaluation images, whose mirrored copies must be found).
    """
    flat = flatten_on_white(image)
    small = flat.resize(canonical_size(*flat.size), Image.Resampling.BILINEAR)
    # the frame is found in the small image, and cut from the large one
    left, top, right, bottom = inner = find_inner(np.asarray(small))
    if inner != (0, 0, *small.size):
        x, y = flat.width / small.width, flat.height / small.height
        flat = flat.crop((round(left * x), round(top * y), round(right * x), round(bottom * y)))
        small = flat.resize(canonical_size(*flat.size), Image.Resampling.BILINEAR)
    thumb = np.asarray(small.resize((THUMB, THUMB), Image.Resampling.BILINEAR))
    gray = small.convert("L")
    keypoints_of_image = detect_keypoints(gray) if keypoints else Keypoints.empty()
    keypoints_of_mirrored = Keypoints.empty()
    if keypoints and mirrored:
        keypoints_of_mirrored = detect_keypoints(gray.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    return Fingerprint(flat.width, flat.height, thumb, keypoints_of_image, keypoints_of_mirrored)


def flatten_on_white(image: Image.Image) -> Image.Image:
    """Convert to RGB; transparent parts become white."""
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def find_inner(pixels_HWC: np.ndarray) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of an image without uniform borders at opposite sides."""
    height, width = pixels_HWC.shape[:2]
    # first borders above and below, then those at the sides of what remains
    top, bottom = _count_border_rows(pixels_HWC)
    left, right = _count_border_rows(pixels_HWC[top : height - bottom].transpose(1, 0, 2))
    if height - top - bottom < MIN_INNER * height or width - left - right < MIN_INNER * width:
        return 0, 0, width, height
    return left, top, width - right, height - bottom


def _count_border_rows(rows_HWC: np.ndarray) -> tuple[int, int]:
    """Count the rows of one shared color at the first and the last end; (0, 0) unless both ends have some."""
    if (_row_range(rows_HWC[[0, -1]]) > PLAIN).any():
        return 0, 0
    plain = _row_range(rows_HWC) <= PLAIN
    colors = np.median(rows_HWC[plain], axis=1)  # [plain rows, 3]; the first row is plain
    plain[plain] = np.abs(colors - colors[0]).max(axis=1) <= PLAIN
    if not plain[0] or not plain[-1] or plain.all():
        return 0, 0
    # one row more at either end: there the border blends into the image
    return int(np.argmin(plain)) + 1, int(np.argmin(plain[::-1])) + 1


def _row_range(rows_HWC: np.ndarray) -> np.ndarray:
    """Return the range of values in each row, in its widest channel [H]."""
    return (rows_HWC.max(axis=1).astype(int) - rows_HWC.min(axis=1)).max(axis=1)
