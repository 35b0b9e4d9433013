"""What params.yaml names is looked up before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.errors import ParamsError
from vlp_models.params import Params, parse_params
from vlp_models.pipeline.check_params import check_runs

ROOT = Path(__file__).parents[2]


def sections(of_vit: str = "", **timm: str) -> Params:
    """params.yaml with a ViT next to its model, or with other timm."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    vit = {"side": 32, "patch": 16, "hidden": 16, "heads": 2, "layers": 2, "intermediate": 32, "vl_start": 1}
    raw["models"]["vit"] = {"family": "vlmo", "config": vit, "image_init": of_vit}
    if timm:
        raw["features"] |= {"source": "timm", "timm": timm}
    return parse_params(raw)


def test_unknown_timm_model_is_refused() -> None:
    check_runs(sections("timm:vit_small_patch16_224"))
    near = r"`models.vit.image_init: timm:vit_smal_patch16_224`: timm has no .*; did you mean `vit_small_patch16_224`"
    with pytest.raises(ParamsError, match=near):
        check_runs(sections("timm:vit_smal_patch16_224"))
    with pytest.raises(ParamsError, match=r"timm has no model `vit_small_patch16_224\.nonsense`; did you mean"):
        check_runs(sections("timm:vit_small_patch16_224.nonsense"))


def test_vision_warmup_needs_random_weights_and_pixels() -> None:
    check_runs(sections(model="tf_efficientnet_lite0", weights="timm:tf_efficientnet_lite0.in1k"))
    with pytest.raises(ParamsError, match=r"`features.timm.model: tf_efficientnet_light0`: .* `tf_efficientnet_lite0`"):
        check_runs(sections(model="tf_efficientnet_light0"))
    with pytest.raises(ParamsError, match=r"`features.timm.weights: timm:resnet1800`: timm has no model"):
        check_runs(sections(model="resnet18", weights="timm:resnet1800"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": {"tden": {"max_text_len": 80}}}, r"`pretrain\.tden\.max_text_len: 80`: this tden .* 60 tokens"),
        ({"finetune": {"tden-vqa": {"max_text_len": 61}}}, r"`finetune\.tden-vqa\.max_text_len: 61`: .* 60 tokens"),
        ({"finetune": {"tden-vqa": {"config": {"max_positions": 20}}}}, r"tden-vqa\.max_text_len: 24`: .* 20 tokens"),
        ({"evaluate": {"max_caption_len": 64}}, r"`evaluate\.max_caption_len: 64`: this tden .* 60 tokens"),
        (
            {"finetune": {"tden-vqa": {"config": {"max_position": 20}}}},
            r"`finetune\.tden-vqa\.config\.max_position`; did you mean `max_positions`",
        ),
        (
            {
                "finetune": {
                    "tden-vqa": {"config": {"max_positions": 30}},
                    "again": {"task": "vqa", "start": "finetune/tden-vqa", "max_text_len": 31},
                }
            },
            r"`finetune\.again\.max_text_len: 31`: .* 30 tokens; raise `max_positions` in `finetune\.tden-vqa\.config`",
        ),
        (
            {"augment": {"own": {"start": "finetune/tden-captioning", "max_caption_len": 61}}},
            r"`augment\.own\.max_caption_len: 61`: this tden .* 60 tokens",
        ),
    ],
)
def test_texts_longer_than_the_positions_are_refused(changes: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["models"]["tden"]["config"]["max_positions"] = 60
    check_runs(parse_params(raw))
    for section, sections in changes.items():
        for name, value in sections.items():
            there = raw.setdefault(section, {}).get(name, {})
            raw[section][name] = {**there, **value} if isinstance(value, dict) else value
    with pytest.raises(ParamsError, match=message):
        check_runs(parse_params(raw))
