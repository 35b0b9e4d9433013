"""Any of timm's CNNs as a trainable visual encoder that returns one feature map, with timm's names of weights.

It is SOHO's image encoder, and can precede VLMo's patches. `small` is the small detector's CNN
(vision/small_backbone.py), not one of timm's; it trains from scratch within minutes.

Shape suffixes: B images, H/W pixels, C channels, h/w cells of the feature map.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import timm
from torch import Tensor, nn

from vlp_models.errors import ParamsError
from vlp_models.vision.small_backbone import STRIDE, SmallBackbone

# The first layers of ResNets and timm's other CNNs, which may stay frozen for a whole run
STEM = ("conv1.", "bn1.", "layer1.", "stem.", "stages.0.")
SMALL, SMALL_STEM = "small", ("blocks.0.", "blocks.1.")

KEYS = ("backbone", "backbone_stage")
FETCHES = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "scriptable"}


class Backbone(nn.Module):
    """`net` is timm's model with random weights, without the layers after the requested feature map."""

    def __init__(self, name: str, stage: int, options: Mapping[str, Any], keys: tuple[str, str] = KEYS) -> None:
        """
        Args:
            name: of a timm model, or `small`.
            stage: the index of its feature map, as `timm.create_model(name).feature_info` lists them.
            options: for `timm.create_model`.
            keys: the config keys of name and stage, for messages.

        Raises:
            ParamsError: timm has no such model, the model has no such options, or no such feature map.
        """
        super().__init__()
        self._stem: tuple[str, ...] = STEM
        if name == SMALL:
            channels = options.get("channels", [24, 48, 96])
            three = isinstance(channels, list) and len(channels) == 3
            # Not isinstance, which accepts True as a width.
            valid = three and all(type(width) is int and width > 0 for width in channels)
            if not valid or set(options) - {"channels"} or stage not in (0, -1):
                raise ParamsError(
                    f"config: backbone `{SMALL}` has one feature map, and an option `channels: [24, 48, 96]` (three "
                    f"blocks); got {dict(options)} and backbone_stage {stage}"
                )
            self.net: Any = SmallBackbone(tuple(channels))
            self._stem, self.stage, self.stride, self.channels = SMALL_STEM, 0, STRIDE, self.net.out_channels
            return
        forbidden = sorted(FETCHES & set(options))
        if forbidden or ":" in name:
            with_options = f" with {', '.join(forbidden)}" if forbidden else ""
            raise ParamsError(
                f"config: {keys[0]} `{name}`{with_options}: weights are not downloaded; `vlp import-checkpoint` reads "
                "them from a file"
            )
        try:
            net: Any = timm.create_model(name, pretrained=False, **{"num_classes": 0, **options})
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise ParamsError(f"config: {keys[0]} `{name}`: {error}; `timm.list_models()` lists the names") from None
        # A list, or timm's `FeatureInfo`, which has a length and indices.
        info = net.feature_info
        maps = info if isinstance(info, list) else [info[i] for i in range(len(info))]
        if not hasattr(net, "forward_intermediates") or not -len(maps) <= stage < len(maps):
            raise ParamsError(
                f"config: {keys[0]} `{name}` has the feature maps 0 to {len(maps) - 1}; {keys[1]} is {stage}"
            )
        # A negative stage counts from the last map.
        self.stage = stage % len(maps)
        self.channels = int(maps[self.stage]["num_chs"])
        self.stride = int(maps[self.stage]["reduction"])  # pixels per cell
        net.prune_intermediate_layers([self.stage], prune_norm=False, prune_head=True)
        self.net = net

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, h, w]"""
        if isinstance(self.net, SmallBackbone):
            return cast(Tensor, self.net(pixels_B3HW))
        maps: list[Tensor] = self.net.forward_intermediates(
            pixels_B3HW, indices=[self.stage], intermediates_only=True, output_fmt="NCHW"
        )
        return maps[-1]

    def stem(self) -> list[nn.Parameter]:
        return [p for name, p in self.net.named_parameters() if name.startswith(self._stem)]

    def rest(self) -> list[nn.Parameter]:
        return [p for name, p in self.net.named_parameters() if not name.startswith(self._stem)]
