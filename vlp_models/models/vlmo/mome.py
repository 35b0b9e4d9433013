"""The block of a MoME transformer (section 3.2): attention that all share, and an expert for each modality.

    H' = MSA(LN(H)) + H
    H  = MoME-FFN(LN(H')) + H'

An expert is a feed-forward net and the norm before it. The scales of the two sub-layers are the block's, not an
expert's.

Shape suffixes: M packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import FeedForward, OwnBlock
from vlp_models.models.layers.packing import Packing

# `each`: of a pair, an image's tokens go through the vision expert, a text's through the language expert
Route = Literal["vision", "language", "vision_language", "each"]


class Expert(nn.Module):
    def __init__(self, hidden: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.ffn = FeedForward(hidden, intermediate)

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.ffn(self.norm(x_MD))


class MoMEBlock(OwnBlock):
    """experts: their names, or `shared` alone, which then takes every token."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        intermediate: int,
        *,
        experts: Sequence[str],
        layer_scale: float,
        drop_path: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        # Its key bias adds the same to all scores of a query, so it changes nothing; the public code has none.
        self.attention = MultiHeadAttention(hidden, heads)
        self.experts = nn.ModuleDict({name: Expert(hidden, intermediate, eps) for name in experts})
        self.layer_scale = layer_scale
        if layer_scale:
            self.attention_scale = nn.Parameter(torch.full((hidden,), layer_scale))
            self.expert_scale = nn.Parameter(torch.full((hidden,), layer_scale))

    def reset_scales(self) -> None:
        """After whatever draws initial weights."""
        if self.layer_scale:
            nn.init.constant_(self.attention_scale, self.layer_scale)
            nn.init.constant_(self.expert_scale, self.layer_scale)

    def forward(self, x_MD: Tensor, mask: Tensor | None, packing: Packing, route: Route) -> Tensor:
        """mask: as `MultiHeadAttention` takes it. With the route `each`, rows before `packing.split` are image."""
        sequences_M = packing.sequences_M if self.drop_path and self.training else None
        y = self.attention(self.attention_norm(x_MD), mask, packing)
        x_MD = x_MD + self._dropped(self._scaled(y, "attention_scale"), sequences_M, packing)
        if "shared" in self.experts:
            y = self.experts["shared"](x_MD)
        elif route != "each":
            y = self.experts[route](x_MD)
        else:
            image, text = x_MD[: packing.split], x_MD[packing.split :]
            y = torch.cat([self.experts["vision"](image), self.experts["language"](text)])
        return x_MD + self._dropped(self._scaled(y, "expert_scale"), sequences_M, packing)

    def _scaled(self, y_MD: Tensor, name: str) -> Tensor:
        return y_MD * getattr(self, name) if self.layer_scale else y_MD

    def _dropped(self, y_MD: Tensor, sequences_M: Tensor | None, packing: Packing) -> Tensor:
        """Stochastic depth (Huang et al. 2016): in training a sequence skips the sub-layer now and then."""
        if sequences_M is None:
            return y_MD
        kept = torch.rand(packing.shape[0], device=y_MD.device) >= self.drop_path
        scale = kept.to(y_MD.dtype) / max(1 - self.drop_path, 1e-6)
        return y_MD * scale[sequences_M][:, None]
