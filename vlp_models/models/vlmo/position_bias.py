"""Relative position biases: what attention adds to its scores, by where two tokens stand (BEiT, section 2.3; T5).

For an image, a learnt number for each head, layer and offset between two patches; three more from [CLS] to a patch,
from a patch to [CLS], and from [CLS] to itself. For a text the same with offsets between words. Between an image and
a text offsets mean nothing: one number each way.

Rows of the tables, as the public code's (its one table has a column for each head of each layer, and all rows in the
order image, text to image, image to text, text):

    image  (y - y' + g - 1) * (2g - 1) + (x - x' + g - 1) of query (y, x) and key (y', x') in a grid of g * g patches;
           then [CLS] -> patch, patch -> [CLS], [CLS] -> [CLS]
    text   (j - i) + n - 2 of query i and key j, both 1 to n - 1; then [CLS] -> word, word -> [CLS], [CLS] -> [CLS]

All layers' biases are gathered at once, and once in a training step: an image's or a text's are a corner of a pair's.
In eval mode they are kept until a weight changes.

Shape suffixes: L layers, H heads, R rows of a table, S image tokens ([CLS] and patches), T text tokens, N = S + T.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
