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
