"""Transformer blocks with the normalisation after each residual sum (post-LN), as in BERT.

Tokens come padded, [B, T, D], or packed, [M, D], with their `Packing`.

Shape suffixes: B batch, T tokens, D hidden, M packed tokens, N hypotheses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.packing import Packing


class OwnBlock(nn.Module):
    """What marks a transformer block that one family alone has, for those that treat blocks apart (Muon, FSDP)."""


class ManyWayBlock(nn.Module):
    """Likewise, of a block that is entered by other methods than `forward`. Its matrices are Muon's; it is no unit of
    FSDP's, which gathers weights where `forward` begins."""


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

    def forward(self, x: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        x = self.attention_end(x, self.attention(x, mask, packing))
        return self.ffn_end(x, self.ffn(x))

    def step(self, x_ND: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """One more token of a causal sequence whose earlier tokens left `past`."""
        y, past = self.attention.step(x_ND, past)
        x = self.attention_end(x_ND, y)
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

    def forward(self, x_MD: Tensor, mask: Tensor | None, packing: Packing) -> Tensor:
        """Packed tokens, those before `packing.split` text, the rest image."""
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
        """`memory` comes from `self.cross.project`. Of packed tokens, `by_image` says where they stand by image."""
        x = self.attention_end(x, self.attention(x, mask, packing))
        x = self.cross_end(x, self.cross.cross(x, memory, memory_mask, by_image))
        return self.ffn_end(x, self.ffn(x))

    def step(
        self, x_ND: Tensor, past: KeyValues | None, memory: KeyValues, memory_mask: Tensor, by_image: Packing
    ) -> tuple[Tensor, KeyValues]:
        """One more token of each hypothesis."""
        y, past = self.attention.step(x_ND, past)
        x = self.attention_end(x_ND, y)
        x = self.cross_end(x, self.cross.cross(x, memory, memory_mask, by_image))
        return self.ffn_end(x, self.ffn(x)), past


BLOCKS = (TransformerBlock, ModalityBlock, DecoderBlock, OwnBlock)
WITH_MATRICES = (*BLOCKS, ManyWayBlock)


def init_weights(module: nn.Module, std: float = 0.02, *, but: tuple[str, ...] = ()) -> None:
    """Matrices N(0, std), biases 0, LayerNorm and BatchNorm 1 and 0. Draws from torch's global generator.

    A parameter that is one number (a temperature, a gate) keeps the value that its module gave it, and so does what is
    named like one of `but` at its beginning.
    """
    for name, parameter in module.named_parameters():
        if name.startswith(but):
            continue
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
