"""A CNN that trains from scratch in minutes: for the small detector, and for small models that read pixels."""

from __future__ import annotations

from torch import Tensor, nn

STRIDE = 8  # pixels per cell of its map


class SmallBackbone(nn.Module):
    """Three blocks of two 3x3 convolutions with batch norm; the first convolution of each block has stride 2."""

    def __init__(self, channels: tuple[int, int, int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        previous = 3
        for width in channels:
            layers += [_convolution(previous, width, stride=2), _convolution(width, width, stride=1)]
            previous = width
        self.blocks = nn.Sequential(*layers)
        self.out_channels = previous

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, channels[-1], H / 8, W / 8]"""
        return self.blocks(images_B3HW)


def _convolution(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )
