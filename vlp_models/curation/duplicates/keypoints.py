"""What of a picture is found again in a changed copy: oriented corners, and a binary description of each.

ORB (Rublee et al., 2011), by OpenCV: corners on a pyramid of scales, so that scaling, turning, cropping, borders and
text move or cost some of them and leave the others. Mirroring changes the descriptions, so whoever must see through it
describes the mirrored picture as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from vlp_models.errors import ParamsError

SIDE = 224  # pixels of the longer side of what is described: copies of any size are compared at about one scale
MOST = 120  # keypoints of a picture
CELLS = 4  # by CELLS fields, each of which gives its strongest first: a busy corner must not take them all
FOUND = 1000  # looked at for them: text laid over has many strong ones, and must not hide the picture's
THRESHOLD = 10  # grey levels by which a corner must stand out: low, so that smooth pictures have some as well
EDGE = 10  # pixels at the rim without corners
BYTES = 32  # of a description
KEYPOINT_BYTES = BYTES + 4
_UNIT = 64.0  # positions are stored in 1/64 pixels


@dataclass(frozen=True, eq=False)
class Keypoints:
    """K corners of a picture whose longer side is `SIDE` pixels.

    points_K2: uint16, x and y in 1/64 pixels. descriptors_KB: uint8, 32 bytes each.
    """

    points_K2: np.ndarray
    descriptors_KB: np.ndarray

    @staticmethod
    def none() -> Keypoints:
        return Keypoints(np.zeros((0, 2), np.uint16), np.zeros((0, BYTES), np.uint8))

    def __len__(self) -> int:
        return len(self.points_K2)

    @property
    def places_K2(self) -> np.ndarray:
        """float32, pixels."""
        return self.points_K2.astype(np.float32) / _UNIT

    def to_bytes(self) -> bytes:
        return self.points_K2.astype("<u2").tobytes() + self.descriptors_KB.tobytes()

    @staticmethod
    def from_bytes(content: bytes) -> Keypoints:
        """
        Raises:
            ValueError: no whole number of keypoints.
        """
        count, rest = divmod(len(content), KEYPOINT_BYTES)
        if rest:
            raise ValueError(f"{len(content)} bytes are no whole number of keypoints")
        points = np.frombuffer(content, "<u2", 2 * count).reshape(count, 2)
        return Keypoints(points, np.frombuffer(content, np.uint8, offset=4 * count).reshape(count, BYTES))


def describe(image: Image.Image) -> Keypoints:
    """The keypoints of a grey picture of its canonical size, in an order of their own."""
    cv2, grey = opencv(), np.asarray(image)
    orb = cv2.ORB_create(nfeatures=FOUND, scaleFactor=1.25, nlevels=5, edgeThreshold=EDGE, fastThreshold=THRESHOLD)
    found = orb.detect(grey, None)
    if not found:
        return Keypoints.none()
    places = np.array([point.pt for point in found], np.float32)
    strength = np.array([point.response for point in found])
    chosen, descriptors = orb.compute(grey, [found[i] for i in _spread(places, strength, grey.shape[1], grey.shape[0])])
    if descriptors is None:
        return Keypoints.none()
    points = np.rint(np.array([point.pt for point in chosen], np.float32) * _UNIT).astype(np.uint16)
    return Keypoints(points, np.ascontiguousarray(descriptors))


def canonical_size(width: int, height: int) -> tuple[int, int]:
    """Width and height with the longer side at `SIDE`."""
    scale = SIDE / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _spread(places: np.ndarray, strength: np.ndarray, width: int, height: int) -> np.ndarray:
    """Which `MOST` to keep: in turns the strongest of each field that is left."""
    column, row = (places * CELLS / (width, height)).astype(int).T
    field = row * CELLS + column
    order = np.lexsort((places[:, 0], places[:, 1], -strength, field))
    turn = np.arange(len(order)) - np.searchsorted(field[order], field[order])  # the how manieth of its field
    return order[np.lexsort((-strength[order], turn))[:MOST]]


@lru_cache
def opencv() -> Any:
    """
    Raises:
        ParamsError: it is not installed.
    """
    try:
        import cv2
    except ImportError:
        raise ParamsError(
            "validate.near_duplicates.keypoints needs OpenCV, which is not installed: `pip install "
            "opencv-python-headless`, or set it to false: hashes alone miss what docs/new-data.md says"
        ) from None
    cv2.setNumThreads(1)  # pictures are looked at beside each other already
    return cv2
