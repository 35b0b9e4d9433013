"""The encoder of DALL-E's dVAE, whose codes are BEiT's targets (Ramesh et al. 2021; public code: openai/DALL-E).

Read from its state dict (the released encoder.pkl holds a pickled module, which is not loaded: save its `state_dict()`
as .safetensors once, where you trust it). Layout: `blocks.input`, `blocks.group_1` to `group_4` of two residual blocks
each (`id_path` where the width changes; `res_path.conv_1` to `conv_4`), `blocks.output.conv`; each convolution a `w`
and a `b`. Three poolings: a code for every 8 x 8 pixels, so that 14 x 14 patches are looked at with 112 x 112 pixels.

BEiT cuts that second, smaller picture out of the file; here it is scaled down from the model's input.

Shape suffixes: B images, N patches, V codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Taker, read_state_dict

GROUPS, BLOCKS_A_GROUP, PIXELS_A_CODE = 4, 2, 8
LOGIT_EPS = 0.1  # pixels from 0 to 1 are brought to 0.1 to 0.9


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        middle = outputs // 4
        widths = (inputs, middle, middle, middle, outputs)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, size, padding=size // 2)
            for a, b, size in zip(widths, widths[1:], (3, 3, 3, 1), strict=False)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs:
            y = conv(F.relu(y))
        return self.skip(x) + y / (GROUPS * BLOCKS_A_GROUP) ** 2


class DVAE(nn.Module):
    """width: of the first group; the next ones are 2, 4 and 8 times as wide."""

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.input = nn.Conv2d(3, width, 7, padding=3)
        widths = [width, *(width * 2**group for group in range(GROUPS))]
        self.groups: Any = nn.ModuleList(
            nn.ModuleList(
                Residual(widths[g] if i == 0 else widths[g + 1], widths[g + 1]) for i in range(BLOCKS_A_GROUP)
            )
            for g in range(GROUPS)
        )
        self.output = nn.Conv2d(widths[-1], codes, 1)
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def load(cls, path: Path, codes: int) -> DVAE:
        """
        Raises:
            CheckpointError: no such file, or not a dVAE's encoder of this many codes.
        """
        state = read_state_dict(path)
        first, last = state.get("blocks.input.w"), state.get("blocks.output.conv.w")
        if first is None or last is None:
            raise CheckpointError(
                f"{path}: not the state dict of DALL-E's encoder: no blocks.input.w, no blocks.output"
            )
        if len(last) != codes:
            raise CheckpointError(f"{path}: {len(last)} codes; set the model's `image_codes: {len(last)}`, not {codes}")
        model, taker = cls(len(first), codes), Taker(state)
        for name, conv in model._named():
            conv.weight = nn.Parameter(taker.take(f"{name}.w", *conv.weight.shape), requires_grad=False)
            assert conv.bias is not None
            conv.bias = nn.Parameter(taker.take(f"{name}.b", *conv.bias.shape), requires_grad=False)
        taker.check("the encoder of DALL-E's dVAE")
        return model

    def _named(self) -> Iterator[tuple[str, nn.Conv2d]]:
        """Every convolution with its name there."""
        yield "blocks.input", self.input
        for g, group in enumerate(self.groups, 1):
            for i, block in enumerate(group, 1):
                at = f"blocks.group_{g}.block_{i}"
                for number, conv in enumerate(block.convs, 1):
                    yield f"{at}.res_path.conv_{number}", conv
                if isinstance(block.skip, nn.Conv2d):
                    yield f"{at}.id_path", block.skip
        yield "blocks.output.conv", self.output

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """[B, V, H / 8, W / 8]: logits of the codes. Pixels from 0 to 1."""
        x = self.input((1 - 2 * LOGIT_EPS) * pixels_B3HW + LOGIT_EPS)
        for g, group in enumerate(self.groups):
            for block in group:
                x = block(x)
            if g < GROUPS - 1:
                x = F.max_pool2d(x, 2)
        return self.output(F.relu(x))

    @torch.no_grad()
    def tokens(self, pixels_B3HW: Tensor, grid: int) -> Tensor:
        """int64 [B, N], a code for each patch. Pixels normalised with mean and deviation 0.5, as VLMo reads them."""
        with torch.autocast(pixels_B3HW.device.type, enabled=False):
            pixels = (pixels_B3HW.float() / 2 + 0.5).clamp(0, 1)
            side = grid * PIXELS_A_CODE
            small = F.interpolate(pixels, (side, side), mode="bicubic", antialias=True, align_corners=False)
            return self(small.clamp(0, 1)).argmax(1).flatten(1)
