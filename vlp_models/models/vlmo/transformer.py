"""VLMo's multiway transformer: the block with modality experts (section 3.2), and relative position biases.

    H' = MSA(LN(H)) + H
    H  = MoME-FFN(LN(H')) + H'

Attention is shared. An expert is a feed-forward net together with the norm before it. The scales of the two sub-layers
belong to the block, not to an expert.

Relative position biases are what attention adds to its scores, by the positions of two tokens (BEiT, section 2.3; T5).
For an image: a learned number for each head, layer and offset between two patches, and three more from [CLS] to a
patch, from a patch to [CLS], and from [CLS] to itself. For a text: the same with offsets between words. Between an
image and a text offsets have no meaning: one number each way. The rows of the tables follow the public code (whose
single table has a column for each head of each layer, and all rows in the order image, text to image, image to text,
text):

    image  (y - y' + g - 1) * (2g - 1) + (x - x' + g - 1) for query (y, x) and key (y', x') in a grid of g * g patches;
           then [CLS] -> patch, patch -> [CLS], [CLS] -> [CLS]
    text   (j - i) + n - 2 for query i and key j, both 1 to n - 1; then [CLS] -> word, word -> [CLS], [CLS] -> [CLS]

Shape suffixes: M packed tokens, D hidden; L layers, H heads, S image tokens ([CLS] and patches), T text tokens,
N = S + T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import FamilyBlock, FeedForward
from vlp_models.models.layers.packing import Packing

# `each`: in a pair, image tokens go through the vision expert and text tokens through the language expert
Route = Literal["vision", "language", "vision_language", "each"]


class Expert(nn.Module):
    """A feed-forward net and the norm before it."""

    def __init__(self, hidden: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.ffn = FeedForward(hidden, intermediate)

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.ffn(self.norm(x_MD))


class MoMEBlock(FamilyBlock):
    """A mixture-of-modality-experts block.

    experts: their names, or only `shared`, which then processes every token.
    """

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
        # The key bias adds the same number to all scores of a query, so it has no effect; the public code has none.
        self.attention = MultiHeadAttention(hidden, heads)
        self.experts = nn.ModuleDict({name: Expert(hidden, intermediate, eps) for name in experts})
        self.layer_scale = layer_scale
        if layer_scale:
            self.attention_scale = nn.Parameter(torch.full((hidden,), layer_scale))
            self.expert_scale = nn.Parameter(torch.full((hidden,), layer_scale))

    def reset_scales(self) -> None:
        """Set the scales to their initial value. Call it after initializing the other weights."""
        if self.layer_scale:
            nn.init.constant_(self.attention_scale, self.layer_scale)
            nn.init.constant_(self.expert_scale, self.layer_scale)

    def forward(self, x_MD: Tensor, mask: Tensor | None, packing: Packing, route: Route) -> Tensor:
        """[M, D] -> [M, D]. mask: see `MultiHeadAttention`. With route `each`, rows before `packing.split` are image
        tokens, and stochastic depth draws once for a pair's image and once for its text, as in the public code."""
        sequences_M = packing.sequences_M if self.drop_path and self.training else None
        y = self.attention(self.attention_norm(x_MD), mask, packing)
        x_MD = x_MD + self._drop_sequences(self._scale(y, "attention_scale"), sequences_M, packing.shape[0])
        draws_M, draws = sequences_M, packing.shape[0]
        if "shared" in self.experts:
            y = self.experts["shared"](x_MD)
        elif route != "each":
            y = self.experts[route](x_MD)
        else:
            image, text = x_MD[: packing.split], x_MD[packing.split :]
            y = torch.cat([self.experts["vision"](image), self.experts["language"](text)])
            if sequences_M is not None:
                # Draws of all pairs' texts first, then of their images
                draws_M = torch.cat([sequences_M[: packing.split] + draws, sequences_M[packing.split :]])
                draws *= 2
        return x_MD + self._drop_sequences(self._scale(y, "expert_scale"), draws_M, draws)

    def _scale(self, y_MD: Tensor, name: str) -> Tensor:
        return y_MD * getattr(self, name) if self.layer_scale else y_MD

    def _drop_sequences(self, y_MD: Tensor, draws_M: Tensor | None, draws: int) -> Tensor:
        """Apply stochastic depth (Huang et al. 2016): in training, drop a sub-layer's output for random sequences.

        draws_M: the draw of each row; None: nothing is dropped. draws: their number.
        """
        if draws_M is None:
            return y_MD
        is_retained = torch.rand(draws, device=y_MD.device) >= self.drop_path
        # Retained outputs grow, so that the expectation stays the same.
        scale = is_retained.to(y_MD.dtype) / max(1 - self.drop_path, 1e-6)
        return y_MD * scale[draws_M][:, None]


