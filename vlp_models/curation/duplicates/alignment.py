"""Whether two pictures are one once they are laid on each other: where they meet, they must look the same.

Keypoints or hashes only propose how; a proposal counts if what both show has the same light and dark, and no other
colours, once brightness, contrast and colour are evened out. Text and other things laid over may hide a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlp_models.curation.duplicates.keypoints import Keypoints, canonical_size, opencv
from vlp_models.curation.duplicates.prints import THUMB, Print
from vlp_models.curation.duplicates.votes import NEAR

REACH = 4.0  # pixels of the 224 that the longer side has by which a corner may be off
INLIERS = 12  # keypoints that must agree on one movement
SURE = 24  # of them where something is laid over: drawings share a thing or two, and differ in the rest
SCALES = (0.4, 2.5)  # one picture's size in the other
WHOLE = 0.8  # of one of the pictures must be in the other,
PART = 0.35  # and of the other at least this much
CORRELATION = 0.96  # of light and dark where they meet, without the part that agrees least
COLOURS = 0.6  # of the colours, where both have some
COLOURED = 6.0  # grey levels of colour below which a picture has none
HIDDEN = 0.3  # of the common part that may be hidden, where keypoints propose
APART = 45.0  # grey levels, from which on a pixel shows something else
OVERLAID = 0.25  # of the common part: what something laid over it spans at most. Drawings of one kind differ all over
RIM = 2  # pixels of the small copies not looked at for it: a turned picture has corners of another colour
STRAYS = 8  # pixels of the small copies that may differ anywhere


@dataclass(frozen=True)
class Agreement:
    """inliers: keypoints that agree; 0 where a hash proposed. correlation: of light and dark, 1 at most."""

    inliers: int
    correlation: float


def by_keypoints(held: Print, mirror: bool, other: Print) -> Agreement | None:
    """Whether `other` is `held`, or its mirrored picture, moved, turned, scaled or cropped."""
    ours = held.mirror if mirror else held.keypoints
    movement, inliers = _movement(other.keypoints, ours)
    if (
        movement is None
        or inliers < INLIERS
        or not SCALES[0] <= np.sqrt(abs(np.linalg.det(movement[:, :2]))) <= SCALES[1]
    ):
        return None
    own = np.array(canonical_size(held.width, held.height)) / THUMB
    its = np.array(canonical_size(other.width, other.height)) / THUMB
    # thumb pixels of the other -> canonical pixels -> the held one's -> its thumb pixels; centres lie at + 0.5
    linear = movement[:, :2] * its / own[:, None]
    shift = (movement[:, :2] @ (its / 2) + movement[:, 2]) / own - 0.5
    return _look(held.thumb_HWC[:, ::-1] if mirror else held.thumb_HWC, other.thumb_HWC, linear, shift, inliers, HIDDEN)


def by_turn(held: Print, turn: int, other: Print) -> Agreement | None:
    """Whether `other` is `held` in one of the 8 ways to lay it down."""
    return _look(held.turned(turn), other.thumb_HWC, np.eye(2), np.zeros(2), 0, 0.0)


def _movement(source: Keypoints, target: Keypoints) -> tuple[np.ndarray | None, int]:
    """The similarity that most keypoints agree on, as [2, 3], and how many do."""
    if min(len(source), len(target)) < INLIERS:
        return None, 0
    distance = _distances(source.descriptors_KB, target.descriptors_KB)
    rows = np.arange(len(source))
    nearest = distance.argmin(axis=1)
    near = distance[rows, nearest] <= NEAR
    if near.sum() < INLIERS:
        return None, 0
    mutual = near & (distance.argmin(axis=0)[nearest] == rows)
    if mutual.sum() < INLIERS:
        return None, 0
    movement, inliers = opencv().estimateAffinePartial2D(
        source.places_K2[mutual],
        target.places_K2[nearest[mutual]],
        method=opencv().RANSAC,
        ransacReprojThreshold=REACH,
        maxIters=500,
        confidence=0.99,
    )
    return (None, 0) if movement is None else (movement, int(inliers.sum()))


def _distances(a_KB: np.ndarray, b_LB: np.ndarray) -> np.ndarray:
    """uint16 [K, L]: bits of 256 that differ. Word by word: numpy adds up short last axes slowly."""
    a_4K1, b_41L = a_KB.view(np.uint64).T[:, :, None], b_LB.view(np.uint64).T[:, None, :]
    one, two, three, four = np.bitwise_count(np.ascontiguousarray(a_4K1) ^ np.ascontiguousarray(b_41L))
    return np.add(one + two + three, four, dtype=np.uint16)


def _look(
    held: np.ndarray, other: np.ndarray, linear: np.ndarray, shift: np.ndarray, inliers: int, hidden: float
) -> Agreement | None:
    cv2 = opencv()
    movement = np.column_stack([linear, shift])
    size = (THUMB, THUMB)
    moved = cv2.warpAffine(other, movement, size, flags=cv2.INTER_LINEAR)
    there = cv2.warpAffine(np.full((THUMB, THUMB), 255, np.uint8), movement, size, flags=cv2.INTER_LINEAR) >= 250
    of_held = there.mean()
    of_other = min(1.0, of_held / max(abs(np.linalg.det(linear)), 1e-6))
    if max(of_held, of_other) < WHOLE or min(of_held, of_other) < PART:
        return None
    x, y = held[there].astype(np.float32), moved[there].astype(np.float32)
    grey_x, grey_y = x @ _LIGHT, y @ _LIGHT
    light, kept, wrong = _trimmed_correlation(grey_x, grey_y, hidden)
    if light < CORRELATION or not _same_colours(x[kept], y[kept]):
        return None
    if inliers < SURE and hidden and _trimmed_correlation(grey_x, grey_y, 0.0)[0] < CORRELATION:
        return None
    apart = np.zeros((THUMB, THUMB), bool)
    apart[there] = wrong > APART
    apart[:RIM] = apart[-RIM:] = apart[:, :RIM] = apart[:, -RIM:] = False
    if _spread(apart) > OVERLAID * there.sum():
        return None
    return Agreement(inliers, round(light, 3))


_LIGHT = np.array([0.299, 0.587, 0.114], np.float32)


def _trimmed_correlation(x: np.ndarray, y: np.ndarray, hidden: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Of two lists of grey levels, without the `hidden` share that fits the line through the others worst; which were
    kept; and how many grey levels each is off that line."""
    kept = np.ones(len(x), bool)
    last = int(np.float32(len(x) - 1) * np.float32(1 - hidden))  # the place of the worst that is kept
    for _ in range(3 if hidden else 1):
        middle_x, middle_y = x[kept].mean(), y[kept].mean()
        a, b = x[kept] - middle_x, y[kept] - middle_y
        slope = (a @ b) / max(a @ a, 1e-6)
        wrong = np.abs(y - middle_y - slope * (x - middle_x))
        kept = wrong <= np.partition(wrong, last)[last]
    a, b = x[kept] - x[kept].mean(), y[kept] - y[kept].mean()
    return float((a @ b) / max(np.sqrt((a @ a) * (b @ b)), 1e-6)), kept, wrong


def _spread(apart_HW: np.ndarray) -> int:
    """Pixels of the rectangle around those that are apart, but for a few strays at either end."""
    rows, columns = np.nonzero(apart_HW)
    if len(rows) <= STRAYS:
        return 0
    ends = (100 * STRAYS / len(rows) / 4, 100 - 100 * STRAYS / len(rows) / 4)
    (top, bottom), (left, right) = np.percentile(rows, ends), np.percentile(columns, ends)
    return int((bottom - top + 1) * (right - left + 1))


def _same_colours(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether hues go together, one shift of all colours allowed. A grey copy has none to compare."""
    colours = []
    for pixels in (x, y):
        light = pixels @ _LIGHT
        plane = np.stack([pixels[:, 0] - light, pixels[:, 2] - light], axis=1)
        colours.append(plane - plane.mean(axis=0))
    a, b = colours
    if min(np.sqrt((a**2).mean()), np.sqrt((b**2).mean())) < COLOURED:
        return True
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum())) >= COLOURS
