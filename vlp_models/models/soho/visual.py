"""Images as SOHO's transformer reads them. Shape suffixes: B images, R cells of an image, N texts, D hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Visual:
    """Images as the transformer reads them: tokens_BRD, mask_BR bool; hidden_BRD what a cell becomes that MVM hides."""

    tokens_BRD: Tensor
    mask_BR: Tensor
    hidden_BRD: Tensor | None = None

    def for_texts(self, owner_N: Tensor | None, hidden_NR: Tensor | None = None) -> Visual:
        """A row for each text. hidden_NR: the cells that it must not see."""
        tokens, mask, instead = self.tokens_BRD, self.mask_BR, self.hidden_BRD
        if owner_N is not None:
            tokens, mask = tokens.index_select(0, owner_N), mask.index_select(0, owner_N)
        if hidden_NR is not None and instead is not None:
            instead = instead if owner_N is None else instead.index_select(0, owner_N)
            tokens = torch.where(hidden_NR[..., None], instead, tokens)
        return Visual(tokens_BRD=tokens, mask_BR=mask)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """features_BRD; mask_BRR bool, [B, rows, columns]: where there is picture."""

    features_BRD: Tensor
    mask_BRR: Tensor

    @property
    def mask_BR(self) -> Tensor:
        return self.mask_BRR.flatten(1)


class Neck(nn.Module):
    """1x1 convolution, batch normalisation, max pooling that keeps an odd last row or column: so 600 by 1000 pixels at
    64 a cell are the 160 tokens that section 4.5 counts."""

    def __init__(self, channels: int, hidden: int, *, pool: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, hidden, 1, bias=norm == "none")
        self.norm = nn.BatchNorm2d(hidden) if norm == "batch" else nn.Identity()
        self.pool = nn.MaxPool2d(pool, ceil_mode=True)

    def forward(self, map_BChw: Tensor) -> Tensor:
        """[B, D, rows, columns]"""
        pooled: Tensor = self.pool(self.norm(self.conv(map_BChw)))
        return pooled


def grid_mask(mask_BHW: Tensor | None, rows: int, columns: int, stride: int, features: Tensor) -> Tensor:
    """bool [B, rows, columns]: where the upper left pixel of a cell is picture. mask_BHW: None for pictures that are
    everywhere. stride: pixels to a cell."""
    if mask_BHW is None:
        return torch.ones(len(features), rows, columns, dtype=torch.bool, device=features.device)
    return mask_BHW[:, ::stride, ::stride][:, :rows, :columns]
