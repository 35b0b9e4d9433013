"""Visual tokens, the targets of masked image modeling: each patch's number among `image_codes`.

BEiT's tokens come from DALL-E's dVAE, which was trained on 250 million images. With its weights (`image_tokenizer`)
they are the targets here as well. Without them, a stand-in needs no training: a patch's pixels go through a fixed
random projection, and the nearest of fixed random codes is the token (Chiu et al.: "Self-supervised Learning with
Random-projection Quantizer for Speech Recognition", ICML 2022). Such tokens distinguish colors, edges and textures;
unlike a dVAE's they reflect no statistics of photographs.

The dVAE (Ramesh et al. 2021; public code: openai/DALL-E) is read from its encoder's state dict. The released
encoder.pkl is a pickled module, which is not loaded: save its `state_dict()` as .safetensors once, where you trust it.
Layout: `blocks.input`, `blocks.group_1` to `group_4` of two residual blocks each (`id_path` where the width changes;
`res_path.conv_1` to `conv_4`), `blocks.output.conv`; each convolution has a `w` and a `b`. Three poolings: one code for
8 x 8 pixels, so 14 x 14 patches need 112 x 112 pixels. BEiT crops that second, smaller image from the file; here it is
the model's input, scaled down.

Shape suffixes: B images, N patches, C codes, X pixels of a patch, P projected dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.common.state_dicts import check_state_dict, read_state_dict
from vlp_models.errors import CheckpointError
from vlp_models.models.vlmo.config import VLMoConfig

PROJECTED = 16  # dimensions in which patches and codes are compared
SEED = 20_220_102  # of the projection and the codes; changing it changes the meaning of every token


class ImageTokens:
    """pixels -> int64 [B, N]. Not an nn.Module: its tensors are not weights of the model, nor in any checkpoint."""

    def __init__(self, config: VLMoConfig) -> None:
        self.config = config
        self._loaded: tuple[torch.device, object] | None = None

    @torch.no_grad()
    def __call__(self, pixels_B3HW: Tensor) -> Tensor:
        """Return each patch's token.

        Raises:
            CheckpointError: `image_tokenizer` is not a dVAE's weights, or has another number of codes.
        """
        # Loaded at the first call, and again when the pixels are on another device.
        config, device = self.config, pixels_B3HW.device
        if config.image_tokenizer:
            if self._loaded is None or self._loaded[0] != device:
                self._loaded = device, DVAE.load(Path(config.image_tokenizer), config.image_codes).to(device)
            dvae = self._loaded[1]
            assert isinstance(dvae, DVAE)
            return dvae.tokens(pixels_B3HW, config.grid)
        if self._loaded is None or self._loaded[0] != device:
            self._loaded = device, tuple(t.to(device) for t in random_codes(config.patch, config.image_codes))
        assert isinstance(self._loaded[1], tuple)
        return nearest_codes(pixels_B3HW, config.patch, *self._loaded[1])


def random_codes(patch: int, codes: int) -> tuple[Tensor, Tensor]:
    """Return the fixed projection [X, P] and unit codes [C, P], the same on every machine."""
    generator = torch.Generator().manual_seed(SEED)
    projection = torch.randn(3 * patch * patch, PROJECTED, generator=generator)
    return projection, F.normalize(torch.randn(codes, PROJECTED, generator=generator), dim=-1)


def nearest_codes(pixels_B3HW: Tensor, patch: int, projection_XP: Tensor, codes_CP: Tensor) -> Tensor:
    """Return int64 [B, N]: for each patch the code at the smallest angle to its projection."""
    # In float32 in any case, because rounding may change which code is the nearest.
    with torch.autocast(pixels_B3HW.device.type, enabled=False):
        patches_BNX = F.unfold(pixels_B3HW.float(), patch, stride=patch).transpose(1, 2)
        # (B, N, X) @ (X, P) @ (P, C) -> (B, N, C): of unit codes, the largest product has the smallest angle.
        return (patches_BNX @ projection_XP @ codes_CP.T).argmax(-1)


# ---- The encoder of DALL-E's dVAE --------------------------------------------------------------------------------

GROUPS, BLOCKS_PER_GROUP, PIXELS_PER_CODE = 4, 2, 8
LOGIT_EPS = 0.1  # pixels from 0 to 1 are mapped to 0.1 to 0.9


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
        # As in the public code, divided by the square of the number of blocks.
        return self.skip(x) + y / (GROUPS * BLOCKS_PER_GROUP) ** 2


class DVAE(nn.Module):
    """width: of the first group; the next groups are 2, 4 and 8 times as wide."""

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.input = nn.Conv2d(3, width, 7, padding=3)
        self.groups: Any = nn.ModuleList()
        inputs = width
        for number in range(GROUPS):
            outputs = width * 2**number
            # The first block of a group changes the width.
            group = [Residual(inputs, outputs)]
            group += [Residual(outputs, outputs) for _ in range(BLOCKS_PER_GROUP - 1)]
            self.groups.append(nn.ModuleList(group))
            inputs = outputs
        self.output = nn.Conv2d(inputs, codes, 1)
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def load(cls, path: Path, codes: int) -> DVAE:
        """Load the encoder from its state dict.

        Raises:
            CheckpointError: no such file, or not a dVAE's encoder with this many codes.
        """
        state = read_state_dict(path)
        first, last = state.get("blocks.input.w"), state.get("blocks.output.conv.w")
        if first is None or last is None:
            raise CheckpointError(
                f"{path}: not the state dict of DALL-E's encoder: no blocks.input.w, no blocks.output"
            )
        if len(last) != codes:
            raise CheckpointError(f"{path}: {len(last)} codes; set the model's `image_codes: {len(last)}`, not {codes}")
        model = cls(len(first), codes)
        weights: dict[str, Tensor] = {}  # of the model, by the names in the file
        for name, conv in model._named_convolutions():
            assert conv.bias is not None
            weights |= {f"{name}.w": conv.weight, f"{name}.b": conv.bias}
        check_state_dict(weights, state, path, "the encoder of DALL-E's dVAE")
        for name, weight in weights.items():
            weight.copy_(state[name])
        return model

    def _named_convolutions(self) -> Iterator[tuple[str, nn.Conv2d]]:
        """Yield each convolution with its name in the state dict."""
        yield "blocks.input", self.input
        for g, group in enumerate(self.groups, 1):
            for i, block in enumerate(group, 1):
                prefix = f"blocks.group_{g}.block_{i}"
                for number, conv in enumerate(block.convs, 1):
                    yield f"{prefix}.res_path.conv_{number}", conv
                if isinstance(block.skip, nn.Conv2d):
                    yield f"{prefix}.id_path", block.skip
        yield "blocks.output.conv", self.output

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """Return logits of the codes, [B, C, H / 8, W / 8]. Pixels are from 0 to 1."""
        x = self.input((1 - 2 * LOGIT_EPS) * pixels_B3HW + LOGIT_EPS)
        for g, group in enumerate(self.groups):
            for block in group:
                x = block(x)
            if g < GROUPS - 1:
                x = F.max_pool2d(x, 2)
        return self.output(F.relu(x))

    @torch.no_grad()
    def tokens(self, pixels_B3HW: Tensor, grid: int) -> Tensor:
        """Return a code for each patch, int64 [B, N]. Pixels are normalized with mean and standard deviation 0.5."""
        with torch.autocast(pixels_B3HW.device.type, enabled=False):
            pixels = (pixels_B3HW.float() / 2 + 0.5).clamp(0, 1)
            side = grid * PIXELS_PER_CODE
            small = F.interpolate(pixels, (side, side), mode="bicubic", antialias=True, align_corners=False)
            return self(small.clamp(0, 1)).argmax(1).flatten(1)
