"""A picture's print: all that must be kept of it to know it again, about 7 kB, 12 of what is tested on.

A frame, or bars at two opposite sides, of one colour are no part of a picture: they are cut off first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from vlp_models.curation.duplicates.keypoints import KEYPOINT_BYTES, Keypoints, canonical_size, describe
from vlp_models.curation.duplicates.perceptual import grey_of, hash_of_grey

THUMB = 32  # pixels of the small copy along each side, whatever the picture's shape
TURNS = 8  # ways to lay a square on itself: four quarter turns, each as it is and mirrored
PLAIN = 10  # grey levels by which the pixels of a bar may differ, and the bars of opposite sides
LEAST = 0.4  # of each side that must be left of a picture without its frame
_FIXED = 12 + THUMB * THUMB * 3


@dataclass(frozen=True, eq=False)
class Print:
    """
    width, height: of the picture without its frame, in pixels.
    thumb_HWC: uint8 [32, 32, 3].
    keypoints: of the picture; none where keypoints are switched off.
    mirror: of the mirrored picture; none unless it is to be tested on.
    """

    width: int
    height: int
    thumb_HWC: np.ndarray
    keypoints: Keypoints
    mirror: Keypoints

    @cached_property
    def perceptual(self) -> int | None:
        """The perceptual hash of the small copy; None for a picture without structure."""
        return hash_of_grey(grey_of(self.thumb_HWC))

    def turned(self, turn: int) -> np.ndarray:
        """The small copy in one of the 8 ways to lay it down: `turn % 4` quarter turns, after a mirroring from 4 on."""
        return np.rot90(self.thumb_HWC[:, ::-1] if turn >= TURNS // 2 else self.thumb_HWC, turn % 4)

    def to_bytes(self) -> bytes:
        header = np.array([self.width, self.height, len(self.keypoints)], "<u4").tobytes()
        return header + self.thumb_HWC.tobytes() + self.keypoints.to_bytes() + self.mirror.to_bytes()

    @staticmethod
    def from_bytes(content: bytes) -> Print:
        """
        Raises:
            ValueError: not a print's bytes.
        """
        if len(content) < _FIXED:
            raise ValueError(f"{len(content)} bytes are no print")
        width, height, count = np.frombuffer(content, "<u4", 3).tolist()
        thumb = np.frombuffer(content, np.uint8, _FIXED - 12, 12).reshape(THUMB, THUMB, 3)
        middle = _FIXED + KEYPOINT_BYTES * count
        if not width or not height or len(content) < middle:
            raise ValueError("a print that is cut short")
        own, mirror = content[_FIXED:middle], content[middle:]
        return Print(width, height, thumb, Keypoints.from_bytes(own), Keypoints.from_bytes(mirror))


def take_print(image: Image.Image, *, keypoints: bool, mirror: bool) -> Print:
    """Of a picture as it is to be seen, RGB or RGBA. Transparent parts count as white.

    Args:
        mirror: it is to be tested on, so that its mirrored copies must be known as well.
    """
    flat = on_white(image)
    small = flat.resize(canonical_size(*flat.size), Image.Resampling.BILINEAR)
    left, top, right, bottom = inner = without_frame(np.asarray(small))
    if inner != (0, 0, *small.size):
        x, y = flat.width / small.width, flat.height / small.height
        flat = flat.crop((round(left * x), round(top * y), round(right * x), round(bottom * y)))
        small = flat.resize(canonical_size(*flat.size), Image.Resampling.BILINEAR)
    thumb = np.asarray(small.resize((THUMB, THUMB), Image.Resampling.BILINEAR))
    grey = small.convert("L")
    own = describe(grey) if keypoints else Keypoints.none()
    other = describe(grey.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) if keypoints and mirror else Keypoints.none()
    return Print(flat.width, flat.height, thumb, own, other)


def on_white(image: Image.Image) -> Image.Image:
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def without_frame(pixels_HWC: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what is left of a picture without bars at opposite sides."""
    height, width = pixels_HWC.shape[:2]
    top, bottom = _bars(pixels_HWC)
    left, right = _bars(pixels_HWC[top : height - bottom].transpose(1, 0, 2))
    if height - top - bottom < LEAST * height or width - left - right < LEAST * width:
        return 0, 0, width, height
    return left, top, width - right, height - bottom


def _bars(rows_HWC: np.ndarray) -> tuple[int, int]:
    """How many rows at either end are of one colour, the same at both; none unless both ends have some."""
    if (_spread(rows_HWC[[0, -1]]) > PLAIN).any():
        return 0, 0
    same = _spread(rows_HWC) <= PLAIN
    colours = np.median(rows_HWC[same], axis=1)  # [plain rows, 3], of which the first row is one
    same[same] = np.abs(colours - colours[0]).max(axis=1) <= PLAIN
    if not same[0] or not same[-1] or same.all():
        return 0, 0
    return int(np.argmin(same)) + 1, int(np.argmin(same[::-1])) + 1  # and the row where they blend into the picture


def _spread(rows_HWC: np.ndarray) -> np.ndarray:
    """[H]: how far the values of each row lie apart, in the channel where they do most."""
    return (rows_HWC.max(axis=1).astype(int) - rows_HWC.min(axis=1)).max(axis=1)
