"""Pooling by matrix products is torchvision's pooling: values and gradients."""

from __future__ import annotations

import torch
from torchvision.ops import MultiScaleRoIAlign

from vlp_models.vision.detector import SeparableRoIAlign


def test_values_and_gradients_are_torchvisions() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs, ours = MultiScaleRoIAlign(["0"], output_size=5, sampling_ratio=2), SeparableRoIAlign(5, 2, stride=8)
    sizes = [(80, 128), (80, 128)]
    boxes = []
    for count in (40, 7):
        corner = torch.rand(count, 2, generator=generator) * torch.tensor([130.0, 80.0])
        sides = torch.rand(count, 2, generator=generator) * torch.tensor([90.0, 60.0])  # some leave the image
        boxes.append(torch.cat([corner - 10, corner - 10 + sides], dim=1))
    boxes[1] = torch.cat(
        [boxes[1], torch.tensor([[3.0, 4.0, 3.0, 4.0], [0.0, 0.0, 128.0, 80.0]])]
    )  # a point, the whole
    results = []
    for pool in (theirs, ours):
        maps = torch.randn(2, 6, 10, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        pooled = pool({"0": maps}, boxes, sizes)
        pooled.square().sum().backward()
        results.append((pooled.detach(), maps.grad))
    assert results[0][0].shape == results[1][0].shape == (49, 6, 5, 5)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_no_box_at_all() -> None:
    pooled = SeparableRoIAlign(5, 2, stride=8)({"0": torch.rand(1, 6, 4, 4)}, [torch.zeros(0, 4)], [(32, 32)])
    assert pooled.shape == (0, 6, 5, 5)
