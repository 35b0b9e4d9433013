"""The scenes of a study as small pictures, for models that read pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlp_models.synthetic.scenes.scene import Scene, render


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """pixels_I3HW: uint8."""

    pixels_I3HW: Tensor

    def __len__(self) -> int:
        return len(self.pixels_I3HW)

    def normalized(self, rows: Tensor) -> Tensor:
        """Some of them, from -1 to 1. [B, 3, H, W]"""
        return self.pixels_I3HW[rows].float().div(127.5).sub(1)


def draw(scenes: Sequence[Scene], chance: Sequence[np.random.Generator]) -> Pictures:
    """chance: of each scene, for background, shades and noise."""
    pixels_IHW3 = np.stack([np.asarray(render(scene, rng)) for scene, rng in zip(scenes, chance, strict=True)])
    return Pictures(pixels_I3HW=torch.from_numpy(pixels_IHW3).permute(0, 3, 1, 2).contiguous())
