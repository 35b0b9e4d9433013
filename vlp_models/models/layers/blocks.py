"""Transformer blocks with the normalisation after each residual sum (post-LN), as in BERT.

Shape suffixes: B batch, T tokens, D hidden, N hypotheses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import KeyValues, MultiHeadAttention
from vlp_models.models.layers.reading import Reading


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

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None, reading: Reading | None = None) -> Tensor:
        """With a causal `reading`, of the tokens that it has."""
        x = self.attention_end(x_BTD, self.attention(x_BTD, mask, reading))
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

    def forward(
        self, x_BTD: Tensor, mask: Tensor, memory_BSD: Tensor, memory_mask: Tensor, reading: Reading | None = None
    ) -> Tensor:
        """`memory_BSD` may be of fewer images than there are texts (`MultiHeadAttention.cross`). With a causal
        `reading`, of the tokens that it has."""
        x = self.attention_end(x_BTD, self.attention(x_BTD, mask, reading))
        memory = self.cross.project(memory_BSD) if reading is None else reading.memory(self.cross, memory_BSD)
        x = self.cross_end(x, self.cross.cross(x, memory, memory_mask, reading))
        return self.ffn_end(x, self.ffn(x))

    def step(
        self, x_N1D: Tensor, past: KeyValues | None, memory: KeyValues, memory_mask: Tensor
    ) -> tuple[Tensor, KeyValues]:
        """One more token. `memory` comes from `self.cross.project`."""
        y, past = self.attention.step(x_N1D, past)
        x = self.attention_end(x_N1D, y)
        x = self.cross_end(x, self.cross.cross(x, memory, memory_mask))
        return self.ffn_end(x, self.ffn(x)), past


BLOCKS = (TransformerBlock, ModalityBlock, DecoderBlock)
