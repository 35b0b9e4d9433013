from __future__ import annotations

from collections.abc import Callable

import torch

from vlp_models.data.collate import collate_regions, collate_text
from vlp_models.data.sample import RegionArrays
from vlp_models.data.tokenizer import Tokenizer


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


def test_the_most_confident_regions_are_kept(regions: Callable[[int, int], RegionArrays]) -> None:
    image = regions(1, 9)
    batch = collate_regions([image], max_regions=4)
    torch.testing.assert_close(batch.boxes_BR4[0], torch.from_numpy(image.boxes[:4]))
    assert batch.mask_BR.all()


def test_a_batch_of_empty_images_has_one_row(regions: Callable[[int, int], RegionArrays]) -> None:
    batch = collate_regions([regions(1, 0), regions(2, 0)], max_regions=16)
    assert batch.mask_BR.tolist() == [[True], [True]] and not batch.features_BRF.any()


def test_text() -> None:
    tokenizer = Tokenizer.train(["a b c d"] * 2, 50, 1, True)
    text = collate_text(["a b c d", "a"], tokenizer, 5)
    assert text.mask_BT.sum(1).tolist() == [5, 3]
