from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vlp_models.data.batch import collate_regions, prepend_objects
from vlp_models.data.sample import RegionArrays


def test_regions_are_padded_to_the_longest(regions: Callable[[int, int], RegionArrays]) -> None:
    images = [regions(1, 2), regions(2, 5), regions(3, 0)]
    batch = collate_regions(images, max_regions=10)
    assert batch.features_BRF.shape == (3, 5, 6) and batch.features_BRF.dtype == torch.float32
    assert batch.mask_BR.sum(1).tolist() == [2, 5, 1]
    for field, name in (
        (batch.features_BRF, "features"),
        (batch.boxes_BR4, "boxes"),
        (batch.class_probs_BRC, "class_probs"),
    ):
        torch.testing.assert_close(field[0, :2], torch.from_numpy(getattr(images[0], name)).float())
        assert not field[0, 2:].any() and not field[2].any()
    most_confident = collate_regions(images[1:2], max_regions=4)
    torch.testing.assert_close(most_confident.boxes_BR4[0], torch.from_numpy(images[1].boxes[:4]))
    assert most_confident.mask_BR.all()
    empty = collate_regions([images[2], images[2]], max_regions=16)
    assert empty.mask_BR.tolist() == [[True], [True]] and not empty.features_BRF.any()


def test_prepended_objects_have_features_of_the_most_overlapping_region(
    regions: Callable[[int, int], RegionArrays],
) -> None:
    image = regions(1, 2)
    image.boxes[:] = [[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]]
    objects = [(0.5, 0.5, 1.0, 0.9), (0.0, 0.0, 0.5, 0.2), (0.2, 0.2, 0.8, 0.8)]  # overlaps: 0.8, 0.4, 0.17
    seen = prepend_objects(image, objects)
    np.testing.assert_array_equal(seen.features[0], image.features[1])
    np.testing.assert_array_equal(seen.class_probs[0], image.class_probs[1])
    assert not seen.features[1:3].any() and not seen.class_probs[1:3].any()
    np.testing.assert_allclose(seen.boxes[:3], objects)
    np.testing.assert_array_equal(seen.features[3:], image.features)
    assert len(collate_regions([seen], max_regions=3).boxes_BR4[0]) == 3

    assert prepend_objects(image, ()) is image
    nothing = prepend_objects(regions(1, 0), [(0.1, 0.1, 0.1, 0.1)])
    assert len(nothing) == 1 and not nothing.features.any()
