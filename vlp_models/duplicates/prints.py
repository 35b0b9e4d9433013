"""A picture's print: all that must be kept of it to know it again, about 7 kB."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlp_models.duplicates.keypoints import KEYPOINT_BYTES, Keypoints, describe

THUMB = 32  # pixels of the small copy along each side, whatever the picture's shape
_FIXED = 12 + THUMB * THUMB * 3
TURNS = 8  # ways to lay a rectangle on itself: four quarter turns, each as it is and mirrored


@dataclass(frozen=True, eq=False)
class Print:
    """
    width, height: of the picture, in pixels.
    perceptual: hashes.perceptual_hash; None for a picture without structure.
    thumb_HWC: uint8 [32, 32, 3].
    keypoints: of the picture; none where keypoints are switched off.
    mirror: of the mirrored picture; none unless it is to be tested on.
    """

    width: int
    height: int
    perceptual: int | None
    thumb_HWC: np.ndarray
    keypoints: Keypoints
    mirror: Keypoints

    def to_bytes(self) -> bytes:
        """Without the perceptual hash, which lies in a column of its own wherever prints are kept."""
        header = np.array([self.width, self.height, len(self.keypoints)], "<u4").tobytes()
        return header + self.thumb_HWC.tobytes() + self.keypoints.to_bytes() + self.mirror.to_bytes()

    @staticmethod
    def from_bytes(content: bytes, perceptual: int | None) -> Print:
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
        return Print(width, height, perceptual, thumb, Keypoints.from_bytes(own), Keypoints.from_bytes(mirror))


def take_print(image: Image.Image, perceptual: int | None, *, keypoints: bool, mirror: bool) -> Print:
    """Of a picture as it is to be seen, RGB or RGBA. Transparent parts count as white.

    Args:
        mirror: it is to be tested on, so that its mirrored copies must be known as well.
    """
    flat = on_white(image)
    thumb = np.asarray(flat.resize((THUMB, THUMB), Image.Resampling.BILINEAR, reducing_gap=2.0))
    own = describe(flat) if keypoints else Keypoints.none()
    other = describe(flat.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) if keypoints and mirror else Keypoints.none()
    return Print(image.width, image.height, perceptual, thumb, own, other)


def on_white(image: Image.Image) -> Image.Image:
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def turned(array_HW: np.ndarray, turn: int) -> np.ndarray:
    """One of the 8 ways to lay a square copy on itself: `turn % 4` quarter turns, after a mirroring if turn >= 4."""
    return np.rot90(array_HW[:, ::-1] if turn >= 4 else array_HW, turn % 4)
