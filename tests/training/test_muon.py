"""Muon against torch's own, and against a reference in NumPy and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from vlp_models.common import device
from vlp_models.common.device import has_native_bfloat16
from vlp_models.training.optim import Muon, orthogonalize

SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (600, 8), (600, 8)]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def updated(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matches_torch_muon(dtype: torch.dtype) -> None:
    own, theirs = weights(), weights()
    start = [w.detach().clone() for w in own]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    found = updated(Muon(own, lr=0.02, weight_decay=0.1, dtype=dtype), own)
    wanted = updated(reference, theirs)
    for a, b, before in zip(found, wanted, start, strict=True):
        moved = (b - before).norm()
        assert (a - b).norm() < 0.02 * moved  # 8 bits of a bfloat16, five times over


def test_matches_the_definition() -> None:
    lr, decay, momentum = 0.02, 0.1, 0.9
    own = weights(torch.float64)
    slow = [w.detach().numpy().copy() for w in own]
    buffers = [np.zeros_like(w) for w in slow]
    for step in range(4):
        for i, gradient in enumerate(gradients(step)):
            g = gradient.double().numpy()
            buffers[i] = momentum * buffers[i] + (1 - momentum) * g
            update = momentum * buffers[i] + (1 - momentum) * g
            x = update.T if update.shape[0] > update.shape[1] else update
            x = x / np.linalg.norm(x)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            update = x.T if update.shape[0] > update.shape[1] else x
            ratio = 0.2 * max(update.shape) ** 0.5
            slow[i] = slow[i] * (1 - lr * decay) - lr * ratio * update
    optimizer = Muon(own, lr=lr, weight_decay=decay, momentum=momentum)
    for found, wanted in zip(updated(optimizer, own), slow, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-12)


def test_singular_values_are_close_to_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 20, 8), dtype=torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3


def test_zero_gradient_gives_zero_update() -> None:
    assert not orthogonalize(torch.zeros(2, 3, 4), dtype=torch.float32).any()


def test_weights_without_gradient_are_unchanged() -> None:
    own = weights()
    start = own[0].detach().clone()
    own[0].grad = torch.randn(SHAPES[0])
    Muon(own, lr=0.1).step()
    assert not torch.equal(own[0], start)
    for parameter, before in zip(own[1:], weights()[1:], strict=True):
        assert torch.equal(parameter, before)


def test_bfloat16_only_on_hardware_with_native_support(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for vendor, flags, native in (
        ("AuthenticAMD", {"avx2", "avx512f"}, False),
        ("AuthenticAMD", {"avx512f", "avx512_bf16"}, True),
        ("GenuineIntel", {"avx512f", "avx512_bf16"}, False),
        ("GenuineIntel", {"avx512_bf16", "amx_bf16"}, True),
        ("", {"bf16"}, True),  # Arm
    ):
        monkeypatch.setattr(device, "cpu_vendor", lambda vendor=vendor: vendor)
        monkeypatch.setattr(device, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert has_native_bfloat16(cpu) is native
        wanted = torch.bfloat16 if native else torch.float32
        assert Muon(weights(), lr=0.1)._iteration_dtype(cpu, torch.float32) == wanted
    assert Muon(weights(), lr=0.1, dtype=torch.float32)._iteration_dtype(cpu, torch.float32) == torch.float32
