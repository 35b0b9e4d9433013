"""What masked image modelling tells of a hidden patch: its visual token, one of `codes`.

BEiT's tokens are those of DALL-E's dVAE, a network trained on 250 million images. With its weights at hand
(`image_tokenizer`, dvae.py) they are the target here, too. Without, a stand-in needs no training: a patch's pixels go
through a fixed random projection, and the nearest of fixed random codes is its token (Chiu et al.: "Self-supervised
Learning with Random-projection Quantizer for Speech Recognition", ICML 2022). Such tokens tell colours, edges and
textures apart; unlike a dVAE's they know nothing of what patches of photographs have in common.

Shape suffixes: B images, N patches, C codes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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
            from vlp_models.models.vlmo.dvae import DVAE

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
