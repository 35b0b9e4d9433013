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


class PositionBias(nn.Module):
    """Tokens stand in the order [CLS] patches, [CLS] words [SEP]. Everything starts at zero.

    image_LHR, cross_LH2, text_LHR: [L * H, rows], so that a row of memory is one head of one layer.
    """

    image_index_SS: Tensor

    def __init__(self, layers: int, heads: int, grid: int, max_text_len: int) -> None:
        super().__init__()
        self.layers, self.heads, self.grid, self.max_text_len = layers, heads, grid, max_text_len
        self.image_tokens = 1 + grid * grid
        columns = layers * heads
        self.image = nn.Parameter(torch.zeros(columns, (2 * grid - 1) ** 2 + 3))
        self.cross = nn.Parameter(torch.zeros(columns, 2))  # text -> image, image -> text
        self.text = nn.Parameter(torch.zeros(columns, 2 * max_text_len))
        self.register_buffer("image_index_SS", image_index(grid), persistent=False)
        self._kept: dict[bool, tuple[tuple[object, ...], int, Tensor]] = {}

    def forward(self, text_len: int, *, image: bool = True) -> tuple[Tensor, ...]:
        """Of each layer, [H, N, N]: rows are queries. text_len: T, may be 0."""
        # Weights made in inference mode don't tell when they change, so nothing is kept of them.
        if torch.is_grad_enabled() or self.training or self.image.is_inference():
            return self._gather(text_len, image).unbind(0)
        # A batch's texts are as long as its longest, so what is kept is the longest's: others' are its corner.
        state = self._state()
        kept = self._kept.get(image)
        if kept is None or kept[0] != state or kept[1] < text_len:
            kept = self._kept[image] = (state, text_len, self._gather(text_len, image))
        width = text_len + self.image_tokens * image
        return kept[2][..., :width, :width].unbind(0)

    def train(self, mode: bool = True) -> PositionBias:
        self._kept.clear()
        return super().train(mode)

    def index(self, text_len: int) -> Tensor:
        """int64 [N, N]: of a pair, rows of the three tables beside each other."""
        before_text = self.image.shape[1] + 2
        text_TT = before_text + text_index(text_len, self.max_text_len, self.image.device)
        to_text_ST = text_TT.new_full((self.image_tokens, text_len), before_text - 1)
        to_image_TS = text_TT.new_full((text_len, self.image_tokens), before_text - 2)
        above = torch.cat([self.image_index_SS, to_text_ST], 1)
        return torch.cat([above, torch.cat([to_image_TS, text_TT], 1)])

    def _gather(self, text_len: int, image: bool) -> Tensor:
        """[L, H, N, N]; of either alone from its own table, so that the others have no gradient at all."""
        table: Tensor = self.text
        if not image:
            table, index_NN = self.text, text_index(text_len, self.max_text_len, self.text.device)
        elif not text_len:
            table, index_NN = self.image, self.image_index_SS
        else:
            table, index_NN = torch.cat([self.image, self.cross, self.text], 1), self.index(text_len)
        # gather, not index_select: on a CPU the gradient of the latter takes the columns one by one
        rows = table.gather(1, index_NN.flatten().expand(len(table), -1))
        return rows.view(self.layers, self.heads, *index_NN.shape)

    def _state(self) -> tuple[object, ...]:
        """What tells that a weight may have changed."""
        return tuple((p.data_ptr(), p._version, p.dtype, p.device) for p in (self.image, self.cross, self.text))


def image_index(grid: int) -> Tensor:
    """int64 [S, S]: the row of `PositionBias.image` for each query and key."""
    span, patches = 2 * grid - 1, torch.arange(grid * grid)
    y, x = patches // grid, patches % grid
    index = torch.full((1 + len(patches), 1 + len(patches)), span * span)  # [CLS] -> patch
    index[1:, 1:] = (y[:, None] - y + grid - 1) * span + x[:, None] - x + grid - 1
    index[1:, 0] = span * span + 1
    index[0, 0] = span * span + 2
    return index


def text_index(length: int, max_text_len: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [T, T]: the row of `PositionBias.text` for each query and key."""
    words, special = torch.arange(length, device=device), 2 * max_text_len - 3
    index = words[None, :] - words[:, None] + max_text_len - 2
    index[:1] = special  # [CLS] -> word
    index[:, :1] = special + 1
    index[:1, :1] = special + 2
    return index
