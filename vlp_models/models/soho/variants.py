"""SOHO's variant: the model of the authors' code (researchmm/soho), switch by switch.

It has what only the authors' checkpoints need: pooling before the convolution, the gate that mixes dictionary vectors
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
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Image, Pixels
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.embeddings import embedding_table
from vlp_models.models.soho.config import SOHOConfig
from vlp_models.models.soho.model import SOHO, FeatureGrid, Neck
from vlp_models.models.soho.pairs import Pairs, hide_codes
from vlp_models.objectives.distributed import draw_uniform

CANVAS_STEP = 32  # pixels: the authors' code pads to multiples of it


class PublicSOHO(SOHO):
    """SOHO with `PublicSwitches`."""

    def __init__(self, config: SOHOConfig) -> None:
        super().__init__(config)
        hidden = config.hidden
        if config.pool_first:
            self.neck = PoolingFirst(self.backbone.channels, hidden, pool=config.pool, norm=config.neck_norm)
            nn.init.kaiming_normal_(self.neck.conv.weight, mode="fan_out", nonlinearity="relu")
        if config.gate:
            self.gate = Gate(hidden)
            init_weights(self.gate, config.init_std)
        if config.plain_heads:
            self.word_head = None  # type: ignore[assignment]
            self.match_head = nn.Linear(hidden, 2, bias=False)
            init_weights(self.match_head, config.init_std)
        if config.code_scores == "cosine":
            self.code_head = None

    def extract_features(self, image: Image) -> FeatureGrid:
        if self.config.tight_canvas and isinstance(image, Pixels):
            image = crop_padding(image, least=self.stride)
        return super().extract_features(image)

    def grid_mask(self, mask_BHW: Tensor | None, features_BDRR: Tensor) -> Tensor:
        if mask_BHW is None:
            return super().grid_mask(mask_BHW, features_BDRR)
        if self.config.square_mask:
            # Each image's valid height and width on a square as high as the batch: [B, H, W] -> [B, H, H]
            rows_BH, columns_BW = mask_BHW.any(2), mask_BHW.any(1)
            column_H = torch.arange(mask_BHW.shape[1], device=mask_BHW.device)
            mask_BHW = rows_BH[:, :, None] & (column_H < columns_BW.sum(1, keepdim=True))[:, None, :]
        elif not self.config.pool_first:
            return super().grid_mask(mask_BHW, features_BDRR)
        return F.interpolate(mask_BHW[:, None].float(), size=features_BDRR.shape[2:])[:, 0] > 0.5

    def dictionary_mask(self, grid: FeatureGrid) -> Tensor:
        return torch.ones_like(grid.mask_BR) if self.config.padding_in_dictionary else grid.mask_BR

    def visual_features(self, features_BRD: Tensor, vectors_BRD: Tensor) -> Tensor:
        if not self.config.gate:
            return vectors_BRD
        mixed: Tensor = self.gate(features_BRD, vectors_BRD)
        return mixed

    def select_hidden_cells(
        self, pairs: Pairs, codes_BR: Tensor, mask_BR: Tensor, generator: torch.Generator, texts: int
    ) -> Tensor:
        if self.config.masked_code == "of_each_pair":
            return hide_codes(pairs, codes_BR, mask_BR, self.config.mvm_probability, generator, texts)
        # One random cell for the whole batch: in each image its code is hidden, from each of the masked pairs.
        device, cells = codes_BR.device, codes_BR.shape[1]
        cell = int(draw_uniform((), generator, device) * cells)
        matched_N = draw_uniform((texts,), generator, device) < self.config.mvm_probability
        mismatched_N = draw_uniform((texts,), generator, device) < self.config.mvm_probability
        masked_P = torch.cat([matched_N, mismatched_N.index_select(0, pairs.origin_P[texts:])])
        # Nothing is hidden in an image in which that cell is padding.
        group_BR = (codes_BR == codes_BR[:, cell : cell + 1]) & mask_BR & mask_BR[:, cell : cell + 1]
        return group_BR.index_select(0, pairs.owner_P) & masked_P[:, None]

    def predicted_pairs(self, matched_P: Tensor) -> Tensor:
        return torch.ones_like(matched_P) if self.config.masked_pairs == "all" else matched_P

    def predict_words(self, x_MD: Tensor) -> Tensor:
        if not self.config.plain_heads:
            return super().predict_words(x_MD)
        return F.linear(x_MD, embedding_table(self.text_embedding.words))

    def predict_codes(self, x_MD: Tensor, table_KD: Tensor) -> Tensor:
        if self.config.code_scores != "cosine":
            return super().predict_codes(x_MD, table_KD)
        with torch.autocast(x_MD.device.type, enabled=False):
            return F.normalize(x_MD.to(table_KD.dtype), dim=-1) @ F.normalize(table_KD, dim=-1).T


class PoolingFirst(Neck):
    """Max pooling that drops an odd last row or column, then convolution and normalization."""

    def forward(self, map_BChw: Tensor) -> Tensor:
        pooled = F.max_pool2d(map_BChw, self.pool.kernel_size)
        normed: Tensor = self.norm(self.conv(pooled))
        return normed


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


class SOHOFamily:
    """What `models.FAMILIES` names for `soho`: it chooses the class that a config describes."""

    config_class: ClassVar[type] = SOHOConfig

    @staticmethod
    def from_config(config: SOHOConfig) -> SOHO:
        """Return the paper's model, or the authors' code's if one of its switches is set."""
        return PublicSOHO(config) if config.set_switches() else SOHO(config)
