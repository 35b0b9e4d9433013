"""What masked image modelling tells of a hidden patch: its visual token, one of `codes`.

BEiT's tokens are those of DALL-E's dVAE, a network trained on 250 million images. With its weights at hand
(`image_tokenizer`, dvae.py) they are the target here, too. Without, a stand-in needs no training: a patch's pixels go
through a fixed random projection, and the nearest of fixed random codes is its token (Chiu et al.: "Self-supervised
Learning with Random-projection Quantizer for Speech Recognition", ICML 2022). Such tokens tell colours, edges and
textures apart; unlike a dVAE's they know nothing of what patches of photographs have in common.

Shape suffixes: B images, N patches, C codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.errors import CheckpointError
from vlp_models.models.convert.mapping import Taker, read_state_dict
from vlp_models.models.vlmo.config import VLMoConfig

PROJECTED = 16  # dimensions in which codes are compared
SEED = 20_220_102  # of projection and codes: part of what a token means


class ImageTokens:
    """pixels -> int64 [B, N]. No module: its numbers are no weights of the model, and in no checkpoint."""

    def __init__(self, config: VLMoConfig) -> None:
        self.config = config
        self._loaded: tuple[torch.device, object] | None = None

    @torch.no_grad()
    def __call__(self, pixels_B3HW: Tensor) -> Tensor:
        """
        Raises:
            CheckpointError: `image_tokenizer` is no dVAE's weights, or of another number of codes.
        """
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
    """A projection [3 * patch * patch, PROJECTED] and unit codes [C, PROJECTED]: the same wherever they are made."""
    generator = torch.Generator().manual_seed(SEED)
    projection = torch.randn(3 * patch * patch, PROJECTED, generator=generator)
    return projection, F.normalize(torch.randn(codes, PROJECTED, generator=generator), dim=-1)


def nearest_codes(pixels_B3HW: Tensor, patch: int, projection: Tensor, codes_CP: Tensor) -> Tensor:
    """int64 [B, N]: of each patch the code at the smallest angle to its projection."""
    with torch.autocast(pixels_B3HW.device.type, enabled=False):
        patches_BNX = F.unfold(pixels_B3HW.float(), patch, stride=patch).transpose(1, 2)
        return (patches_BNX @ projection @ codes_CP.T).argmax(-1)


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
