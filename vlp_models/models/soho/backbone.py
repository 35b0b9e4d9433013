"""Any of timm's CNNs as a trainable visual encoder: one of its feature maps, under timm's own names of weights.

Shape suffixes: B images, H/W pixels, C channels, h/w cells of the feature map.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
from torch import Tensor, nn

from vlp_models.errors import ParamsError

# What a ResNet learns first and keeps longest: frozen for the whole run where only the rest is to move.
STEM = ("conv1.", "bn1.", "layer1.", "stem.", "stages.0.")

FETCHES = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "scriptable"}


class Backbone(nn.Module):
    """`net` is timm's model, without what stands behind the feature map that is asked for. Weights are random."""

    def __init__(self, name: str, stage: int, options: Mapping[str, Any]) -> None:
        """
        Args:
            name: of timm's model.
            stage: which of its feature maps, as `timm.create_model(name).feature_info` lists them.
            options: for `timm.create_model`.

        Raises:
            ParamsError: timm knows no such model, it takes no such options, or gives no such feature map.
        """
        super().__init__()
        forbidden = sorted(FETCHES & set(options))
        if forbidden or ":" in name:
            raise ParamsError(
                f"config: backbone `{name}`{' with ' + ', '.join(forbidden) if forbidden else ''}: weights are not "
                "fetched from elsewhere; `vlp import-checkpoint` takes them from a file"
            )
        try:
            net: Any = timm.create_model(name, pretrained=False, **{"num_classes": 0, **options})
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ParamsError(f"config: backbone `{name}`: {error}; `timm.list_models()` has the names") from None
        info = net.feature_info
        maps = [info[i] for i in range(len(info))] if not isinstance(info, list) else info
        if not hasattr(net, "forward_intermediates") or not -len(maps) <= stage < len(maps):
            raise ParamsError(
                f"config: backbone `{name}` has the feature maps 0 to {len(maps) - 1}; backbone_stage is {stage}"
            )
        self.stage = stage % len(maps)
        self.channels = int(maps[self.stage]["num_chs"])
        self.stride = int(maps[self.stage]["reduction"])  # pixels to a cell
        net.prune_intermediate_layers([self.stage], prune_norm=False, prune_head=True)
        self.net = net

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """[B, C, h, w]"""
        found = self.net.forward_intermediates(
            pixels_B3HW, indices=[self.stage], intermediates_only=True, output_fmt="NCHW"
        )
        last: Tensor = found[-1]
        return last

    def stem(self) -> list[nn.Parameter]:
        return [p for name, p in self.net.named_parameters() if name.startswith(STEM)]

    def rest(self) -> list[nn.Parameter]:
        return [p for name, p in self.net.named_parameters() if not name.startswith(STEM)]
