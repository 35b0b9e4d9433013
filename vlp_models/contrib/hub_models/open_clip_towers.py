"""Models of open_clip, from folders with open_clip_config.json: CLIP, SigLIP, and MobileCLIP with timm's towers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vlp_models.contrib.hub_models.folder import OPEN_CLIP, read_settings
from vlp_models.contrib.hub_models.towers import TextLayout, image_input, read_pad_id
from vlp_models.errors import CheckpointError, MissingToolError, ParamsError, first_line

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # open_clip's defaults


def _import() -> Any:
    try:
        import open_clip
    except ModuleNotFoundError:
        raise MissingToolError(
            "a model in open_clip's layout needs the package open_clip_torch, which is not installed: the extra "
            "`open-clip`"
        ) from None
    return open_clip


def read(folder: Path) -> dict[str, Any]:
    """Return architecture, image and pad_id of a folder.

    Raises:
        CheckpointError: another model, or its preprocessing is missing or not supported.
        DataError: it has no tokenizer.
    """
    file, settings = folder / OPEN_CLIP, read_settings(folder, OPEN_CLIP)
    architecture, preparation = settings.get("model_cfg"), settings.get("preprocess_cfg")
    if not isinstance(architecture, dict) or not isinstance(preparation, dict):
        raise CheckpointError(
            f"{file}: expected `model_cfg` and `preprocess_cfg`, the architecture and how images are read"
        )
    try:
        text = _parts(architecture)[1]
    except ParamsError as error:
        raise CheckpointError(f"{file}: {error}") from None
    side = preparation.get("size", architecture["vision_cfg"].get("image_size", 224))
    side = max(side) if isinstance(side, list) else side
    crops = preparation.get("resize_mode", "shortest") == "shortest"
    if not crops and preparation["resize_mode"] != "squash":
        raise CheckpointError(f"{file}: `resize_mode: {preparation['resize_mode']}`; shortest and squash are supported")
    image = image_input(
        file,
        size=side if crops else (side, side),
        crop=(side, side) if crops else None,
        filter_name=preparation.get("interpolation", "bicubic"),
        mean=preparation.get("mean", MEAN),
        std=preparation.get("std", STD),
        rounding="size_down",
    )
    # Its own tokenizer fills with zeros, one of transformers' with its padding.
    pad_id = read_pad_id(folder) if text.get("hf_tokenizer_name") else 0
    return {"architecture": architecture, "image": image, "pad_id": pad_id}


def _parts(architecture: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of both towers; with them nothing is downloaded.

    Raises:
        ParamsError: a tower is missing, or is one of another library that downloads its config.
    """
    vision, text = architecture.get("vision_cfg"), architecture.get("text_cfg")
    if not isinstance(vision, dict) or not isinstance(text, dict) or "multimodal_cfg" in architecture:
        raise ParamsError("expected an image and a text tower, `vision_cfg` and `text_cfg`, and no decoder")
    if text.get("hf_model_name"):
        raise ParamsError(f"`text_cfg.hf_model_name: {text['hf_model_name']}` is a model of its own; not supported")
    return {**vision, "timm_model_pretrained": False}, dict(text)


def build(architecture: Mapping[str, Any]) -> nn.Module:
    """Return the randomly initialized towers.

    Raises:
        MissingToolError: open_clip is not installed.
        ParamsError: the architecture is invalid.
    """
    open_clip = _import()
    vision, text = _parts(architecture)
    settings = {k: v for k, v in architecture.items() if k not in ("vision_cfg", "text_cfg", "custom_text")}
    kind = open_clip.CustomTextCLIP if architecture.get("custom_text") else open_clip.CLIP
    try:
        towers: nn.Module = kind(**settings, vision_cfg=vision, text_cfg=text)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ParamsError(f"not a valid model of open_clip: {first_line(error)}") from None
    return towers


def layout(architecture: Mapping[str, Any]) -> TextLayout:
    text = architecture["text_cfg"]
    # A text is read at its highest id, which is the end; or at its last place, behind the padding.
    return TextLayout(
        vocab_size=text.get("vocab_size", 49408),
        length=text.get("context_length", 77),
        has_start=text.get("pool_type", "argmax") == "argmax",
        is_padded=True,
        end_id=None,
    )


def text_length(architecture: Mapping[str, Any]) -> int:
    text = layout(architecture)
    return text.length + (not text.has_start)  # [CLS] is left out


def embed_image(towers: Any, pixels_B3HW: Tensor) -> Tensor:
    """[B, E], not of unit length."""
    return towers.encode_image(pixels_B3HW)


def embed_text(towers: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """[B, E], not of unit length."""
    return towers.encode_text(ids_BT)
