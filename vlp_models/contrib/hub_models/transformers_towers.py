"""CLIP, SigLIP and SigLIP 2 of transformers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.common.log import get_logger
from vlp_models.common.packages import PIP
from vlp_models.contrib.hub_models.folder import CONFIG, PREPROCESSOR, PROCESSOR, read_config, read_settings
from vlp_models.contrib.hub_models.towers import TextLayout, image_input, read_pad_id
from vlp_models.errors import CheckpointError, MissingToolError, ParamsError, first_line

logger = get_logger(__name__)

# model_type -> names of config, model, and what prepares images, by Pillow as data/pixels.py does
KINDS = {
    "clip": ("CLIPConfig", "CLIPModel", "CLIPImageProcessorPil"),
    "siglip": ("SiglipConfig", "SiglipModel", "SiglipImageProcessorPil"),
    "siglip2": ("Siglip2Config", "Siglip2Model", "Siglip2ImageProcessorPil"),
}
EXPECTED = f"two towers: {', '.join(KINDS)}"
KEYS = ("model_type", "text_config", "vision_config", "projection_dim", "logit_scale_init_value")
FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# Of an image tower alone: a text tower of no size, which is built with it and removed
NO_TEXT = {"hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 0, "num_attention_heads": 1, "vocab_size": 2}
NO_TEXT |= {"max_position_embeddings": 2, "projection_size": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
TEXT_PARTS = ("text_model", "text_projection", "logit_scale", "logit_bias")
HIGHEST = 2  # CLIP's early configs name this end of a text, and are read at the highest id


def library_class(kind: str, role: int) -> Any:
    """Return a class of transformers. role: its place in the entry of `KINDS`.

    Raises:
        MissingToolError: transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingToolError(
            f"a model with two towers needs transformers, which is not installed: `{PIP} install transformers`"
        ) from None
    transformers.logging.set_verbosity_error()  # it warns of token ids in parts of a config that nothing reads
    return getattr(transformers, KINDS[kind][role])


def read(folder: Path) -> dict[str, Any]:
    """Return architecture, image and pad_id of a folder.

    Raises:
        CheckpointError, DataError: see `read_image_side`; or it has no tokenizer.
    """
    return {**read_image_side(folder), "pad_id": read_pad_id(folder)}


def read_image_side(folder: Path) -> dict[str, Any]:
    """Return architecture and image of a folder.

    Raises:
        CheckpointError: another model, or its preprocessing is missing or not supported.
    """
    config = read_config(folder, KINDS, EXPECTED)
    architecture = {key: config[key] for key in KEYS if key in config}
    try:
        parsed = _config(architecture)
    except ParamsError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    return {"architecture": architecture, "image": _read_image(folder, parsed)}


def _read_image(folder: Path, config: Any) -> dict[str, Any]:
    """Return how images are prepared, with the defaults of transformers' own processor."""
    file, vision = folder / PREPROCESSOR, config.vision_config
    if file.is_file():
        settings = read_settings(folder, PREPROCESSOR)
    else:  # newer versions write image processor and tokenizer into one file
        file = folder / PROCESSOR
        settings = read_settings(folder, PROCESSOR).get("image_processor", {}) if file.is_file() else {}
    if not settings:
        raise CheckpointError(
            f"{folder}: contains no {PREPROCESSOR}, which sets how images are resized and normalized; copy it there"
        )
    try:
        processor = library_class(config.model_type, 2).from_dict(settings)
    except Exception as error:  # the library's own checks raise anything
        raise CheckpointError(f"{file}: not a preprocessing of {config.model_type}: {first_line(error)}") from None
    if not processor.do_resize or not processor.do_rescale or not math.isclose(processor.rescale_factor, 1 / 255):
        raise CheckpointError(f"{file}: `do_resize` and `do_rescale`, by 1/255, must be on")
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    if config.model_type == "siglip2":
        # The most patches that a square has; the library keeps an image's shape, here it is squashed.
        side = math.isqrt(processor.max_num_patches) * processor.patch_size
        _warn_of_squashing(side)
        size: Any = (side, side)
    else:
        size = processor.size.shortest_edge or (processor.size.height, processor.size.width)
    crops = getattr(processor, "do_center_crop", None)
    image = image_input(
        file,
        size=size,
        crop=(processor.crop_size.height, processor.crop_size.width) if crops else None,
        filter_name=FILTERS.get(processor.resample, processor.resample),
        mean=mean,
        std=std,
        rounding="down",
    )
    side = getattr(vision, "image_size", None)
    if side is not None and (image["height"], image["width"]) != (side, side):
        raise CheckpointError(
            f"{file}: images of {image['height']} x {image['width']} pixels, but the image tower of {CONFIG} reads "
            f"{side} x {side}"
        )
    return image


