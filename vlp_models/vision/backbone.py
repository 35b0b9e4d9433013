"""A timm backbone as what turns a picture into cells: its last feature map, others by choice, and its classifier.

Shape suffixes: C channels, F features, h/w cells of a map, N cells that are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Layout = Literal["NCHW", "NHWC", "NLC"]


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Enough, with its class names, to build it again.

    model        timm's name
    num_classes  of its classifier; 0: it has none
    levels       feature maps beside the last one, by their places in timm's `feature_info`
    side         pixels of the square that every picture becomes
    mean, std, interpolation  as timm's data config has them for the model
    feature_dim  numbers a cell has
    """

    model: str
    num_classes: int
    levels: tuple[int, ...]
    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation
    feature_dim: int = 0


class Backbone(nn.Module):
    """`net` is timm's model, whole. Its weights are random."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.net: Any = timm.create_model(config.model, pretrained=False, num_classes=config.num_classes)

    def forward(self, pixels_13HW: Tensor, max_cells: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """The cells of one picture, row by row.

        The grid is that of the finest map asked for; coarser maps are repeated in it. Where it has more than
        `max_cells`, neighbours are averaged, down to the largest grid that fits. The classifier reads each cell as if
        the whole picture were like it.

        Returns:
            features [N, F], of each chosen level and then what the classifier's last layer reads; logits [N, classes];
            (rows, columns).
        """
        last, levels = self._maps(pixels_13HW)
        layout, maps = self._layout(last), [*levels, self._as_map(last)]
        finest = max((m.shape[-2:] for m in maps), key=math.prod)
        maps = [m if m.shape[-2:] == finest else F.interpolate(m, size=finest, mode="nearest") for m in maps]
        rows, columns = (min(side, math.isqrt(max_cells)) for side in finest)
        cells = [F.adaptive_avg_pool2d(m, (rows, columns)).flatten(2)[0].T for m in maps]
        hidden, logits = self._classify(cells[-1], layout)
        return torch.cat([*cells[:-1], hidden], dim=1), logits, (rows, columns)

    def _maps(self, pixels_13HW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the classifier reads, as timm has it, and the chosen levels [1, C, h, w]."""
        levels = self.config.levels
        if not levels:
            return self.net.forward_features(pixels_13HW), []
        last, found = self.net.forward_intermediates(pixels_13HW, indices=sorted(levels), output_fmt="NCHW")
        return last, list(found)

    def map_of(self, pixels_13HW: Tensor) -> Tensor:
        """What the classifier reads, as a map: [1, C, h, w]."""
        return self._as_map(self._maps(pixels_13HW)[0])

    def _layout(self, last: Tensor) -> Layout:
        if last.dim() == 3:
            return "NLC"
        return "NCHW" if last.shape[1] == self.net.num_features else "NHWC"

    def _as_map(self, last: Tensor) -> Tensor:
        """[1, C, h, w]"""
        layout = self._layout(last)
        if layout == "NLC":  # a square of patches, behind tokens that are none
            patches_1LC = last[:, self._prefix() :]
            return patches_1LC.mT.unflatten(2, (math.isqrt(patches_1LC.shape[1]), -1))
        return last.permute(0, 3, 1, 2) if layout == "NHWC" else last

    def _classify(self, cells_NC: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Each cell before and behind the classifier's last layer: [N, ...], [N, classes]."""
        if layout == "NLC":  # whichever token is read, it is the cell
            alone = cells_NC[:, None].expand(-1, 1 + self._prefix(), -1)
        else:
            alone = cells_NC[:, :, None, None] if layout == "NCHW" else cells_NC[:, None, None]
        hidden = self.net.forward_head(alone, pre_logits=True).flatten(1)
        logits = self.net.forward_head(alone) if self.config.num_classes else hidden[:, :0]
        return hidden, logits

    def _prefix(self) -> int:
        return int(getattr(self.net, "num_prefix_tokens", 0))
