"""Scenes and their pictures: what is promised of every seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp_models.synthetic.scenes.scene import (
    MAX_OBJECTS,
    MIN_OBJECTS,
    MIN_VISIBLE,
    RELATIONS,
    Scene,
    is_related,
    render,
    sample_scene,
    shape_mask,
)

SEEDS = st.integers(0, 2**32)
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


def scene_of(seed: int, side: int = 128) -> Scene:
    return sample_scene(np.random.default_rng(seed), image_id="1", split="train", side=side)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_every_object_is_visible_and_inside_the_image(seed: int) -> None:
    scene = scene_of(seed)
    assert MIN_OBJECTS <= len(scene.objects) <= MAX_OBJECTS
    for item in scene.objects:
        x1, y1, x2, y2 = item.box
        assert 0 <= x1 < x2 <= scene.side and 0 <= y1 < y2 <= scene.side
        assert MIN_VISIBLE - 1e-3 <= item.visible <= 1
    assert Scene.from_dict(scene.to_dict()) == scene


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_relations_are_the_opposites_of_each_other(seed: int) -> None:
    scene = scene_of(seed)
    for a in scene.objects:
        for b in scene.objects:
            for relation in RELATIONS:
                assert is_related(a, relation, b) == is_related(b, OPPOSITE[relation], a)
                assert not (is_related(a, relation, b) and is_related(a, OPPOSITE[relation], b))


def test_image_shows_the_top_objects_color_in_its_box() -> None:
    """Drawing and ground truth agree: red objects are red pixels inside their boxes, and hardly anywhere else."""
    for seed in range(60):
        scene = scene_of(seed)
        top = scene.objects[-1]
        if top.texture != "solid" or top.color != "red":
            continue
        red, green, blue = np.moveaxis(np.asarray(render(scene, np.random.default_rng(seed)), dtype=float), 2, 0)
        inside = shape_mask(top.points(scene.side), scene.side)
        assert (red[inside] > 1.5 * np.maximum(green, blue)[inside]).mean() > 0.8
        if sum(item.color == "red" for item in scene.objects) == 1:
            assert (red[~inside] > 2 * np.maximum(green, blue)[~inside]).mean() < 0.02
            return
    raise AssertionError("no seed had a single solid red object on top")


def test_backgrounds_vary_and_pixels_are_noisy() -> None:
    pictures = [np.asarray(render(scene_of(0), np.random.default_rng(seed)), dtype=float) for seed in range(8)]
    assert np.std([picture.mean(axis=(0, 1)) for picture in pictures], axis=0).max() > 5
    assert all(np.abs(np.diff(picture[:8, :, 0], axis=1)).mean() > 0.5 for picture in pictures)
