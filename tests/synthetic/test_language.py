"""Captions and their checker: written and read by the same lexicon, tested against each other and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp_models.synthetic.scenes.captions import write_captions
from vlp_models.synthetic.scenes.language import VOCABULARY, check, correct_spelling, misspell
from vlp_models.synthetic.scenes.scene import Scene, sample_scene


def scene_of(seed: int) -> Scene:
    return sample_scene(np.random.default_rng(seed), image_id=str(seed), split="test", side=64)


def item(shape: str, color: str, size: str, texture: str, x: float, y: float) -> dict[str, Any]:
    place = {"x": x, "y": y, "radius": 0.08, "angle": 0.0, "box": [0, 0, 1, 1], "visible": 1.0}
    return {"shape": shape, "colour": color, "size": size, "texture": texture, **place}  # plain-ok


# A large striped red star in the middle; two small solid blue circles, one left above it, one right below it.
BY_HAND = {
    "image_id": "1",
    "split": "test",
    "side": 128,
    "objects": [
        item("star", "red", "large", "striped", 0.5, 0.5),
        item("circle", "blue", "small", "solid", 0.2, 0.2),
        item("circle", "blue", "small", "solid", 0.8, 0.7),
    ],
}


@pytest.mark.parametrize(
    ("caption", "true", "claims"),
    [
        ("a red star", True, 1),
        ("A big stripy red star with other shapes around it.", True, 1),
        ("a small red star", False, 1),
        ("a star with dots", False, 1),
        ("two circles and a red star", True, 2),
        ("three circles and a red star", False, 2),
        ("one circle", False, 1),
        ("a blue circle, a blue circle and a star", True, 2),
        ("a star and a star", False, 1),
        ("there are three shapes in this picture", True, 1),
        ("a blue circle is left of the star", True, 1),
        ("the star is to the left of a blue circle", True, 1),
        ("a blue circle above a blue disc", True, 1),
        ("the star is above a star", False, 1),
        ("a red star in the middle", True, 1),
        ("a blue circle is in the middle", False, 1),
        ("a blue circle at the bottom of the picture", True, 1),
        ("a red star in the middle, a blue circle at the top and a blue circle on the right", True, 4),
        ("a red star in the middle, a blue circle at the top and a blue star", False, 3),
        ("a red star at the top and a blue circle on the right", False, 2),
        ("two circles at the top", None, 0),
        ("shapes in red and blue", True, 1),
        ("blue shapes", True, 1),
        ("the shapes are blue", False, 1),
        ("the shapes are blue and red", True, 1),
        ("four shapes in blue and red", False, 2),
        ("three shapes in blue and green", False, 2),
        ("two cirlces and a erd satr", True, 2),
        ("", None, 0),
        ("a man rides a horse", None, 0),
        ("a red red star", None, 0),
        ("a red star is", None, 0),
        ("two circles above the star", None, 0),
    ],
)
def test_verdicts_by_hand(caption: str, true: bool | None, claims: int) -> None:
    verdict = check(caption, BY_HAND)
    assert (verdict.true, verdict.claims) == (true, claims)


def test_longer_caption_is_more_informative() -> None:
    captions = ["a star", "a red star", "a large striped red star", "a large striped red star and two blue circles"]
    shares = [check(caption, BY_HAND).informative for caption in captions]
    assert shares == sorted(set(shares)) and shares[-1] <= 1
    assert check("a green star", BY_HAND).informative == 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_reference_is_true_of_its_own_scene(seed: int) -> None:
    scene = scene_of(seed)
    written = write_captions(scene, np.random.default_rng(seed + 1))
    assert len(written) == 5
    for caption in written:
        verdict = check(caption, scene.to_dict())
        assert verdict.true and verdict.claims > 0 and 0 < verdict.informative <= 1, caption


def test_references_are_rarely_true_of_another_scene() -> None:
    scenes = [scene_of(seed) for seed in range(150)]
    verdicts = [
        check(caption, scenes[seed - 1].to_dict()).true
        for seed, scene in enumerate(scenes)
        for caption in write_captions(scene, np.random.default_rng(seed))
    ]
    assert np.mean([bool(true) for true in verdicts]) < 0.08


def test_misspellings_occur_only_with_the_careless_annotator_and_can_be_read() -> None:
    wrong = [0] * 5
    for seed in range(200):
        for who, caption in enumerate(write_captions(scene_of(seed), np.random.default_rng(seed))):
            words = caption.lower().replace(",", "").rstrip(".").split()
            wrong[who] += any(word not in VOCABULARY for word in words)
    assert wrong[:4] == [0, 0, 0, 0]
    assert 20 < wrong[4] < 60  # 20% of 200


@given(word=st.sampled_from(sorted(VOCABULARY)), seed=st.integers(0, 1000))
def test_misspelled_word_is_corrected(word: str, seed: int) -> None:
    assert correct_spelling(misspell(word, np.random.default_rng(seed))) == word


def test_a_word_between_two_known_ones_is_not_guessed() -> None:
    assert correct_spelling("threee") == "three"
    assert correct_spelling("i") == "i"
    assert correct_spelling("ond") is None  # one, on, and
    assert correct_spelling("elephant") is None
