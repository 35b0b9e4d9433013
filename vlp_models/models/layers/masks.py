"""Attention masks: bool, True where a query may attend, broadcastable to [B, heads, Q, K]."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_mask(mask_BT: Tensor) -> Tensor:
    """Every query sees every real token. [B, 1, 1, T]"""
    return mask_BT[:, None, None, :]


def causal_mask(length: int, device: torch.device | str = "cpu") -> Tensor:
    """Every query sees itself and the tokens before it. Padding stands behind, where no real token looks.
    [1, 1, T, T]"""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]


def prefix_mask(mask_NL: Tensor, prefix: int, causal_N: Tensor | None = None) -> Tensor:
    """A sequence of which the first `prefix` places are seen by all; the places behind them see each other, or, of the
    causal sequences, what stands before them. Built where the arguments are, from a bool a sequence.

    mask_NL bool: the real tokens. causal_N bool; None: no sequence is. [N, 1, 1, L] or [N, 1, L, L]
    """
    if causal_N is None:
        return padding_mask(mask_NL)
    places_L = torch.arange(mask_NL.shape[1], device=mask_NL.device)
    before_LL = (places_L < prefix) | (places_L <= places_L[:, None])  # one row a query
    return ((before_LL | ~causal_N[:, None, None]) & mask_NL[:, None])[:, None]
