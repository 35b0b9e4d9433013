"""Several captions of an image in one batch, and pictures that keep within the limits of their sides."""

from __future__ import annotations

from collections import Counter

import pytest
from PIL import Image

from vlp_models.data.inputs import choose_captions
from vlp_models.data.pixels import PixelInput, fit


def test_captions_are_drawn_without_repeating_one_while_others_are_left() -> None:
    captions = ("a", "b", "c")
    assert choose_captions(captions, 2, None) == ["a", "b"] and choose_captions(captions, 5, None) == [
        "a",
        "b",
        "c",
        "a",
        "b",
    ]
    assert choose_captions(captions, 2, 7) == choose_captions(captions, 2, 7)
    drawn = [choose_captions(captions, 2, seed) for seed in range(300)]
    assert all(len(set(pair)) == 2 for pair in drawn)
    count = Counter(caption for pair in drawn for caption in pair)
    assert all(160 < count[caption] < 240 for caption in captions)
    assert all(sorted(Counter(choose_captions(captions, 4, seed)).values()) == [1, 1, 2] for seed in range(20))


@pytest.mark.parametrize(
    ("size", "limits", "shown"),
    [
        ((1200, 1000), {"longer": 1000, "shorter": 600}, (720, 600)),  # by the shorter side
        ((1000, 1200), {"longer": 1000, "shorter": 600}, (600, 720)),
        ((2000, 500), {"longer": 1000, "shorter": 600}, (1000, 250)),  # by the longer one
        ((100, 50), {}, (1024, 512)),
        ((100, 50), {"shorter": 600}, (1024, 512)),
    ],
)
def test_a_padded_picture_keeps_within_the_limits_of_its_sides(size, limits, shown) -> None:
    wanted = PixelInput(height=1024, width=1024, resize="pad", **limits)
    pixels, mask = fit(Image.new("RGB", size, "white"), wanted, None)
    assert (mask.any(0).sum(), mask.any(1).sum()) == shown and mask.sum() == shown[0] * shown[1]
    assert pixels[mask].all() and not pixels[~mask].any()
