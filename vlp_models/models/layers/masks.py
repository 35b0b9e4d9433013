"""Attention masks: bool, True where a query may attend, broadcastable to [B, heads, Q, K]."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_mask(mask_BT: Tensor) -> Tensor:
    """Every query sees every real token. [B, 1, 1, T]"""
    return mask_BT[:, None, None, :]


def causal_mask(mask_BT: Tensor) -> Tensor:
    """Every query sees itself and the real tokens before it. [B, 1, T, T]"""
    length = mask_BT.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=mask_BT.device).tril()
    return past & padding_mask(mask_BT)