@functools.cache  # a folder is read several times
def _warn_of_squashing(side: int) -> None:
    logger.warning(
        "SigLIP 2 NaFlex: every image is squashed to %d x %d pixels, so embeddings of images that are not square "
        "differ from the library's; a SigLIP 2 of a fixed size (`model_type: siglip`) has no such difference",
        side,
        side,
    )


@functools.lru_cache(maxsize=16)
def _parse(text: str) -> Any:
    architecture = json.loads(text)
    kind = architecture.get("model_type")
    if kind not in KINDS:
        raise ParamsError(f"`model_type` is {kind!r}; expected {EXPECTED}")
    config_class = library_class(kind, 0)
    try:
        return config_class.from_dict(architecture)
    except Exception as error:  # the library's own checks raise anything
        raise ParamsError(f"not a valid {kind}: {first_line(error)}") from None


def _config(architecture: Mapping[str, Any]) -> Any:
    return _parse(json.dumps(architecture, sort_keys=True))


def build(architecture: Mapping[str, Any]) -> nn.Module:
    """Return the randomly initialized towers.

    Raises:
        ParamsError: the architecture is invalid.
    """
    config = _config(architecture)
    try:
        towers: nn.Module = library_class(config.model_type, 1)(config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ParamsError(f"not a valid {config.model_type}: {first_line(error)}") from None
    return towers


def build_image_tower(architecture: Mapping[str, Any]) -> nn.Module:
    """Return the randomly initialized image tower and its projection; names of weights are those of both towers.

    Raises:
        ParamsError: the architecture is invalid.
    """
    tower = build({**architecture, "text_config": NO_TEXT})
    for name in TEXT_PARTS:
        if hasattr(tower, name):
            delattr(tower, name)
    return tower


def layout(architecture: Mapping[str, Any]) -> TextLayout:
    config = _config(architecture)
    text, is_clip = config.text_config, config.model_type == "clip"
    return TextLayout(
        vocab_size=text.vocab_size,
        length=text.max_position_embeddings,
        has_start=is_clip,
        is_padded=not is_clip,
        end_id=text.eos_token_id if is_clip and text.eos_token_id != HIGHEST else None,
    )


def text_length(architecture: Mapping[str, Any]) -> int:
    text = layout(architecture)
    return text.length + (not text.has_start)  # [CLS] is left out


def embed_image(towers: Any, pixels_B3HW: Tensor) -> Tensor:
    """[B, E], not of unit length."""
    return encode_image(towers, pixels_B3HW).pooler_output


def encode_image(towers: Any, pixels_B3HW: Tensor) -> Any:
    """Return `pooler_output` [B, E], the projected embedding, and `last_hidden_state` [B, L, D]: the patches last."""
    if towers.config.model_type != "siglip2":
        return towers.get_image_features(pixel_values=pixels_B3HW)
    # (B, 3, H, W) -> (B, P, p * p * 3): patches row by row, each with its channels last
    side = towers.config.vision_config.patch_size
    patches = pixels_B3HW.unfold(2, side, side).unfold(3, side, side)  # (B, 3, rows, columns, p, p)
    rows, columns = patches.shape[2:4]
    patches_BPD = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    shapes_B2 = torch.tensor([[rows, columns]], device=pixels_B3HW.device).expand(len(pixels_B3HW), 2)
    mask_BP = torch.ones(patches_BPD.shape[:2], dtype=torch.int64, device=pixels_B3HW.device)
    return towers.get_image_features(pixel_values=patches_BPD, pixel_attention_mask=mask_BP, spatial_shapes=shapes_B2)


def embed_text(towers: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """[B, E], not of unit length."""
    mask = None if mask_BT is None else mask_BT.long()
    return towers.get_text_features(input_ids=ids_BT, attention_mask=mask).pooler_output
