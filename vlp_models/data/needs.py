"""What of images the shards must hold, by what the models of params.yaml read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vlp_models.data.content_hashes import Kind
from vlp_models.data.inputs import ModelInputs, PixelInput
from vlp_models.data.shards.archive import MAX_IMAGE_PIXELS
from vlp_models.errors import ParamsError


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What of an image the shards hold; whether a model reads texts alone."""

    regions: bool
    pixels: bool
    texts: bool = False

    @property
    def kinds(self) -> list[Kind]:
        held: dict[Kind, bool] = {"regions": self.regions, "pixels": self.pixels, "texts": self.texts}
        return [kind for kind, there in held.items() if there]


def needs(
    inputs: Iterable[ModelInputs],
    pixels: Literal["auto", True, False] = "auto",
    min_side: int | None = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> Needs:
    """
    Args:
        inputs: of every model of params.yaml.
        pixels: `shards.pixels`.
        min_side: `validate.min_image_side`; None asks for nothing.
        max_pixels: `validate.max_image_pixels`.

    Raises:
        ParamsError: pixels are forbidden, and a model reads them; or pictures may be smaller than a model's patch, or
            larger than shards are read.
    """
    inputs = list(inputs)
    patch = max((wanted.image.patch for wanted in inputs if isinstance(wanted.image, PixelInput)), default=0)
    if min_side is not None and min_side < patch:
        raise ParamsError(
            f"params.yaml: a model of `models` has patches of {patch} pixels, and `validate.min_image_side: {min_side}`"
            f" lets smaller pictures through; with {patch} they go to quarantine"
        )
    kinds = {wanted.kind for wanted in inputs}
    if "pixels" in kinds and pixels is False:
        raise ParamsError(
            "params.yaml: `shards.pixels: false`, but a model of `models` reads pixels; `auto` packs them"
        )
    if max_pixels > MAX_IMAGE_PIXELS and ("pixels" in kinds or pixels is True):
        raise ParamsError(
            f"params.yaml: `validate.max_image_pixels: {max_pixels}` lets larger pictures through than are read from "
            f"shards, {MAX_IMAGE_PIXELS}; a model of `models` reads their pixels, or `shards.pixels` packs them"
        )
    return Needs(regions="regions" in kinds, pixels="pixels" in kinds or pixels is True, texts="texts" in kinds)
