"""What fine-tuning begins from."""

from __future__ import annotations

from pathlib import Path

from tiny_vlmo import build_tiny

from vlp_models.models.info import CheckpointInfo
from vlp_models.params.schema import to_plain
from vlp_models.runs.fitting import start_from


def test_a_config_from_before_a_field_is_of_the_same_architecture() -> None:
    model = build_tiny()
    config = to_plain(model.config)
    config.pop("twins_are_negatives")
    told = {"family": "vlmo", "name": "m", "max_text_len": 9, "max_regions": 0, "feature_dim": 0, "classes": ()}
    before = CheckpointInfo(model_config=config, detector_id="", **told)  # type: ignore[arg-type]
    assert start_from(build_tiny(seed=1), before, model.state_dict(), Path("checkpoint")) == []
    config["layer_scale"] = 0.5
    assert (
        "of another architecture" in start_from(build_tiny(seed=1), before, model.state_dict(), Path("checkpoint"))[0]
    )
