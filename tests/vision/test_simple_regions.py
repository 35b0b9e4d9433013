"""Ground-truth objects as regions, and a grid of image cells."""

from __future__ import annotations

import numpy as np

from vlp_models.vision.simple_regions import SymbolSource

IMAGES = [
    {"image_id": "d/1", "width": 200, "height": 100, "provenance": "f:1"},
    {"image_id": "d/2", "width": 10, "height": 10, "provenance": "f:2"},
]
OBJECTS = [
    {
        "image_id": "d/1",
        "category": "yellow square",
        "x1": 100.0,
        "y1": 50.0,
        "x2": 150.0,
        "y2": 100.0,
        "attributes": ["dotted"],
    },
    {"image_id": "d/1", "category": "blue circle", "x1": 0.0, "y1": 25.0, "x2": 50.0, "y2": 50.0},
    {"image_id": "d/1", "category": "yellow circle", "x1": 0.0, "y1": 0.0, "x2": 20.0, "y2": 10.0},
]


def test_symbols_have_words_geometry_and_order() -> None:
    source = SymbolSource(OBJECTS, max_regions=8)
    done: list[int] = []
    (regions, empty), quarantine = source.regions(IMAGES, done.append)
    assert source.classes == ("__background__", "blue circle", "yellow circle", "yellow square")
    assert source.words == ("blue", "circle", "dotted", "square", "yellow")
    assert source.detector_id == "boxes"
    expected = [
        [0, 1, 0, 0, 1, 0.1, 0.1, 0.05, 0.05],  # yellow circle: leftmost, higher
        [1, 1, 0, 0, 0, 0.25, 0.25, 0.125, 0.375],
        [0, 0, 1, 1, 1, 0.25, 0.5, 0.625, 0.75],
    ]
    np.testing.assert_allclose(regions.features, np.array(expected, np.float16), atol=1e-3)
    np.testing.assert_allclose(regions.boxes, [[0, 0, 0.1, 0.1], [0, 0.25, 0.25, 0.5], [0.5, 0.5, 0.75, 1]], atol=1e-6)
    np.testing.assert_array_equal(regions.class_probs, np.eye(4)[[2, 1, 3]])
    np.testing.assert_array_equal(regions.scores, [1, 1, 1])
    assert empty.features.shape == (0, 9)
    assert (quarantine, sum(done)) == ([], 2)


def test_objects_beyond_the_limit_are_quarantined() -> None:
    (regions, _), quarantine = SymbolSource(OBJECTS, max_regions=2).regions(IMAGES, lambda _: None)
    assert len(regions) == 2
    assert [(row["row_id"], row["rule"]) for row in quarantine] == [("d/1", "max_regions")]
    assert "3 objects" in quarantine[0]["reason"]
