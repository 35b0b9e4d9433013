"""Boxes and pixels: which part of the image a box in a model's input shows.

A box of a dataset or a detector is x1, y1, x2, y2 as fractions of the upright image. `Pixels.placement` records how
each image of a batch was resized, cropped, padded or augmented. A rotated or sheared box becomes the smallest upright
box around it. A box that is not visible has no area (`has_area`).

Shape suffixes: B images, R boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlp_models.data.batch import Pixels


def boxes_in_image(boxes_BR4: Tensor, image: Pixels) -> Tensor:
    """Map pixels of the model's input to fractions of the upright images, clipped to what is visible. [B, R, 4]"""
    matrix_B23, window_B4 = _placement(image)
    # Clip to the content before mapping: padding has no place in the image.
    visible_BR4 = _clip(boxes_BR4, visible_part(image))
    # Clip to the window after mapping: pixels that an augmentation filled in show nothing of the image.
    image_BR4 = _clip(_transform(visible_BR4, matrix_B23), window_B4)
    # A box that is not visible becomes all zeros, rather than a line at the edge.
    return image_BR4 * has_area(visible_BR4)[..., None]


def has_area(boxes: Tensor) -> Tensor:
    """Return bool [...]: the boxes [..., 4] that are wider and higher than zero."""
    return (boxes[..., 2:] > boxes[..., :2]).all(-1)


def visible_part(image: Pixels) -> Tensor:
    """Return the box of each input, in its pixels, that is not padding. [B, 4]"""
    height, width = image.pixels_B3HW.shape[2:]
    size_2 = torch.tensor([width, height], dtype=torch.float32, device=image.pixels_B3HW.device)
    size_B2 = size_2.expand(len(image), 2)
    # padding is at the right and at the bottom: rows and columns with content are its size
    if image.mask_BHW is not None:
        size_B2 = torch.stack([image.mask_BHW.any(1).sum(1), image.mask_BHW.any(2).sum(1)], -1).float()
    return torch.cat([torch.zeros_like(size_B2), size_B2], -1)


def cell_boxes(image: Pixels, rows: int, columns: int, side: int) -> Tensor:
    """Return the boxes of a grid of square cells that starts at the input's upper left corner, row by row.

    As fractions of the upright images, [B, rows * columns, 4]; without area for a cell that shows padding only.

    Args:
        side: of a cell, in pixels.
    """
    device = image.pixels_B3HW.device
    # R cells, row by row: upper left corner (x, y), lower right one (x + 1, y + 1), in cells
    y_R, x_R = (i.flatten() for i in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    cells_R4 = torch.stack([x_R, y_R, x_R + 1, y_R + 1], -1).to(device) * float(side)
    return boxes_in_image(cells_R4.expand(len(image), -1, -1), image)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of boxes [..., 4], broadcast; 0 where neither has area."""
    sides = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    # disjoint boxes have a negative side
    common = sides.clamp(min=0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - common
    # `tiny` instead of 0: two boxes without area overlap by 0, not by NaN.
    return common / union.clamp(min=torch.finfo(union.dtype).tiny)


def _placement(image: Pixels) -> tuple[Tensor, Tensor]:
    """Return `Placement.to_image_B23` and `window_B4`."""
    if image.placement is not None:
        return image.placement.to_image_B23, image.placement.window_B4
    height, width = image.pixels_B3HW.shape[2:]
    # the image fills the input: pixels are divided by its sides
    fill_23 = torch.tensor([[1 / width, 0, 0], [0, 1 / height, 0]], device=image.pixels_B3HW.device)
    whole_4 = torch.tensor([0.0, 0.0, 1.0, 1.0], device=image.pixels_B3HW.device)
    return fill_23.expand(len(image), 2, 3), whole_4.expand(len(image), 4)


def _transform(boxes_BR4: Tensor, matrix_B23: Tensor) -> Tensor:
    """Return the smallest upright boxes around the transformed ones."""
    x1, y1, x2, y2 = boxes_BR4.unbind(-1)
    # [B, R, 4 corners, 2]
    corners_BR42 = torch.stack([torch.stack([x, y], -1) for x in (x1, x2) for y in (y1, y2)], -2)
    matrix_B1 = matrix_B23[:, None].to(boxes_BR4.dtype)
    # a rotated box is no upright box: take the smallest one around its corners
    # (B, R, 4, 2) @ (B, 1, 2, 2) + (B, 1, 1, 2): the linear part, then the shift.
    moved_BR42 = corners_BR42 @ matrix_B1[..., :2].transpose(-1, -2) + matrix_B1[..., 2][..., None, :]
    return torch.cat([moved_BR42.amin(-2), moved_BR42.amax(-2)], -1)


def _clip(boxes_BR4: Tensor, to_B4: Tensor) -> Tensor:
    to_B14 = to_B4[:, None].to(boxes_BR4.dtype)
    # [B, R, 4] -> [B, R, 2 corners, 2]
    corners_BR22 = boxes_BR4.unflatten(-1, (2, 2))
    clipped_BR22 = corners_BR22.clamp(to_B14[..., None, :2], to_B14[..., None, 2:])
    return clipped_BR22.flatten(-2)
