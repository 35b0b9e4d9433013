"""One stack for understanding and generation: the cross-modal part of TDEN (Two-stream) and TDEN (Single-stream).

Li et al. 2021, "Comparison with VL Pretraining Approaches" and table 1: a cross-modal encoder-decoder shared across
proxy tasks. The paper does not say how one stack generates; here as in Unified VLP (Zhou et al. 2020, section 3.2):
words see the past words and all regions, regions see regions only, so that no word reaches another through the image.

Shape suffixes: B batch, S visual tokens, T text tokens, D hidden, N hypotheses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlp_models.models.layers.attention import KeyValues
from vlp_models.models.layers.blocks import TransformerBlock
from vlp_models.models.layers.masks import padding_mask


def decode(
    blocks: Sequence[TransformerBlock], text_BTD: Tensor, text_mask: Tensor, memory_BSD: Tensor, mask_BS: Tensor
) -> Tensor:
    """The words' last states, [N, T, D], of N texts: as many of each image as of any other, those of an image together.

    text_mask: which words a word sees, broadcastable to [N, 1, T, T]; memory_BSD, mask_BS: of B images.
    """
    batch, length = text_BTD.shape[:2]
    times = batch // mask_BS.shape[0]
    memory_BSD, mask_BS = memory_BSD.repeat_interleave(times, dim=0), mask_BS.repeat_interleave(times, dim=0)
    regions = mask_BS.shape[1]
    sees_regions = padding_mask(mask_BS)
    words = torch.cat(
        [text_mask.expand(batch, 1, length, length), sees_regions.expand(batch, 1, length, regions)], dim=3
    )
    blind = text_mask.new_zeros(batch, 1, regions, length)
    mask = torch.cat([words, torch.cat([blind, sees_regions.expand(batch, 1, regions, regions)], dim=3)], dim=2)
    x = torch.cat([text_BTD, memory_BSD], dim=1)
    for block in blocks:
        x = block(x, mask)
    return x[:, :length]


def project_regions(blocks: Sequence[TransformerBlock], memory_BSD: Tensor, mask_BS: Tensor) -> tuple[KeyValues, ...]:
    """The regions' keys and values in every block: what `step` attends to besides past words."""
    projected = []
    for block in blocks:
        projected.append(block.attention.project(memory_BSD))
        memory_BSD = block(memory_BSD, padding_mask(mask_BS))
    return tuple(projected)


def step(
    block: TransformerBlock, x_N1D: Tensor, past: KeyValues | None, regions: KeyValues, mask_NS: Tensor
) -> tuple[Tensor, KeyValues]:
    """One more word of each hypothesis through one block; returns its state and the grown past.

    regions, mask_NS: of each hypothesis's own image.
    """
    present = block.attention.project(x_N1D)
    if past is not None:
        present = past.append(present)
    words = mask_NS.new_ones(len(mask_NS), present.keys.shape[2])
    mask = padding_mask(torch.cat([words, mask_NS], dim=1))
    x = block.attention_end(x_N1D, block.attention.cross(x_N1D, present.append(regions), mask))
    return block.ffn_end(x, block.ffn(x)), present
