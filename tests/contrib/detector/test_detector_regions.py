"""Regions from a detector: sorted, complete, and bitwise reproducible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vlp_models.contrib.detector.checkpoint import Detector
from vlp_models.contrib.detector.regions import RegionExtractor
from vlp_models.contrib.detector.training import LabeledImage, TrainingResult
from vlp_models.data.sample import RegionArrays

Trained = tuple[Detector, TrainingResult]


def extract(trained: Trained, drawings: list[LabeledImage], **options: Any) -> list[RegionArrays]:
    extractor = RegionExtractor(trained[0], **{"min_score": 0.3} | options)
    return extractor.extract([Image.open(image.path) for image in drawings])


@pytest.mark.slow
def test_one_region_per_object_with_its_class(drawings: list[LabeledImage], trained: Trained) -> None:
    for image, regions in zip(drawings, extract(trained, drawings), strict=True):
        size = [image.width, image.height] * 2
        assert len(regions) == 2
        for box, label in zip(image.boxes, image.labels, strict=True):
            nearest = np.abs(regions.boxes * size - box).sum(axis=1).argmin()
            np.testing.assert_allclose(regions.boxes[nearest] * size, box, atol=6)
            assert regions.class_probs[nearest].argmax() == label


def test_regions_are_sorted_by_confidence_with_full_distributions(
    drawings: list[LabeledImage], trained: Trained
) -> None:
    for regions in extract(trained, drawings, min_score=0.05):
        assert (np.diff(regions.scores) <= 0).all()
        assert (regions.scores >= 0.05).all()
        assert regions.class_probs.shape == (len(regions), 3)
        np.testing.assert_allclose(regions.class_probs.astype(np.float32).sum(axis=1), 1, atol=2e-3)
        np.testing.assert_allclose(regions.class_probs[:, 1:].max(axis=1), regions.scores, atol=1e-3)
        assert regions.boxes.min() >= 0
        assert regions.boxes.max() <= 1
        assert [a.dtype for a in (regions.features, regions.boxes)] == [np.float16, np.float32]


def test_other_images_make_no_difference(drawings: list[LabeledImage], trained: Trained) -> None:
    """Not even in the last bit, so that features of several runs can be combined."""
    together = extract(trained, drawings, min_score=0.05)
    for number, regions in enumerate(together):
        (alone,) = extract(trained, [drawings[number]], min_score=0.05)
        for name in ("features", "boxes", "class_probs", "scores"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(regions, name))


def test_number_of_threads_makes_no_difference(drawings: list[LabeledImage], trained: Trained) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(extract(trained, drawings))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one.features, two.features)


def test_content_probabilities_equals_the_heads_applied_to_roi_features(
    drawings: list[LabeledImage], trained: Trained
) -> None:
    heads = trained[0].model.roi_heads
    raw, made = (extract(trained, drawings, content=content) for content in ("roi", "probabilities"))
    for one, two in zip(raw, made, strict=True):
        features = torch.from_numpy(one.features).float()
        expected = [heads.box_predictor.cls_score(features).softmax(-1)]
        if trained[0].config.words:
            expected.append(heads.word_predictor(features).sigmoid())
        np.testing.assert_allclose(two.features, torch.cat(expected, -1).detach().numpy(), atol=5e-3)
        np.testing.assert_array_equal(one.boxes, two.boxes)


def test_max_regions_keeps_the_most_confident(drawings: list[LabeledImage], trained: Trained) -> None:
    for one, two in zip(extract(trained, drawings, max_regions=1), extract(trained, drawings), strict=True):
        assert len(one) == 1
        assert one.scores[0] >= two.scores.min() - 1e-6


@pytest.mark.parametrize("size", [(4, 3000), (21000, 16)])
def test_strips_have_regions_or_none(trained: Trained, size: tuple[int, int]) -> None:
    (regions,) = RegionExtractor(trained[0], min_score=0.0).extract([Image.new("RGB", size, "red")])
    assert np.isfinite(regions.boxes).all() and np.isfinite(np.asarray(regions.features, np.float32)).all()


def test_image_without_regions(trained: Trained) -> None:
    regions = RegionExtractor(trained[0], min_score=0.9).extract([torch.zeros(3, 32, 32, dtype=torch.uint8)])[0]
    assert regions.features.shape == (0, 32)
    assert regions.class_probs.shape == (0, 3)
