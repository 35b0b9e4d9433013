"""Verify a proposed copy: warp one thumbnail onto the other and compare them where they overlap.

Keypoints or hashes only propose how two images overlap. The pair counts as copies if the overlap agrees in luminance
and hue after normalizing brightness, contrast and color cast. Overlaid text may hide a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlp_models.curation.duplicates.fingerprints import THUMB, Fingerprint, Keypoints, canonical_size, opencv

SAME_CORNER = 64  # bits of 256: largest Hamming distance at which two descriptors match
REPROJECTION = 4.0  # pixels of the canonical size by which a corner may be off
MIN_INLIERS = 12  # keypoints that must agree on one transform
SURE_INLIERS = 24  # required where something is overlaid: drawings share a few corners and differ in the rest
SCALES = (0.4, 2.5)  # size of one image in the other
MIN_LARGER_COVERAGE = 0.8  # share of at least one image that must be in the overlap
MIN_SMALLER_COVERAGE = 0.35  # share of the other image that must be in the overlap
MIN_CORRELATION = 0.96  # of gray levels where they overlap, without the part that agrees least
MIN_COLOR_CORRELATION = 0.6  # of colors, where both images have some
COLORFUL = 6.0  # gray levels of color (root mean square) below which an image counts as gray
MAX_HIDDEN = 0.3  # share of the overlap that may be hidden, where keypoints propose
DIFFERENT = 45.0  # gray levels: residual above which a pixel counts as different
MAX_OVERLAID = 0.25  # share of the overlap that overlaid text may span; different drawings differ all over
RIM = 2  # width of the ignored border, in thumbnail pixels: the corners of a rotated image have another color
STRAYS = 8  # thumbnail pixels that may differ anywhere

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True)
class Agreement:
    """How well two images agree.

    inliers      keypoints that agree on one transform; 0 where a hash proposed the pair
    correlation  of gray levels, at most 1
    """

    inliers: int
    correlation: float


def align_by_keypoints(indexed: Fingerprint, mirrored: bool, query: Fingerprint) -> Agreement | None:
    """Return the agreement if `query` is `indexed` (or its mirror image) shifted, rotated, scaled or cropped."""
    target = indexed.mirrored if mirrored else indexed.keypoints
    transform, inliers = _estimate_transform(query.keypoints, target)
    if transform is None or inliers < MIN_INLIERS:
        return None
    # the square root of the determinant is the scale
    if not SCALES[0] <= np.sqrt(abs(np.linalg.det(transform[:, :2]))) <= SCALES[1]:
        return None
    indexed_scale = np.array(canonical_size(indexed.width, indexed.height)) / THUMB
    query_scale = np.array(canonical_size(query.width, query.height)) / THUMB
    # thumb pixels of the query -> its canonical pixels -> those of the indexed image -> its thumb pixels;
    # pixel centers are at + 0.5
    linear = transform[:, :2] * query_scale / indexed_scale[:, None]
    shift = (transform[:, :2] @ (query_scale / 2) + transform[:, 2]) / indexed_scale - 0.5
    thumb = indexed.thumb_HWC[:, ::-1] if mirrored else indexed.thumb_HWC
    return _compare(thumb, query.thumb_HWC, linear, shift, inliers, MAX_HIDDEN)


def align_by_orientation(indexed: Fingerprint, orientation: int, query: Fingerprint) -> Agreement | None:
    """Return the agreement if `query` is `indexed` in one of its 8 orientations."""
    return _compare(indexed.oriented(orientation), query.thumb_HWC, np.eye(2), np.zeros(2), 0, 0.0)


def _estimate_transform(source: Keypoints, target: Keypoints) -> tuple[np.ndarray | None, int]:
    """Return the similarity transform [2, 3] that most keypoints agree on, and how many do."""
    if min(len(source), len(target)) < MIN_INLIERS:
        return None, 0
    # [source keypoints, target keypoints]; the nearest target of each
    distance = _hamming_distances(source.descriptors_KB, target.descriptors_KB)
    rows = np.arange(len(source))
    nearest = distance.argmin(axis=1)
    near = distance[rows, nearest] <= SAME_CORNER
    if near.sum() < MIN_INLIERS:
        return None, 0
    # pairs of corners that are each other's nearest
    # A corner in a repeated pattern has many near ones: mutual pairs leave out most of them.
    mutual = near & (distance.argmin(axis=0)[nearest] == rows)
    if mutual.sum() < MIN_INLIERS:
        return None, 0
    transform, inliers = opencv().estimateAffinePartial2D(
        source.positions_K2[mutual],
        target.positions_K2[nearest[mutual]],
        method=opencv().RANSAC,
        ransacReprojThreshold=REPROJECTION,
        maxIters=500,
        confidence=0.99,
    )
    return (None, 0) if transform is None else (transform, int(inliers.sum()))


def _hamming_distances(a_KB: np.ndarray, b_LB: np.ndarray) -> np.ndarray:
    """Return differing bits of 256, uint16 [K, L]. Word by word: numpy sums short last axes slowly."""
    # (K, 32) bytes -> (4, K, 1) and (4, 1, L) words of 64 bits, which broadcast to (4, K, L).
    a_4K1, b_41L = a_KB.view(np.uint64).T[:, :, None], b_LB.view(np.uint64).T[:, None, :]
    bits_4KL = np.bitwise_count(np.ascontiguousarray(a_4K1) ^ np.ascontiguousarray(b_41L))
    # the sum of three words, at most 192, fits into uint8
    return np.add(bits_4KL[0] + bits_4KL[1] + bits_4KL[2], bits_4KL[3], dtype=np.uint16)


def _compare(
    indexed: np.ndarray, query: np.ndarray, linear: np.ndarray, shift: np.ndarray, inliers: int, hidden: float
) -> Agreement | None:
    """Warp the query's thumbnail onto the indexed one's and compare them where they overlap.

    Args:
        linear, shift: the transform from query to indexed thumbnail pixels, [2, 2] and [2].
        hidden: share of the overlap that may disagree.
    """
    cv2 = opencv()
    transform, size = np.column_stack([linear, shift]), (THUMB, THUMB)
    warped = cv2.warpAffine(query, transform, size, flags=cv2.INTER_LINEAR)
    overlap = cv2.warpAffine(np.full(size, 255, np.uint8), transform, size, flags=cv2.INTER_LINEAR) >= 250
    # how much of each image is in the overlap
    of_indexed = overlap.mean()
    # The overlap's area in pixels of the query: divided by the factor by which the transform changes areas.
    of_query = min(1.0, of_indexed / max(abs(np.linalg.det(linear)), 1e-6))
    if max(of_indexed, of_query) < MIN_LARGER_COVERAGE or min(of_indexed, of_query) < MIN_SMALLER_COVERAGE:
        return None
    x, y = indexed[overlap].astype(np.float32), warped[overlap].astype(np.float32)
    # N pixels of the overlap
    gray_x, gray_y = x @ _LUMA, y @ _LUMA
    correlation, used, residual = _trimmed_correlation(gray_x, gray_y, hidden)
    if correlation < MIN_CORRELATION or not _colors_agree(x[used], y[used]):
        return None
    # few inliers: the images must agree without leaving anything out
    if inliers < SURE_INLIERS and hidden and _trimmed_correlation(gray_x, gray_y, 0.0)[0] < MIN_CORRELATION:
        return None
    # overlaid text is in one place; where drawings differ, pixels all over the overlap do
    different = np.zeros(size, bool)
    different[overlap] = residual > DIFFERENT
    different[:RIM] = different[-RIM:] = different[:, :RIM] = different[:, -RIM:] = False
    if _bounding_area(different) > MAX_OVERLAID * overlap.sum():
        return None
    return Agreement(inliers, round(correlation, 3))


def _trimmed_correlation(x: np.ndarray, y: np.ndarray, hidden: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Correlate two lists of gray levels without the `hidden` share that fits a common line worst.

    Returns:
        The correlation, the mask of the pixels that are used, and each residual in gray levels.
    """
    used = np.ones(len(x), bool)
    last = int(np.float32(len(x) - 1) * np.float32(1 - hidden))  # position of the worst residual that is kept
    # fit a line y = slope * x + shift, and again without the pixels that fit it worst
    for _ in range(3 if hidden else 1):
        mean_x, mean_y = x[used].mean(), y[used].mean()
        a, b = x[used] - mean_x, y[used] - mean_y
        slope = (a @ b) / max(a @ a, 1e-6)
        residual = np.abs(y - mean_y - slope * (x - mean_x))
        used = residual <= np.partition(residual, last)[last]
    a, b = x[used] - x[used].mean(), y[used] - y[used].mean()
    return float((a @ b) / max(np.sqrt((a @ a) * (b @ b)), 1e-6)), used, residual


def _bounding_area(different_HW: np.ndarray) -> int:
    """Return the pixels of the rectangle around those that differ, ignoring a few strays at either end."""
    rows, columns = np.nonzero(different_HW)
    if len(rows) <= STRAYS:
        return 0
    # percentiles that leave out STRAYS pixels, a quarter at each of the four ends
    ends = (100 * STRAYS / len(rows) / 4, 100 - 100 * STRAYS / len(rows) / 4)
    (top, bottom), (left, right) = np.percentile(rows, ends), np.percentile(columns, ends)
    return int((bottom - top + 1) * (right - left + 1))


def _colors_agree(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether hues correlate, up to one shift of all colors. A gray copy has no hues to compare."""
    planes = []
    for pixels in (x, y):
        # hue: red and blue without the luminance, [N, 2]
        light = pixels @ _LUMA
        plane = np.stack([pixels[:, 0] - light, pixels[:, 2] - light], axis=1)
        planes.append(plane - plane.mean(axis=0))
    a, b = planes
    if min(np.sqrt((a**2).mean()), np.sqrt((b**2).mean())) < COLORFUL:
        return True
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum())) >= MIN_COLOR_CORRELATION
