"""Retrieval ranks against a slow reference, ties, chance by enumeration, medians."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import interval, sum_by_group
from vlp_models.metrics.retrieval import (
    IMAGE_TO_TEXT,
    chance,
    fold_direction,
    rank,
    rank_in_folds,
    score_ranks,
    top_columns,
)

pytestmark = pytest.mark.usefixtures("few_items_suffice")


def slow_ranks(images: np.ndarray, owners: list[int], texts: np.ndarray) -> tuple[list[int], list[int]]:
    """Rank with one dot product at a time; ties count against the right item."""
    text_ranks = []
    for owner, text in zip(owners, texts, strict=True):
        own = float(np.dot(text, images[owner]))
        text_ranks.append(1 + sum(float(np.dot(text, x)) >= own for i, x in enumerate(images) if i != owner))
    image_ranks = []
    for i, image in enumerate(images):
        best = max(float(np.dot(t, image)) for t, o in zip(texts, owners, strict=True) if o == i)
        others = [float(np.dot(t, image)) for t, o in zip(texts, owners, strict=True) if o != i]
        image_ranks.append(1 + sum(score >= best for score in others))
    return text_ranks, image_ranks


@given(seed=st.integers(0, 999), count=st.integers(1, 7), coarse=st.booleans())
def test_ranks_equal_the_slow_reference(seed: int, count: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    owners = [*range(count), *rng.integers(0, count, size=8).tolist()]
    shape = (count + len(owners), 5)
    # integers: many ties, and sums that do not depend on the order of addition
    vectors = rng.integers(-1, 2, shape) if coarse else rng.integers(-1000, 1000, shape)
    images, texts = vectors[:count].astype(np.float32), vectors[count:].astype(np.float32)
    names = [f"i{i}" for i in range(count)]
    found = rank(names, images, [names[o] for o in owners], texts)
    text_ranks, image_ranks = slow_ranks(images, owners, texts)
    assert found.text_ranks_T.tolist() == text_ranks
    assert found.image_ranks_I.tolist() == image_ranks
    for t, owner in enumerate(owners):  # each caption, as if it were the only one of its image
        kept = [n for n, other in enumerate(owners) if other != owner or n == t]
        scores = [float(np.dot(texts[n], images[owner])) for n in kept]
        assert found.caption_ranks_T[t] == sum(score >= scores[kept.index(t)] for score in scores)

    # the same gallery with every image repeated
    repeated = rank([*names, *names], np.concatenate([images, images]), [names[o] for o in owners], texts)
    assert repeated.image_ids == tuple(names)
    assert repeated.text_ranks_T.tolist() == text_ranks and repeated.image_ranks_I.tolist() == image_ranks


def test_ranks_in_folds_equal_those_of_each_fold_alone() -> None:
    rng = np.random.default_rng(3)
    images, owners = rng.normal(size=(6, 4)).astype(np.float32), [0, 0, 1, 5, 3, 2, 4, 4, 1]
    texts = rng.normal(size=(len(owners), 4)).astype(np.float32)
    found = rank([f"i{i}" for i in range(6)], images, [f"i{o}" for o in owners], texts)
    folds = rank_in_folds(found, [f"i{o}" for o in owners], 2)
    assert folds is not None
    for first in (0, 2, 4):
        rows = [t for t, owner in enumerate(owners) if first <= owner < first + 2]
        wanted = slow_ranks(images[first : first + 2], [owners[t] - first for t in rows], texts[rows])
        assert folds.text_ranks_T[rows].tolist() == wanted[0]
        assert folds.image_ranks_I[first : first + 2].tolist() == wanted[1]
    assert folds.text_ranks_T.max() <= 2 and (folds.text_ranks_T <= found.text_ranks_T).all()
    for fold in (0, 4, 6, 1000):  # no folds, a remainder, or a single fold
        assert rank_in_folds(found, [f"i{o}" for o in owners], fold) is None
    assert fold_direction(IMAGE_TO_TEXT, 1000) == " (of 1,000, image to text)"


def test_constant_scorer_ranks_last() -> None:
    found = rank(["a", "b", "c"], np.ones((3, 2), np.float32), ["a", "b", "c"], np.ones((3, 2), np.float32))
    assert found.text_ranks_T.tolist() == found.image_ranks_I.tolist() == [3, 3, 3]


def test_top_columns_are_sorted_with_earlier_ones_first_among_equals() -> None:
    similarity = np.array([[1, 3, 2, 3, 0]], np.float32)
    assert top_columns(similarity, 4).tolist() == [[1, 3, 2, 0]]
    assert top_columns(similarity, 9).tolist() == [[1, 3, 2, 0, 4]]


def test_captionless_image_is_a_distractor_and_a_caption_without_image_an_error() -> None:
    images = np.eye(3, dtype=np.float32)
    found = rank(["a", "b", "c"], images, ["a", "c"], images[[1, 2]])
    assert found.text_ranks_T.tolist() == [3, 1] and found.image_ranks_I.tolist() == [2, 0, 1]
    with pytest.raises(DataError, match="1 captions describe images that are not in the gallery, such as d"):
        rank(["a"], images[:1], ["d"], images[:1])
    with pytest.raises(DataError, match="needs images and captions"):
        rank([], images[:0], [], images[:0])
    with pytest.raises(DataError, match="not finite"):
        rank(["a"], images[:1] * np.nan, ["a"], images[:1])


@pytest.mark.parametrize(("own", "candidates"), [([1], 6), ([2, 2, 1], 7), ([3], 12)])
def test_chance_equals_the_mean_over_all_orders(own: list[int], candidates: int) -> None:
    def best_ranks(right: int) -> list[int]:
        return [min(chosen) + 1 for chosen in itertools.combinations(range(candidates), right)]

    found = chance(own, candidates)
    for place in (1, 5, 10):
        expected = np.mean([np.mean([p <= place for p in best_ranks(right)]) for right in own])
        assert found[f"R@{place}"] == pytest.approx(100 * expected)
    reached = next(
        p for p in range(1, candidates + 1) if np.mean([np.mean([f <= p for f in best_ranks(r)]) for r in own]) >= 0.5
    )
    assert found["median rank"] == reached


@given(st.lists(st.lists(st.integers(1, 256), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_scores_of_any_resample_equal_those_of_its_ranks(images: list[list[int]], data: st.DataObject) -> None:
    """Median rank: `floor(median of ranks from 0) + 1`, as in the public evaluations."""
    ranks, groups = np.array([r for own in images for r in own]), [f"{i}" for i, own in enumerate(images) for _ in own]
    scores = score_ranks(ranks, groups, 1000)
    drawn = data.draw(st.lists(st.sampled_from(range(len(images))), min_size=1, max_size=8))
    for numbers in (list(range(len(images))), drawn):
        zero_based = np.array([r - 1 for number in numbers for r in images[number]])
        expected = [100 * np.mean(zero_based < k) for k in (1, 5, 10)] + [np.floor(np.median(zero_based)) + 1]
        for score, value in zip(scores, expected, strict=True):
            assert score.evidence is not None
            names, sums_GK = sum_by_group(score.evidence.groups, score.evidence.parts_NK)
            rows = [names.index(str(number)) for number in numbers]
            resampled = score.evidence.statistic(sums_GK[rows].sum(axis=0, keepdims=True))
            assert resampled[0] == pytest.approx(value, abs=1e-9)


def test_scores_and_their_intervals() -> None:
    ranks = np.array([1, 2, 4, 11, 700], dtype=np.int64)
    scores = {s.metric: s for s in score_ranks(ranks, ["a", "a", "b", "c", "d"], 1000, IMAGE_TO_TEXT)}
    values = {name: score.value for name, score in scores.items()}
    suffix = " (image to text)"
    assert values == {
        f"R@1{suffix}": pytest.approx(20),
        f"R@5{suffix}": pytest.approx(60),
        f"R@10{suffix}": pytest.approx(60),
        f"median rank{suffix}": 4,
    }
    median = scores[f"median rank{suffix}"]
    assert median.evidence is not None
    assert median.evidence.statistic(median.evidence.parts_NK.sum(0, keepdims=True)).tolist() == [4]
    found = interval(median.evidence, resamples=300, seed=1)
    assert found is not None and 1 <= found[0] <= 4 <= found[1] <= 700
    even = score_ranks(np.array([1, 4, 5, 9]), list("abcd"), 10)[-1]
    assert even.value == 4  # floor of 4.5
    assert score_ranks(np.array([], dtype=np.int64), [], 10)[-1].value is None
