"""Weights by name from timm's own cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timm_toys import SMALL, keep_in_cache, network

from vlp_models.errors import CheckpointError
from vlp_models.params import TimmParams
from vlp_models.vision.pretrained_weights import data_config
from vlp_models.vision.timm_backbone import make_backbone


def test_timm_weights_come_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    params = TimmParams(model=f"{SMALL}.r160_in1k", weights="timm")
    with pytest.raises(CheckpointError, match=r"timm's weights of `.*` are not available .*name a file or") as error:
        make_backbone(params, tmp_path)
    assert not re.search("\n", str(error.value))
    keep_in_cache(monkeypatch, tmp_path, f"{SMALL}.r160_in1k")
    found = make_backbone(params, tmp_path).model.net.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in network().state_dict().items())


@pytest.mark.slow
def test_image_config_comes_from_the_named_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the default weights of the bare model name, which have ImageNet's mean and 224 pixels."""
    model, name = "mobilenetv4_conv_small", "mobilenetv4_conv_small.e3600_r256_in1k"
    keep_in_cache(monkeypatch, tmp_path, name, model)
    config = make_backbone(TimmParams(model=model, weights=f"timm:{name}"), tmp_path).model.config
    assert (config.side, config.mean, config.std) == (256, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert config == replace(make_backbone(TimmParams(model=name, weights="timm"), tmp_path).model.config, model=model)
    assert make_backbone(TimmParams(model=model, weights=f"timm:{name}", side=64), tmp_path).model.config.side == 64


def test_deprecated_name_has_the_data_config_of_its_successor() -> None:
    older, now = (data_config(f"vit_tiny_patch16_224{end}") for end in ("_in21k", ".augreg_in21k"))
    assert older == now and now["mean"] == (0.5, 0.5, 0.5)
