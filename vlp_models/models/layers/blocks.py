"""Transformer blocks that normalize after each residual sum (post-LN), as in BERT, and BERT's initialization.

Tokens are padded, [B, T, D], or packed, [M, D], with their `Packing`.

Shape suffixes: B batch, T tokens, D hidden, M packed tokens, N hypotheses.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing


class FamilyBlock(nn.Module):
    """Base class of a family's own transformer block. Muon optimizes its matrices; `trainer.compile` and
    `trainer.activation_checkpointing` apply to it.

    passes: the methods that training calls. With activation checkpointing they run twice per update, so they must not
    change buffers (batch normalization's statistics).
    """

    passes: ClassVar[tuple[str, ...]] = ("forward",)


class FeedForward(nn.Sequential):
    """Linear, GELU (exact), Linear."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__(nn.Linear(hidden, intermediate), nn.GELU(), nn.Linear(intermediate, hidden))


class Residual(nn.Module):
    """LayerNorm(x + dropout(y)), at the end of every sub-layer."""

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

    def forward(self, x: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        x = self.attention_end(x, self.attention(x, mask, packing))
        return self.ffn_end(x, self.ffn(x))

    def step(self, x_ND: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """Process one more token of a causal sequence with the cached `past`. Returns the extended past as well."""
        y, past = self.attention.step(x_ND, past)
        x = self.attention_end(x_ND, y)
        return self.ffn_end(x, self.ffn(x)), past


class ModalityBlock(nn.Module):
    """Self-attention over text and image together, then a separate feed-forward net for each."""

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

    def forward(self, x_MD: Tensor, mask: Tensor | None, packing: Packing) -> Tensor:
        """[M, D] -> [M, D]. The first `packing.split` rows are text, the rest image."""
        # Attention mixes text and image; after it each row needs only itself, so the rows can be split.
        x = self.attention_end(x_MD, self.attention(x_MD, mask, packing))
        text, image = x[: packing.split], x[packing.split :]
        text = self.text_end(text, self.text_ffn(text))
        image = self.image_end(image, self.image_ffn(image))
        return torch.cat([text, image])


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
        self,
        x: Tensor,
        mask: Tensor,
        memory: KeyValues,
        memory_mask: Tensor,
        packing: Packing | None = None,
        by_image: Packing | None = None,
    ) -> Tensor:
        """Decode tokens, all at once.

        memory: of `self.cross.project`. by_image: packed tokens by the image they attend to (`Packing.by_owner`).
        """
        x = self.attention_end(x, self.attention(x, mask, packing))
        x = self.cross_end(x, self.cross.cross(x, memory, memory_mask, by_image))
        return self.ffn_end(x, self.ffn(x))

    def step(
        self, x_ND: Tensor, past: KeyValues | None, memory: KeyValues, memory_mask: Tensor, by_image: Packing
    ) -> tuple[Tensor, KeyValues]:
        """Process one more token of each hypothesis. Returns the extended past as well."""
        y, past = self.attention.step(x_ND, past)
        x = self.attention_end(x_ND, y)
        x = self.cross_end(x, self.cross.cross(x, memory, memory_mask, by_image))
        return self.ffn_end(x, self.ffn(x)), past


# What Muon, `trainer.compile` and activation checkpointing apply to.
BLOCKS = (TransformerBlock, ModalityBlock, DecoderBlock, FamilyBlock)


def init_weights(module: nn.Module, std: float = 0.02, *, skip: tuple[str, ...] = ()) -> None:
    """Initialize as BERT: matrices N(0, std), biases 0, norms' weights 1. Draws from torch's global generator.

    Scalars (a temperature, a gate) and parameters whose name starts with one of `skip` keep their value.
    """
    for name, parameter in module.named_parameters():
        if name.startswith(skip):
            continue
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        elif parameter.dim() == 1:  # a norm's weight
            nn.init.ones_(parameter)
