"""SOHO's cells: positions and padding masks."""

from __future__ import annotations

import math

import pytest
import torch
from soho_toys import build

from vlp_models.data.batch import Pixels
from vlp_models.models.layers.embeddings import sine_positions


def test_positions_match_their_definition() -> None:
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0], mask[1, :2, :3] = True, True
    found = sine_positions(mask, 8)
    for b, (rows, columns) in enumerate(((3, 4), (2, 3))):
        for y in range(rows):
            for x in range(columns):
                wanted = []
                for place, count in ((y + 1, rows), (x + 1, columns)):
                    angle = place / (count + 1e-6) * 2 * math.pi
                    for i in range(4):
                        wave = angle / 10000 ** (2 * (i // 2) / 4)
                        wanted.append(math.sin(wave) if i % 2 == 0 else math.cos(wave))
                torch.testing.assert_close(found[b, y, x], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("height", "width", "rows", "columns"), [(1000, 600, 16, 10), (600, 1000, 10, 16)])
def test_portrait_and_landscape_images_have_all_cells_and_no_padding(height, width, rows, columns) -> None:
    """600 by 1000 pixels are 160 tokens of 64 pixels, either way (section 4.5)."""
    model = build(height=1024, width=1024, backbone_stage=-1)
    mask = torch.zeros(1, 1024, 1024, dtype=torch.bool)
    mask[0, :height, :width] = True
    grid = model.extract_features(Pixels(pixels_B3HW=torch.zeros(1, 3, 1024, 1024, dtype=torch.float64), mask_BHW=mask))
    assert model.stride == 64 and grid.mask_BRR.shape == (1, 16, 16)
    seen = grid.mask_BRR[0]
    assert seen.sum() == rows * columns == 160 and seen[:rows, :columns].all()


def test_square_mask_reproduces_the_public_bug() -> None:
    """As measured on the public code: 6 of 9 columns of a portrait image; padding as well for landscape ones."""
    fixed, buggy = (build(height=64, width=64, pool_first=True, square_mask=on, pool=1) for on in (False, True))
    standing = torch.ones(1, 1024, 608, dtype=torch.bool)
    standing[:, 1000:], standing[:, :, 600:] = False, False
    lying = torch.ones(2, 608, 1024, dtype=torch.bool)
    lying[:, 600:], lying[0, :, 800:], lying[1, :, 1000:] = False, False, False

    def columns(model, mask, shape):
        return model.grid_mask(mask, torch.zeros(len(mask), 1, *shape)).any(1).sum(1).tolist()

    assert columns(buggy, standing, (16, 9)) == [6] and columns(fixed, standing, (16, 9)) == [9]
    assert columns(buggy, lying, (9, 16)) == [16, 16] and columns(fixed, lying, (9, 16)) == [13, 16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "grid", "seen"),
    [
        ([(600, 1000)], (9, 16), [144]),
        ([(1000, 600)], (16, 9), [144]),
        ([(600, 800), (600, 1000)], (9, 16), [117, 144]),
        ([(600, 1000), (1000, 600)], (16, 16), [160, 160]),
        ([(20, 1000)], (1, 16), [16]),
    ],
)
def test_tight_canvas_fits_the_largest_images(sizes, grid, seen) -> None:
    """The public code has 144 tokens for 600 by 1000 pixels; never less than one cell."""
    config = {"height": 1024, "width": 1024, "backbone_stage": -1, "pool_first": True}
    mask = torch.zeros(len(sizes), 1024, 1024, dtype=torch.bool)
    for row, (height, width) in zip(mask, sizes, strict=True):
        row[:height, :width] = True
    image = Pixels(pixels_B3HW=torch.zeros(len(sizes), 3, 1024, 1024, dtype=torch.float64), mask_BHW=mask)
    found = build(**config, tight_canvas=True).extract_features(image)
    assert found.mask_BRR.shape[1:] == grid and found.features_BRD.shape[1] == math.prod(grid)
    assert found.mask_BRR.sum((1, 2)).tolist() == seen
    assert build(**config).extract_features(image).mask_BRR.shape[1:] == (16, 16)
