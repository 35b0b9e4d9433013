"""Transformer blocks with the normalisation after each residual sum (post-LN), as in BERT.

Shape suffixes: B batch, T tokens, D hidden, N hypotheses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import KeyValues, MultiHeadAttention


class FeedForward(nn.Sequential):
    """Linear, GELU (exact), Linear."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__(nn.Linear(hidden, intermediate), nn.GELU(), nn.Linear(intermediate, hidden))


class Residual(nn.Module):
    """LayerNorm(x + dropout(y)): the end of every sub-layer."""

    def __init__(self, hidden: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x + self.dropout(y))


class TransformerBlock(nn.Module):
    """Self-attention, then a feed-forward net."""

    def __init__(
        self, hidden: int, heads: int, intermediate: int, *, dropout: float, attention_dropout: float, eps: float
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(hidden, heads, attention_dropout)
        self.attention_end = Residual(hidden, dropout, eps)
        self.ffn = FeedForward(hidden, intermediate)
        self.ffn_end = Residual(hidden, dropout, eps)

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention_end(x_BTD, self.attention(x_BTD, mask))
        return self.ffn_end(x, self.ffn(x))

    def step(self, x_N1D: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """One more token of a causal sequence whose earlier tokens left `past`."""
        y, past = self.attention.step(x_N1D, past)
        x = self.attention_end(x_N1D, y)
        return self.ffn_end(x, self.ffn(x)), past


class ModalityBlock(nn.Module):
    """Self-attention over text and image together, then one feed-forward net for each of the two."""

    def __init__(
        self, hidden: int, heads: int, intermediate: int, *, dropout: float, attention_dropout: float, eps: float
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(hidden, heads, attention_dropout)
        self.attention_end = Residual(hidden, dropout, eps)
        self.text_ffn = FeedForward(hidden, intermediate)
        self.text_end = Residual(hidden, dropout, eps)
        self.image_ffn = FeedForward(hidden, intermediate)
        self.image_end = Residual(hidden, dropout, eps)

    def forward(self, x_BTD: Tensor, mask: Tensor | None, text_length: int) -> Tensor:
        """The first `text_length` tokens are text, the rest image."""
        x = self.attention_end(x_BTD, self.attention(x_BTD, mask))
        text, image = x[:, :text_length], x[:, text_length:]
        text = self.text_end(text, self.text_ffn(text))
        image = self.image_end(image, self.image_ffn(image))
        return torch.cat([text, image], dim=1)


class DecoderBlock(nn.Module):
    """Self-attention, attention over a memory, then a feed-forward net (Vaswani et al. 2017)."""

    def __init__(
        self, hidden: int, heads: int, intermediate: int, *, dropout: float, attention_dropout: float, eps: float
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(hidden, heads, attention_dropout)
        self.attention_end = Residual(hidden, dropout, eps)
        self.cross = MultiHeadAttention(hidden, heads, attention_dropout)
        self.cross_end = Residual(hidden, dropout, eps)
        self.ffn = FeedForward(hidden, intermediate)
        self.ffn_end = Residual(hidden, dropout, eps)

    def forward(self, x_BTD: Tensor, mask: Tensor, memory: KeyValues, memory_mask: Tensor) -> Tensor:
        """`memory` comes from `self.cross.project`, perhaps of fewer images than there are texts: as for `step`."""
        x = self.attention_end(x_BTD, self.attention(x_BTD, mask))
        x_BKD = _by_image(x, len(memory.keys))
        x = self.cross_end(x, self.cross.cross(x_BKD, memory, memory_mask).reshape(x.shape))
        return self.ffn_end(x, self.ffn(x))

    def step(
        self, x_N1D: Tensor, past: KeyValues | None, memory: KeyValues, memory_mask: Tensor
    ) -> tuple[Tensor, KeyValues]:
        """One more token. `memory` may be of fewer images than hypotheses: N is a multiple of its batch size,
        hypotheses of one image lie together, and become that image's queries: nothing is copied."""
        y, past = self.attention.step(x_N1D, past)
        x_N1D = self.attention_end(x_N1D, y)
        x_BKD = _by_image(x_N1D, len(memory.keys))
        x_N1D = self.cross_end(x_N1D, self.cross.cross(x_BKD, memory, memory_mask).reshape(x_N1D.shape))
        return self.ffn_end(x_N1D, self.ffn(x_N1D)), past


def _by_image(x_NTD: Tensor, images: int) -> Tensor:
    """Rows of one image lie together and become its queries; a batch may have no rows."""
    rows, tokens, hidden = x_NTD.shape
    return x_NTD.reshape(images, rows // max(1, images) * tokens, hidden)


BLOCKS = (TransformerBlock, ModalityBlock, DecoderBlock)
