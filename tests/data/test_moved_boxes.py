"""Boxes follow their pixels: a colored square is drawn, the image is resized and augmented, and its box is compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from vlp_models.data.batch import Pixels
from vlp_models.data.boxes import (
    _clip,
    _placement,
    _transform,
    boxes_in_image,
    cell_boxes,
    has_area,
    overlap,
    visible_part,
)
from vlp_models.data.pixels import OPERATIONS, PixelInput, collate_pixels, operation_matrix

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "height": 60, "width": 72}
RED = (255, 0, 0)
SIZE = (90, 64)
AUGMENT = {
    "none": (),
    "flip": ("flip",),
    "crop": ("random_resized_crop",),
    "crop-flip": ("random_resized_crop", "flip"),
    "rand": ("rand_augment",),
    "all": ("random_resized_crop", "flip", "rand_augment"),
}


def drawn(box: tuple[int, int, int, int]) -> Image.Image:
    picture = Image.new("RGB", SIZE)
    ImageDraw.Draw(picture).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), RED)
    return picture


def red_box(image: Pixels) -> tuple[float, ...] | None:
    """Return the box around the red pixels of the first input; gray and dark are not red."""
    red, green, _ = image.pixels_B3HW[0]
    rows, columns = ((red - green) > 0.25).nonzero(as_tuple=True)
    if not len(rows):
        return None
    return float(columns.min()), float(rows.min()), float(columns.max()) + 1, float(rows.max()) + 1


def boxes_in_input(boxes_BR4: torch.Tensor, image: Pixels) -> torch.Tensor:
    """Map fractions of the upright images to pixels of the input: the inverse of `boxes_in_image`."""
    matrix_B23, window_B4 = _placement(image)
    inverse_B22 = torch.linalg.inv(matrix_B23[..., :2])
    inverse_B23 = torch.cat([inverse_B22, -inverse_B22 @ matrix_B23[..., 2:]], -1)
    shown_BR4 = _clip(boxes_BR4, window_B4)
    return _clip(_transform(shown_BR4, inverse_B23), visible_part(image)) * has_area(shown_BR4)[..., None]


def fractions(box: tuple[int, int, int, int]) -> torch.Tensor:
    return torch.tensor([[[v / s for v, s in zip(box, SIZE * 2, strict=True)]]])


@pytest.mark.parametrize("augment", AUGMENT)
@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_a_box_encloses_its_pixels_after_augmentation(resize: str, augment: str) -> None:
    settings: dict[str, Any] = {**PLAIN, "resize": resize, "augment": AUGMENT[augment], "crop_scale": (0.3, 0.9)}
    wanted, rng, tight, vanished = PixelInput(**settings), np.random.default_rng(7), 0, 0
    for seed in range(60):
        left, top = int(rng.integers(2, 60)), int(rng.integers(2, 40))
        box = (left, top, left + int(rng.integers(12, 28)), top + int(rng.integers(12, 22)))
        image = collate_pixels([drawn(box)], wanted, [seed])
        (found,) = boxes_in_input(fractions(box), image)[0]
        red = red_box(image)
        if red is None:
            vanished += 1
            assert not has_area(found) or (found[2:] - found[:2]).min() < 3, "nothing is left of the square"
            continue
        red_4 = torch.tensor(red)
        assert (found[:2] <= red_4[:2] + 2).all() and (found[2:] >= red_4[2:] - 2).all(), (seed, found, red)
        inside = (found[:2] > 0.5).all() and found[2] < 71.5 and found[3] < 59.5
        if inside and augment != "all":  # else the square may be cut, and the rest of it need not touch every side
            tight += 1
            assert (found - red_4).abs().max() < 2.5, (seed, found, red)
    assert tight > 10 or augment == "all"
    assert vanished or augment in ("none", "flip", "rand")


@pytest.mark.parametrize("strength", [-0.7, 0.7])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_of_rand_augment_moves_boxes_and_pixels_alike(name: str, strength: float) -> None:
    box = (36, 24, 56, 40)
    moved = OPERATIONS[name](drawn(box), strength)
    corners = np.array([(x, y, 1) for x in (36, 56) for y in (24, 40)])
    expected = (operation_matrix(name, strength, *SIZE) @ corners.T)[:2]
    pixels = np.asarray(moved).astype(int)
    rows, columns = (pixels[..., 0] - pixels[..., 1] > 45).nonzero()
    found = [(columns.min(), columns.max() + 1), (rows.min(), rows.max() + 1)]
    assert np.abs(np.array(found) - np.stack([expected.min(1), expected.max(1)], 1)).max() < 2


@pytest.mark.parametrize("augment", AUGMENT)
@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_cells_say_which_part_of_the_image_they_show(resize: str, augment: str) -> None:
    """The image's colors are its coordinates, so the mean color of a cell is the center of its box."""
    x, y = np.meshgrid((np.arange(90) + 0.5) / 90, (np.arange(64) + 0.5) / 64)
    ramp = Image.fromarray((np.stack([x, y, 0 * x + 1], -1) * 255).astype(np.uint8))
    operations = {"rand": ("rand_augment",), "all": ("random_resized_crop", "flip", "rand_augment")}
    settings: dict[str, Any] = {**PLAIN, "resize": resize, "augment": AUGMENT[augment], "crop_scale": (0.3, 0.9)}
    checked = 0
    for seed in range(20):
        image = collate_pixels([ramp], PixelInput(**settings), [seed])
        cells_R4 = cell_boxes(image, 5, 6, 12)[0]
        assert ((cells_R4 >= 0) & (cells_R4 <= 1)).all()
        shown_R = image.pixels_B3HW[0].unfold(1, 12, 12).unfold(2, 12, 12).flatten(1, 2)  # [3, R, 12, 12]
        for cell, box in enumerate(cells_R4):
            pixels = shown_R[:, cell].flatten(1)
            whole = bool((pixels[2] > 0.98).all())  # no gray and no padding
            if not whole or augment in operations:
                continue
            center = (box[:2] + box[2:]) / 2
            assert (pixels[:2].mean(1) - center).abs().max() < 0.03, (seed, cell)
            checked += 1
    assert checked > 200 or augment in operations