class PositionBias(nn.Module):
    """The relative position biases of all layers, initially zero. Token order: [CLS] patches, [CLS] words [SEP].

    All layers' biases are gathered at once, and once per training step: an image's or a text's biases are a corner of a
    pair's. In eval mode they are cached until a weight changes.

    The tables are [L * H, rows], so that a row of memory is one head of one layer.
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
        self._cache: dict[bool, tuple[tuple[object, ...], int, Tensor]] = {}

    def forward(self, text_len: int, *, image: bool = True) -> tuple[Tensor, ...]:
        """Return each layer's biases, [H, N, N]; rows are queries. text_len: T, may be 0."""
        # Weights created in inference mode have no version counter, so their biases cannot be cached.
        if torch.is_grad_enabled() or self.training or self.image.is_inference():
            return self._gather(text_len, image).unbind(0)
        # Batches differ in the length of their longest text. The longest biases so far are cached; others are a corner.
        weights = (self.image, self.cross, self.text)
        state = tuple((p.data_ptr(), p._version, p.dtype, p.device) for p in weights)
        cached = self._cache.get(image)
        if cached is None or cached[0] != state or cached[1] < text_len:
            cached = self._cache[image] = (state, text_len, self._gather(text_len, image))
        width = text_len + self.image_tokens * image  # image is a bool
        return cached[2][..., :width, :width].unbind(0)

    def train(self, mode: bool = True) -> PositionBias:
        self._cache.clear()
        return super().train(mode)

    def index(self, text_len: int) -> Tensor:
        """Return int64 [N, N]: for a pair, rows of the three tables joined in the order image, cross, text."""
        before_text = self.image.shape[1] + 2
        text_TT = before_text + text_index(text_len, self.max_text_len, self.image.device)
        to_text_ST = text_TT.new_full((self.image_tokens, text_len), before_text - 1)
        to_image_TS = text_TT.new_full((text_len, self.image_tokens), before_text - 2)
        above = torch.cat([self.image_index_SS, to_text_ST], 1)
        below = torch.cat([to_image_TS, text_TT], 1)
        return torch.cat([above, below])

    def _gather(self, text_len: int, image: bool) -> Tensor:
        """[L, H, N, N]. An image or a text alone reads only its own table: the others get no gradient at all."""
        table: Tensor = self.text
        if not image:
            table, index_NN = self.text, text_index(text_len, self.max_text_len, self.text.device)
        elif not text_len:
            table, index_NN = self.image, self.image_index_SS
        else:
            table, index_NN = torch.cat([self.image, self.cross, self.text], 1), self.index(text_len)
        # gather, not index_select, whose CPU gradient processes the columns one by one
        rows = table.gather(1, index_NN.flatten().expand(len(table), -1))
        return rows.view(self.layers, self.heads, *index_NN.shape)


def image_index(grid: int) -> Tensor:
    """Return int64 [S, S]: the row of `PositionBias.image` for each query and key."""
    span, patches = 2 * grid - 1, torch.arange(grid * grid)
    y, x = patches // grid, patches % grid  # row and column of each patch
    index = torch.full((1 + len(patches), 1 + len(patches)), span * span)  # [CLS] -> patch
    index[1:, 1:] = (y[:, None] - y + grid - 1) * span + x[:, None] - x + grid - 1
    index[1:, 0] = span * span + 1  # patch -> [CLS]
    index[0, 0] = span * span + 2  # [CLS] -> [CLS]
    return index


def text_index(length: int, max_text_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 [T, T]: the row of `PositionBias.text` for each query and key."""
    words, special = torch.arange(length, device=device), 2 * max_text_len - 3
    index = words[None, :] - words[:, None] + max_text_len - 2
    index[:1] = special  # [CLS] -> word
    index[:, :1] = special + 1  # word -> [CLS]
    index[:1, :1] = special + 2  # [CLS] -> [CLS]
    return index
