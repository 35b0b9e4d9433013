"""What fine-tuning begins from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soho_toys import build as build_soho
from tiny_vlmo import build_tiny

from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.params.schema import to_plain
from vlp_models.pipeline.training_job import start_from

TOLD = {"family": "vlmo", "name": "m", "max_text_len": 9, "max_regions": 0, "feature_dim": 0, "classes": ()}


@pytest.mark.parametrize(
    ("build", "fields"),
    [(build_tiny, ["same_image_negatives"]), (build_soho, ["mean", "std"])],  # a list's default is made anew each time
)
def test_a_config_from_before_a_field_is_of_the_same_architecture(build: Callable[..., Any], fields: list[str]) -> None:
    model = build()
    config = to_plain(model.config)
    for field in fields:
        config.pop(field)
    before = CheckpointInfo(model_config=config, detector_id="", **TOLD)  # type: ignore[arg-type]
    assert start_from(build(seed=1), before, model.state_dict(), Path("checkpoint")) == []


def test_another_config_is_another_architecture() -> None:
    model = build_tiny()
    config = to_plain(model.config)
    before = CheckpointInfo(model_config=config, detector_id="", **TOLD)  # type: ignore[arg-type]
    config["layer_scale"] = 0.5
    assert (
        "of another architecture" in start_from(build_tiny(seed=1), before, model.state_dict(), Path("checkpoint"))[0]
    )
