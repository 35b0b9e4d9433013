"""The sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass

from vlp_models.errors import ParamsError
from vlp_models.params.schema import PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """The data determines vocab_size; all other keys may be set in `models.<name>.config` of params.yaml."""

    vocab_size: int

    side: PositiveInt = 96  # pixels, of the square that every image is resized to
    patch: PositiveInt = 12  # pixels, of a patch's side
    augment: bool = True  # while training, see a random part of each image, at least four fifths of it
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    image_layers: PositiveInt = 2
    text_layers: PositiveInt = 2
    fusion_layers: PositiveInt = 1
    decoder_layers: PositiveInt = 2
    max_positions: PositiveInt = 64  # tokens of a text
    temperature: PositiveFloat = 0.07  # initial value of the learned one
    init_std: PositiveFloat = 0.08

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.side % self.patch:
            raise ParamsError(f"config: side ({self.side}) must be a multiple of patch ({self.patch})")
