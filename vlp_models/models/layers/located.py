"""Located states (`LocatesStates`) of regions and of grids of cells.

Shape suffixes: B images, N texts, R regions or cells, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlp_models.data.batch import Image, Pixels, PixelSets, Regions
from vlp_models.data.boxes import cell_boxes, has_area
from vlp_models.models.protocols import Located


def located_regions(states_NRD: Tensor, image: Image, owner_N: Tensor | None) -> Located:
    """Return the states with the regions' boxes. owner_N: each text's image; None: text i has image i.

    The zero region of an image without regions, or of a blanked one, has no area and is masked.
    """
    assert isinstance(image, Regions)
    return _located(states_NRD, image.boxes_BR4, image.mask_BR, owner_N, image.place_BR)


def located_cells(
    states_NRD: Tensor, image: Image, grid: tuple[int, int], side: int, mask_BR: Tensor | None, owner_N: Tensor | None
) -> Located:
    """Return the states with the boxes of a grid of cells, row by row.

    Args:
        grid: rows and columns. side: of a cell, in pixels of the input.
        mask_BR: bool, the cells that the model reads; None: all.
    """
    if not isinstance(image, PixelSets):
        assert isinstance(image, Pixels)
        return _located(states_NRD, cell_boxes(image, *grid, side), mask_BR, owner_N)
    # Several images per text: the cells of the first, then those of the next; each with the number of its image.
    boxes_BR4 = image.spread(cell_boxes(image.flat(), *grid, side)).flatten(1, 2)
    place_R = torch.arange(image.there_BK.shape[1], device=boxes_BR4.device).repeat_interleave(grid[0] * grid[1])
    return _located(states_NRD, boxes_BR4, mask_BR, owner_N, place_R.expand(len(image), -1))


def _located(
    states_NRD: Tensor,
    boxes_BR4: Tensor,
    mask_BR: Tensor | None,
    owner_N: Tensor | None,
    place_BR: Tensor | None = None,
) -> Located:
    # What shows nothing of the image has no area and a zero box; then one row per text: [B, R] -> [N, R].
    visible_BR = has_area(boxes_BR4) if mask_BR is None else has_area(boxes_BR4) & mask_BR
    boxes_BR4 = boxes_BR4 * visible_BR[..., None]
    if owner_N is not None:
        boxes_BR4, visible_BR = boxes_BR4.index_select(0, owner_N), visible_BR.index_select(0, owner_N)
        place_BR = None if place_BR is None else place_BR.index_select(0, owner_N)
    return Located(states_NRD=states_NRD, boxes_NR4=boxes_BR4, mask_NR=visible_BR, place_NR=place_BR)
