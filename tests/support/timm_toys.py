"""timm's smallest networks with random weights as files, in place of downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

SMALL = "test_efficientnet"  # 160 pixels, a last map of 5 x 5 cells with 256 channels


def network(model: str = SMALL, **options: Any) -> Any:
    """Return a network in eval mode without timm's initial zeros, which would hide mistakes."""
    torch.manual_seed(0)
    net: Any = timm.create_model(model, pretrained=False, **options).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return with_statistics(net)


def with_statistics(net: Any) -> Any:
    """Draw random running means and variances of batch norms."""
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.2)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return net


def write_weights(path: Path, model: str = SMALL, **options: Any) -> str:
    """Write the weights and return their path as in params.yaml."""
    state = {name: tensor.contiguous() for name, tensor in network(model, **options).state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return str(path)


def keep_in_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, model: str = SMALL) -> None:
    """Put a network with random weights into timm's cache under this name, and block the internet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kept = cache / f"models--timm--{name}"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    write_weights(kept / "snapshots" / "abc" / "model.safetensors", model)
