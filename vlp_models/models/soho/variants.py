"""The parts of SOHO that only the authors' code (researchmm/soho) has; model.py uses them switch by switch.

The authors' checkpoints need all of them: pooling before the convolution, the gate that mixes dictionary vectors
with the features they replace, heads without biases, and that code's way to hide codes and to treat padding. Each
switch can be set alone.

`tight_canvas` is that code's padding: each image to multiples of 32 pixels, then to the largest of the batch. So an
image of 600 by 1000 has 19 by 32 cells of the CNN, which pooling reduces to 9 by 16. On a canvas of 1024 by 1024, 10 by
16 cells cover the image, and those at its border include padding.

`square_mask` is a bug that the published weights were trained with: the padding mask is laid out on a square of the
image's height, then shrunk to the grid. For a portrait image of 1000 by 600 only 6 of 9 columns are visible; for a
landscape image every column is, including padding. It only has an effect if the canvas is not square: if `height` and
`width` differ, or if `tight_canvas` shrinks the canvas to the images. That code has landscape and portrait images in
separate batches; here a batch of both has a canvas for both, on which neither its tokens nor its mask are that code's.

One difference has no switch: the running variance of the batch norms in the neck and in the gate. That code copies an
image's map for each of its four texts before the neck. The batch's mean and variance over the n cells here are the same
over the 4n cells there, and so are outputs and gradients in training. But the running variance follows the unbiased
one, which is n / (n - 1) times the batch's here and 4n / (4n - 1) times there: 0.5% apart for one image of 9 by 16
cells, less in larger batches. It matters in eval mode only, after training here; imported statistics are unchanged.

Shape suffixes as in model.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Pixels
from vlp_models.models.soho.pairs import Pairs
from vlp_models.objectives.distributed import draw_uniform

CANVAS_STEP = 32  # pixels: the authors' code pads to multiples of it


class Gate(nn.Module):
    """Mixes the projected dictionary vector of each cell with the feature it replaces, by a softmax of two scores."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.vectors = nn.Linear(hidden, hidden)
        self.scores = nn.Linear(2 * hidden, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, features_BRD: Tensor, vectors_BRD: Tensor) -> Tensor:
        vectors_BRD = self.vectors(vectors_BRD)
        scores_BR2 = self.scores(torch.cat([vectors_BRD, features_BRD], -1))
        # Batch statistics of an empty batch would be NaN; synchronized, other processes wait for this one's share.
        if len(scores_BR2) or (isinstance(self.norm, nn.SyncBatchNorm) and self.norm.training):
            scores_BR2 = self.norm(scores_BR2.flatten(0, 1)).unflatten(0, scores_BR2.shape[:2])
        weights_BR2 = scores_BR2.softmax(-1)
        return vectors_BRD * weights_BR2[..., :1] + features_BRD * weights_BR2[..., 1:]


def crop_padding(image: Pixels, *, least: int) -> Pixels:
    """Crop the padding on the right and bottom that no image of the batch needs.

    Height and width become multiples of `CANVAS_STEP`, at most the canvas. least: their minimum in pixels, for the CNN
    and the pooling.
    """
    mask_BHW = image.mask_BHW
    if mask_BHW is None or not len(image):
        return image
    # The largest image of the batch, its sides rounded up to the step.
    sides = (int(mask_BHW.any(2).sum(1).max()), int(mask_BHW.any(1).sum(1).max()))
    height, width = (max(least, -(-pixels // CANVAS_STEP) * CANVAS_STEP) for pixels in sides)
    return replace(image, pixels_B3HW=image.pixels_B3HW[:, :, :height, :width], mask_BHW=mask_BHW[:, :height, :width])


def square_padding(mask_BHW: Tensor) -> Tensor:
    """Return each image's valid height and width on a square as high as the batch: [B, H, W] -> [B, H, H]."""
    rows_BH, columns_BW = mask_BHW.any(2), mask_BHW.any(1)
    column_H = torch.arange(mask_BHW.shape[1], device=mask_BHW.device)
    return rows_BH[:, :, None] & (column_H < columns_BW.sum(1, keepdim=True))[:, None, :]


def hide_code_of_one_place(
    pairs: Pairs, codes_BR: Tensor, mask_BR: Tensor, probability: float, generator: torch.Generator, texts: int
) -> Tensor:
    """Draw one cell for the whole batch, and hide its code in each image, with `probability` for each pair.

    Nothing is hidden in an image in which that cell is padding. Arguments and result as in `pairs.hide_codes`.
    """
    device, cells = codes_BR.device, codes_BR.shape[1]
    cell = int(draw_uniform((), generator, device) * cells)
    matched_N = draw_uniform((texts,), generator, device) < probability
    mismatched_N = draw_uniform((texts,), generator, device) < probability
    masked_P = torch.cat([matched_N, mismatched_N.index_select(0, pairs.origin_P[texts:])])
    group_BR = (codes_BR == codes_BR[:, cell : cell + 1]) & mask_BR & mask_BR[:, cell : cell + 1]
    return group_BR.index_select(0, pairs.owner_P) & masked_P[:, None]
