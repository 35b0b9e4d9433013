"""Each family's sizes in a study: about equal, and what a small model trained briefly from nothing needs besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pretraining_study.setting import Setting


def sizes(family: str, setting: Setting) -> dict[str, Any]:
    """The family's config, but for what the data decide."""
    common = {
        "hidden": setting.hidden,
        "heads": setting.heads,
        "intermediate": 4 * setting.hidden,
        "dropout": 0.0,
        "init_std": setting.hidden**-0.5,
    }
    return {**common, **_FAMILIES[family](setting)}


def _tden(setting: Setting) -> dict[str, Any]:
    stacks = ("object_layers", "sentence_layers", "encoder_layers", "decoder_layers")
    return {**dict.fromkeys(stacks, setting.layers), "attention_dropout": 0.0, "separate_region_norms": True}


def _unified_vlp(setting: Setting) -> dict[str, Any]:
    """One stack with as many layers as TDEN's modules have together."""
    return {"layers": 4 * setting.layers, "attention_dropout": 0.0, "region_slots": 0, "max_masked": 0}


def _xgpt(setting: Setting) -> dict[str, Any]:
    """As many layers in the encoder, and in the decoder, as two of TDEN's modules have; they are the same ones."""
    return {"layers": 2 * setting.layers, "attention_dropout": 0.0, "separate_region_norms": True}


def _vlmo(setting: Setting) -> dict[str, Any]:
    """The last layer has the vision-language expert. Images as they are drawn: nothing is cropped. Where it begins with
    vision warm-up, they are a small CNN before the patches."""
    return {
        "layers": 3 * setting.layers,
        "vl_start": 3 * setting.layers - 1,
        "side": setting.side,
        "patch": setting.patch,
        "stem": "convolutions" if setting.vision_warmup else "linear",
        "stem_channels": _CHANNELS,
        "max_positions": setting.max_text_len,
        "layer_scale": 1.0,
        "drop_path": 0.0,
        "image_codes": 256,
        "augment": [],
    }


def _soho(setting: Setting) -> dict[str, Any]:
    """The small detector's CNN, of 8 pixels a cell."""
    return {
        "layers": 2 * setting.layers,
        "height": setting.side,
        "width": setting.side,
        "resize": "squash",
        "backbone": "small",
        "backbone_options": {"channels": _CHANNELS},
        "backbone_stage": 0,
        "pool": setting.patch // 8,
        "attention_dropout": 0.0,
        "dictionary_size": 256,
        "dictionary_momentum": 0.9,
        "revive_after": 20,
    }


_CHANNELS = [16, 32, 64]  # of the CNN of a model of pixels

_FAMILIES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "tden": _tden,
    "unified_vlp": _unified_vlp,
    "xgpt": _xgpt,
    "vlmo": _vlmo,
    "soho": _soho,
}
