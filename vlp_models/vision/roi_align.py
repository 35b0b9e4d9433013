"""RoIAlign (He et al., 2017) on one map, as matrix products.

Bilinear sampling is a product of a weight along y and one along x, so a box pools to W_y M W_x'. The values are
torchvision's (`aligned=False`) up to rounding. The gradient of its kernel for CPUs was nearly half of what training the
small detector took.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign


class SeparableRoIAlign(MultiScaleRoIAlign):
    """torchvision's `MultiScaleRoIAlign` over a single map.

    Args:
        output_size: bins along each side.
        sampling_ratio: samples a bin along each side, which are averaged.
        stride: of the map, in pixels.
    """

    def __init__(self, output_size: int, sampling_ratio: int, stride: int) -> None:
        super().__init__(["0"], output_size, sampling_ratio)
        self.bins = output_size
        self.stride = stride

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """
        Args:
            x: one map, [B, C, H, W].
            boxes: of each image, [R, 4] in pixels, x1 y1 x2 y2.

        Returns:
            [R of all images, C, output_size, output_size]
        """
        (maps_BCHW,) = x.values()
        return torch.cat([self._pool(m_CHW, b_R4) for m_CHW, b_R4 in zip(maps_BCHW, boxes, strict=True)])

    def _pool(self, map_CHW: Tensor, boxes_R4: Tensor) -> Tensor:
        channels, height, width = map_CHW.shape
        count, bins = len(boxes_R4), self.bins
        x_RSW = self._weights(boxes_R4[:, 0], boxes_R4[:, 2], width)
        y_RSH = self._weights(boxes_R4[:, 1], boxes_R4[:, 3], height)
        along_x = x_RSW.flatten(0, 1) @ map_CHW.permute(2, 0, 1).reshape(width, channels * height)
        pooled = along_x.view(count, bins * channels, height) @ y_RSH.transpose(1, 2)  # [R, x bins * C, y bins]
        return pooled.view(count, bins, channels, bins).permute(0, 2, 3, 1)

    def _weights(self, first_R: Tensor, last_R: Tensor, length: int) -> Tensor:
        """[R, bins, length]: how much of each place of the map a bin takes; samples far outside take nothing."""
        samples = self.bins * self.sampling_ratio
        start_R, end_R = first_R / self.stride, last_R / self.stride
        steps_S = (torch.arange(samples, device=first_R.device, dtype=first_R.dtype) + 0.5) / samples
        at_RS = start_R[:, None] + (end_R - start_R).clamp(min=1)[:, None] * steps_S
        inside_RS = (at_RS >= -1) & (at_RS <= length)
        places_L = torch.arange(length, device=first_R.device, dtype=first_R.dtype)
        hat_RSL = (1 - (at_RS.clamp(0, length - 1)[..., None] - places_L).abs()).clamp(min=0) * inside_RS[..., None]
        return hat_RSL.unflatten(1, (self.bins, self.sampling_ratio)).mean(2)
