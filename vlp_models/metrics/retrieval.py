"""Image-caption retrieval: recall at K and the median rank.

Ranks start at 1. Ties count against the model: anything as similar as the right item ranks before it, so a model that
scores every pair equally comes last. Image to text, the best-ranked of an image's captions counts, as in Karpathy and
Fei-Fei (2015) and in SCAN's evaluation.

Shape suffixes: I images, T captions, D embedding, K top ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, lgamma

import numpy as np
from numpy.typing import NDArray

from vlp_models.errors import DataError
from vlp_models.metrics.score import Evidence, FloatArray, Score, mean_score, not_computed

Ints = NDArray[np.int64]
TOP_KS = (1, 5, 10)
MAX_CHANCE = 50.0  # percent; R@k is not computed where chance is higher
TEXT_TO_IMAGE, IMAGE_TO_TEXT = "", " (image to text)"  # suffixes of metric names; the papers report the first
_EXACT_RANKS = 256  # up to here a resampled median is exact, above accurate to about 6%


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """A gallery of images, the captions that search it, and the ranks.

    image_ids        [I], each id once
    similarity_TI    float32
    text_ranks_T     of each caption's image among the images
    caption_ranks_T  of each caption, for its image, among itself and all captions of other images
    image_ranks_I    of each image's best-ranked caption, the lowest of its `caption_ranks_T`; 0 without captions
    """

    image_ids: tuple[str, ...]
    similarity_TI: NDArray[np.float32]
    text_ranks_T: Ints
    caption_ranks_T: Ints
    image_ranks_I: Ints


def rank(
    image_ids: Sequence[str],
    image_embeddings_ID: NDArray[np.float32],
    owners: Sequence[str],
    text_embeddings_TD: NDArray[np.float32],
) -> Ranking:
    """Rank by the cosine of embeddings.

    Args:
        image_ids: the gallery; a repeated id counts once, with its first embedding.
        owners: the image that each caption describes.

    Raises:
        DataError: no image or no caption, a caption of an image outside the gallery, or a non-finite similarity.
    """
    first: dict[str, int] = {}
    for position, image_id in enumerate(image_ids):
        first.setdefault(image_id, position)
    # Without repeated ids, indexing would only copy the embeddings.
    gallery_ID = image_embeddings_ID if len(first) == len(image_ids) else image_embeddings_ID[list(first.values())]
    return rank_similarities(tuple(first), text_embeddings_TD @ gallery_ID.T, owners)


def rank_similarities(image_ids: Sequence[str], similarity_TI: NDArray[np.float32], owners: Sequence[str]) -> Ranking:
    """Rank by given similarities.

    Args:
        image_ids: [I], each id once.
        owners: [T], the image that each caption describes.
    """
    column = {image_id: number for number, image_id in enumerate(image_ids)}
    if not column or not len(owners):
        raise DataError(f"retrieval needs images and captions; found {len(column)} and {len(owners)}")
    lost = [owner for owner in owners if owner not in column]
    if lost:
        raise DataError(f"{len(lost)} captions describe images that are not in the gallery, such as {lost[0]}")
    own_T = np.array([column[owner] for owner in owners])
    if not np.isfinite(similarity_TI).all():
        raise DataError("a similarity of caption and image is not finite; did training diverge?")
    # (T,): the similarity of each caption to the image that it describes
    own_score_T = similarity_TI[np.arange(len(own_T)), own_T]
    caption_ranks_T = _rank_captions(similarity_TI, own_T)
    # The lowest rank of an image's captions; an image without captions keeps the number that no rank has.
    image_ranks_I = np.full(len(column), len(own_T) + 1)
    np.minimum.at(image_ranks_I, own_T, caption_ranks_T)
    return Ranking(
        image_ids=tuple(image_ids),
        similarity_TI=similarity_TI,
        text_ranks_T=np.count_nonzero(similarity_TI >= own_score_T[:, None], axis=1),
        caption_ranks_T=caption_ranks_T,
        image_ranks_I=np.where(image_ranks_I > len(own_T), 0, image_ranks_I),
    )


def _rank_captions(similarity_TI: NDArray[np.float32], own_T: Ints) -> Ints:
    """Rank each caption for its image. The image's other captions are right answers: they do not push it down."""
    ranks_T = np.zeros(len(own_T), np.int64)
    # Rows in the order of their images: `bounds[i]` to `bounds[i + 1]` are the captions of image i.
    by_image_T = np.argsort(own_T, kind="stable")
    bounds = np.searchsorted(own_T[by_image_T], np.arange(similarity_TI.shape[1] + 1))
    for image, (start, end) in enumerate(pairwise(bounds.tolist())):
        scores_T = np.ascontiguousarray(similarity_TI[:, image])  # counting along a column is five times slower
        rows = by_image_T[start:end]
        own_scores = scores_T[rows]
        for row, score in zip(rows, own_scores, strict=True):
            # All that are at least as similar, without the image's own captions among them.
            before = np.count_nonzero(scores_T >= score) - np.count_nonzero(own_scores >= score)
            ranks_T[row] = 1 + before
    return ranks_T


def rank_in_folds(ranking: Ranking, owners: Sequence[str], fold: int) -> Ranking | None:
    """Rank within folds of `fold` images and their captions; None unless the gallery is two or more full folds.

    With 1,000, this is COCO's 1k protocol (Karpathy and Fei-Fei 2015), whose scores are means over the folds of 5,000
    images. Folds are consecutive in the gallery, which is ordered by id here and as in the file there, so they contain
    other images.
    """
    images, own_T = len(ranking.image_ids), np.asarray(owners)
    if not fold or images % fold or images < 2 * fold:
        return None
    text_ranks_T, image_ranks_I = np.zeros_like(ranking.text_ranks_T), np.zeros_like(ranking.image_ranks_I)
    for start in range(0, images, fold):
        part = slice(start, start + fold)
        ids = ranking.image_ids[part]
        # A fold is a gallery of its own: images and captions outside of it are not candidates.
        rows = np.flatnonzero(np.isin(own_T, ids))
        if len(rows):
            inside = rank_similarities(ids, ranking.similarity_TI[rows, part], own_T[rows].tolist())
            text_ranks_T[rows], image_ranks_I[part] = inside.text_ranks_T, inside.image_ranks_I
    return replace(ranking, text_ranks_T=text_ranks_T, image_ranks_I=image_ranks_I)


def fold_direction(direction: str, fold: int) -> str:
    """Return the metric suffix of `rank_in_folds`: ` (of 1,000)` or ` (of 1,000, image to text)`."""
    suffix = f", {direction.strip(' ()')}" if direction else ""
    return f" (of {fold:,}{suffix})"


def top_columns(similarity_QN: NDArray[np.float32], count: int) -> Ints:
    """Return the most similar columns of each row, best first, the earlier among equals. [Q, min(count, N)]"""
    count = min(count, similarity_QN.shape[1])
    # The best `count` in any order, then sorted: faster than sorting whole rows of a large gallery.
    some = np.argpartition(-similarity_QN, count - 1, axis=1)[:, :count]
    # Ascending columns, so that the stable sort below keeps the earlier one of equals first.
    some.sort(axis=1)
    order = np.argsort(-np.take_along_axis(similarity_QN, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)


def score_ranks(
    ranks: Ints,
    groups: Sequence[str],
    candidates: int,
    direction: str = TEXT_TO_IMAGE,
    *,
    items: Sequence[str] = (),
) -> list[Score]:
    """Return R@1, R@5, R@10 (in percent) and the median rank of one direction.

    Args:
        ranks: of each query, from 1.
        groups: each query's image, the unit of resampling. Resampling draws queries; the gallery stays the same.
        candidates: the number of candidates.
        items: each query's id.
    """
    hits = {k: (ranks <= k).astype(np.float64) for k in TOP_KS}
    scores = [mean_score(f"R@{k}{direction}", values, groups, items=items) for k, values in hits.items()]
    return [*scores, _median_rank(ranks, groups, candidates, f"median rank{direction}")]


def chance(own_counts: Sequence[int], candidates: int, direction: str = TEXT_TO_IMAGE) -> dict[str, float]:
    """Return each metric by chance: the mean over queries with these numbers of right candidates."""
    values, numbers = np.unique(np.asarray(own_counts), return_counts=True)

    def recall_at(top: int) -> float:
        by_right = zip(numbers, values, strict=True)
        terms = [float(number) * _chance_of_top(top, int(right), candidates) for number, right in by_right]
        return sum(terms) / sum(numbers.tolist())

    # Recall grows with the rank, so its crossing of one half is found by bisection.
    low, high = 1, candidates  # the lowest rank by which half of the queries are answered
    while low < high:
        middle = (low + high) // 2
        if recall_at(middle) >= 0.5:
            high = middle
        else:
            low = middle + 1
    return {**{f"R@{k}{direction}": 100 * recall_at(k) for k in TOP_KS}, f"median rank{direction}": float(low)}


def _chance_of_top(top: int, right: int, candidates: int) -> float:
    """Return the probability that a right candidate is in the first `top`: 1 - C(N - right, top) / C(N, top)."""
    wrong = candidates - right
    if top > wrong:
        return 1.0
    # By logarithms of factorials, because binomials of a large gallery overflow.
    none = lgamma(wrong + 1) - lgamma(wrong - top + 1) - lgamma(candidates + 1) + lgamma(candidates - top + 1)
    return 1 - exp(none)


def _median_rank(ranks: Ints, groups: Sequence[str], candidates: int, metric: str) -> Score:
    """Return the median rank, rounded down between two ranks as in the public evaluations.

    The evidence is a histogram of ranks per group, from which the median of any resample is computed.
    """
    if not len(ranks):
        return not_computed(metric, 0, "nothing to score")
    # (groups, bins): a bin for each of the first ranks, then bins of growing width
    wide = np.geomspace(_EXACT_RANKS, max(candidates, _EXACT_RANKS) + 1, 64).astype(np.int64)
    edges = np.unique(np.concatenate([np.arange(1, _EXACT_RANKS + 1), wide]))
    names, group_Q = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    histogram = np.zeros((len(names), len(edges)))
    np.add.at(histogram, (group_Q, np.searchsorted(edges, ranks, side="right") - 1), 1.0)

    def medians(sums_SK: FloatArray) -> FloatArray:
        # The mean of the two middle ranks, which are one if the number of queries is odd.
        twice_SK, count_S1 = 2 * np.cumsum(sums_SK, axis=1), sums_SK.sum(axis=1, keepdims=True)
        # The argmax of booleans is the first true one: the bin that reaches half, or exceeds it.
        lower_S = edges[(twice_SK >= count_S1).argmax(axis=1)]
        upper_S = edges[(twice_SK > count_S1).argmax(axis=1)]
        return ((lower_S + upper_S) // 2).astype(np.float64)

    value = float(np.floor(np.median(ranks)))
    evidence = Evidence(groups=names.tolist(), parts_NK=histogram, statistic=medians)
    # Not kept: the statistic depends on the histogram's edges, not on the sums alone.
    return Score(metric=metric, value=value, n=len(ranks), evidence=evidence, kept=False)
