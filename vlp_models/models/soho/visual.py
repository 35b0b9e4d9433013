"""Images as SOHO's transformer reads them. Shape suffixes: B images, R cells of an image, N texts, D hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
