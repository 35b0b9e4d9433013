"""torchvision's COCO detectors with random weights, in torchvision's download cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import get_model, get_model_weights
from torchvision.models.detection import FasterRCNN

MOBILE = "mobilenet_v3_large_320_fpn"  # the smallest


def fresh(backbone: str) -> FasterRCNN:
    """Return a model with random weights and calibrated batch norms, so that boxes differ."""
    torch.manual_seed(0)
    model = get_model(f"fasterrcnn_{backbone}", weights=None, weights_backbone=None)
    for module in model.backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.backbone(torch.randn(1, 3, 128, 128))
    return model.eval()


def keep_coco_detector(monkeypatch: pytest.MonkeyPatch, home: Path, backbone: str) -> tuple[Path, Any]:
    """Return the file in torchvision's cache below `home`, and torchvision's entry of the weights."""
    monkeypatch.setenv("TORCH_HOME", str(home))
    entry = get_model_weights(f"fasterrcnn_{backbone}")["DEFAULT"]
    file = home / "hub" / "checkpoints" / Path(entry.url).name  # torchvision's name for it
    file.parent.mkdir(parents=True)
    state = fresh(backbone).state_dict()  # published weights are of frozen batch norms, which have no counter
    torch.save({name: tensor for name, tensor in state.items() if "num_batches_tracked" not in name}, file)
    return file, entry
