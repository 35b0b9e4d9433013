"""The order of photos, and what the learning curve reports."""

from __future__ import annotations

import re

import numpy as np
import pytest

from vlp_models.contrib.label.gain import MIN_LABELS, VersionScores, describe_gain, fit_labels, fit_versions
from vlp_models.contrib.label.queue import AHEAD, PhotoQueue
from vlp_models.contrib.label.similar import FloatArray, SimilarDrafts

GROUPS = 6


def make_features(count: int, groups: int = GROUPS, noise: float = 0.05) -> dict[str, FloatArray]:
    """Return unit vectors near `groups` directions, photo by photo."""
    rng = np.random.default_rng(0)
    vectors_NF = np.eye(groups, 24)[np.arange(count) % groups] + noise * rng.normal(size=(count, 24))
    vectors_NF /= np.linalg.norm(vectors_NF, axis=1, keepdims=True)
    return {f"{row:03}.jpg": vector_F.astype(np.float32) for row, vector_F in enumerate(vectors_NF)}


def group_of(photo: str) -> int:
    return int(photo[:3]) % GROUPS


def label_all(queue: PhotoQueue, photos: list[str], count: int, uncertain: dict[str, float] | None = None) -> list[str]:
    """Return the first `count` photos that come, each labeled at once."""
    order: list[str] = []
    for _ in range(count):
        photo = queue.next(set(photos) - set(order), order, lambda name: (uncertain or {}).get(name))
        assert photo is not None
        queue.cover(photo)
        order.append(photo)
    return order


def test_the_active_order_covers_every_group_before_it_repeats_one() -> None:
    features = make_features(120)
    photos = list(features)
    queue = PhotoQueue(photos, lambda photo: "train", "active")
    assert label_all(queue, photos, 3) == photos[:3], "by name until the features are known"
    queue.use_features(features, [])
    first = label_all(queue, photos, GROUPS)
    assert {group_of(photo) for photo in first} == set(range(GROUPS))
    # Photos that are labeled already count as covered.
    queue.use_features(features, photos[: GROUPS - 1])
    assert group_of(label_all(queue, photos[GROUPS:], 1)[0]) == GROUPS - 1


def test_of_the_farthest_photos_the_most_uncertain_draft_comes_first() -> None:
    features = make_features(60)
    photos = list(features)
    queue = PhotoQueue(photos, lambda photo: "train", "active")
    queue.use_features(features, photos[:2])
    ahead = queue.ahead(photos)
    assert len(ahead) == AHEAD
    uncertain = {photo: float(rank) for rank, photo in enumerate(ahead)} | {photos[0]: 99.0}
    assert queue.next(set(photos), photos[:2], uncertain.get) == ahead[-1]
    assert queue.next(set(photos), photos[:2], {ahead[3]: 0.1}.get) == ahead[3], "of those that have a draft"


def test_evaluation_photos_come_in_proportion_and_in_an_order_that_ignores_the_features() -> None:
    features = make_features(200)
    photos = list(features)
    held_out = set(photos[::5])  # one in five, of all groups
    queue = PhotoQueue(photos, lambda photo: "test" if photo in held_out else "train", "active")
    queue.use_features(features, [])
    order = label_all(queue, photos, 60)
    shares = [len(held_out & set(order[:count])) / count for count in (10, 20, 40, 60)]
    assert max(abs(share - 0.2) for share in shares) <= 0.1
    tested = [photo for photo in order if photo in held_out]
    assert tested == [photo for photo in PhotoQueue(photos, str, "random")._random if photo in held_out][: len(tested)]


def test_the_random_order_is_the_same_after_a_restart_and_another_by_seed() -> None:
    photos = [f"{number:03}.jpg" for number in range(50)]
    first, again = (label_all(PhotoQueue(photos, lambda photo: "train", "random"), photos, 50) for _ in range(2))
    assert first == again != photos and sorted(first) == photos
    assert label_all(PhotoQueue(photos, lambda photo: "train", "random", seed=1), photos, 50) != first
    assert label_all(PhotoQueue(photos, lambda photo: "train", "file"), photos, 50) == photos


def test_a_draft_is_the_caption_of_the_most_similar_photo_and_is_less_sure_where_captions_differ() -> None:
    features = make_features(30, groups=3)
    agreeing, differing = "a dog runs on grass", "{} red {} in town {}"
    captions = {
        photo: [agreeing if number % 3 == 0 else differing.format(number, number * 7, number * 13)]
        for number, photo in enumerate(features)
    }
    drafts = SimilarDrafts()
    assert drafts.draft(features["000.jpg"]).text == "", "nothing is labeled"
    drafts.fit(captions, features)
    sure, unsure = drafts.draft(features["000.jpg"]), drafts.draft(features["001.jpg"])
    assert (sure.text, sure.uncertainty, sure.origin) == (agreeing, 0.0, "the caption of 000.jpg")
    assert unsure.text == captions["001.jpg"][0] and unsure.uncertainty > 0.5


def test_the_curve_of_labels_finds_a_gain_where_one_exists_and_none_where_captions_are_random() -> None:
    # 24 groups with a caption of their own: twice as many labels cover more of them.
    features = make_features(160, groups=24, noise=0.02)
    words = [f"word{number}" for number in range(16)]
    phrase = [" ".join(np.random.default_rng(group).permutation(words)[:6]) for group in range(24)]
    similar = {photo: [phrase[int(photo[:3]) % 24]] for photo in features}
    gain = fit_labels(similar, features)
    assert gain is not None and 0 < gain.low < gain.value < gain.high
    order = np.random.default_rng(0).permutation(len(features))
    shuffled = {photo: [phrase[order[row] % 24]] for row, photo in enumerate(features)}
    none = fit_labels(shuffled, features)
    assert none is not None and none.low < 0 < none.high
    assert "No gain is shown: the interval includes 0." in describe_gain(None, shuffled, features)
    assert re.match(r"Another 160 labels: CIDEr-D \+\d+\.\d \(\+", describe_gain(None, similar, features))


def test_too_few_labels_are_stated() -> None:
    features = make_features(MIN_LABELS - 1)
    captions = {photo: ["a dog runs"] for photo in features}
    assert fit_labels(captions, features) is None
    text = f"What more labels would gain: {MIN_LABELS} labels are needed for an estimate, {MIN_LABELS - 1} are there."
    assert describe_gain(None, captions, features) == text


def test_versions_of_three_sizes_give_the_curve() -> None:
    def versions(sizes: list[int], scores: list[float]) -> VersionScores:
        return VersionScores(run="own", metric="CIDEr", test="pairs test", sizes=sizes, scores=scores)

    gain = fit_versions(versions([100, 200, 400, 400], [10.0, 15.0, 20.5, 19.5]))
    assert gain is not None and gain.value == pytest.approx(5.0) and 0 < gain.low < 5 < gain.high < 10
    assert fit_versions(versions([100, 100, 200], [10.0, 11.0, 15.0])) is None
    text = describe_gain(versions([100, 200, 400], [10.0, 15.0, 20.0]), {}, {})
    assert text.startswith("Another 0 labels: CIDEr +5.0") and "own trained on 3 different numbers of images" in text
