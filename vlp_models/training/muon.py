"""Muon: momentum whose update is made orthogonal, for the weight matrices of hidden layers.

K. Jordan et al.: "Muon: An optimizer for hidden layers in neural networks", 2024. The mathematics, the options and
their defaults are those of torch.optim.Muon, which always iterates in bfloat16. Here the iteration is in float32 where
the hardware has no bfloat16 of its own (there it takes a quarter of the time), and matrices of one shape go through it
together.

Shape suffixes: N matrices of one shape, H rows, W columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlp_models.training.precision import has_native_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
STEPS = 5
EPS = 1e-7
BATCHED_UP_TO = 512  # rows or columns: larger matrices fill the processor alone, and would only be copied

Adjust = Literal["original", "match_rms_adamw"]


def orthogonalized(matrices_NHW: Tensor, *, dtype: torch.dtype, steps: int = STEPS, eps: float = EPS) -> Tensor:
    """Each matrix with its singular values brought near 1 (to between 0.7 and 1.2), by Newton-Schulz in `dtype`."""
    a, b, c = COEFFICIENTS
    x = matrices_NHW.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """B = momentum * B + (1 - momentum) * gradient, then w = w (1 - lr * decay) - lr * ratio * orthogonalized(...).

    The update is B, or with Nesterov's momentum what the next B would be. ratio: `match_rms_adamw` is
    0.2 * sqrt(max(H, W)), so that AdamW's learning rates fit; `original` is sqrt(max(1, H / W)).

    dtype: of the iteration; None: bfloat16 where the hardware has it, else float32. float64 weights stay in float64.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust: Adjust = "match_rms_adamw",
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults | {"adjust": adjust})
        self._dtype = dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon is for matrices, not for a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        gradients = [p.grad for p in weights]
        for p in weights:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in weights]
        momentum = group["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        wanted = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for indices in _alike(weights):
            first = weights[indices[0]]
            rows, columns = first.shape
            updates_NHW = orthogonalized(
                torch.stack([wanted[i] for i in indices]), dtype=self._iterates_in(first.device, first.dtype)
            )
            square = max(rows, columns) if group["adjust"] == "match_rms_adamw" else max(1, rows / columns)
            ratio = math.sqrt(square) * (0.2 if group["adjust"] == "match_rms_adamw" else 1.0)
            for i, update in zip(indices, updates_NHW.unbind(), strict=True):
                weights[i].add_(update, alpha=-group["lr"] * ratio)

    def _iterates_in(self, device: torch.device, of_weights: torch.dtype) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        if of_weights == torch.float64:
            return torch.float64
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32


def _alike(weights: list[Tensor]) -> list[list[int]]:
    """Indices of weights that are iterated on together: of one shape, device and type, and small."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, weight in enumerate(weights):
        small = max(weight.shape) <= BATCHED_UP_TO
        groups[(weight.shape, weight.device, weight.dtype, None if small else i)].append(i)
    return list(groups.values())