def test_what_was_cropped_is_not_shown_by_a_cell_of_gray() -> None:
    """Moved by RandAugment after a crop, the input has a gray strip; its cells show no part of the image."""
    wanted = PixelInput(**PLAIN, augment=("random_resized_crop", "rand_augment"), crop_scale=(0.3, 0.5))
    gray = 0
    for seed in range(60):
        image = collate_pixels([Image.new("RGB", SIZE, RED)], wanted, [seed])
        red, green, _ = image.pixels_B3HW[0].unfold(1, 12, 12).unfold(2, 12, 12).flatten(1, 2)
        is_gray_R = (green.flatten(1) > 0.45).all(1)
        gray += int(is_gray_R.sum())
        inner_R = red.flatten(1).amin(1) > 0.9
        cells_R4 = cell_boxes(image, 5, 6, 12)[0]
        assert has_area(cells_R4)[inner_R].all()
        far_R = (cells_R4[:, 2:] - cells_R4[:, :2]).prod(-1)[is_gray_R]
        assert (far_R < 0.03).all()
    assert gray > 50


def test_boxes_return_to_the_image() -> None:
    wanted = PixelInput(**PLAIN, augment=("random_resized_crop", "flip"), crop_scale=(0.1, 0.4))
    images = collate_pixels([drawn((40, 30, 50, 40))] * 30, wanted, list(range(30)))
    box_B14 = fractions((40, 30, 50, 40)).expand(30, 1, 4)
    there_B14 = boxes_in_input(box_B14, images)
    back_B14 = boxes_in_image(there_B14, images)
    window_B14 = images.placement.window_B4[:, None]  # type: ignore[union-attr]
    inside_B = ((box_B14 >= window_B14)[..., :2].all(-1) & (box_B14 <= window_B14)[..., 2:].all(-1))[:, 0]
    assert 5 < int(inside_B.sum()) < 30
    torch.testing.assert_close(back_B14[inside_B], box_B14[inside_B], atol=1e-5, rtol=0)
    moved = images.select(torch.tensor([3, 3])).placement
    assert moved is not None and torch.equal(moved.to_image_B23[0], images.placement.to_image_B23[3])  # type: ignore[union-attr]


def test_without_augmentation_a_squashed_image_needs_no_placement() -> None:
    image = collate_pixels([drawn((0, 0, 45, 32))], PixelInput(**PLAIN), [None])
    assert image.placement is None
    torch.testing.assert_close(boxes_in_input(fractions((0, 0, 45, 32)), image), torch.tensor([[[0.0, 0, 36, 30]]]))


def test_overlap_is_intersection_over_union() -> None:
    a, b = (
        torch.tensor([0.0, 0.0, 0.5, 1.0]),
        torch.tensor([[0.25, 0.0, 0.75, 1.0], [0.5, 0.0, 1.0, 1.0], [0, 0, 0, 0]]),
    )
    torch.testing.assert_close(overlap(a, b), torch.tensor([1 / 3, 0.0, 0.0]))
    assert float(overlap(torch.zeros(4), torch.zeros(4))) == 0
