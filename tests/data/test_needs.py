"""What shards must hold follows from the models, and is asked before anything is computed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vlp_models.cli.presets import apply_overlay
from vlp_models.data.inputs import ModelInputs, RegionInput, RequiredContent, required_content
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import ParamsError

ROOT = Path(__file__).parents[2]
REGIONS = ModelInputs(image=RegionInput())


def pixels(patch: int) -> ModelInputs:
    return ModelInputs(image=PixelInput(height=64, width=64, patch=patch))


def test_the_models_decide_what_of_an_image_is_packed() -> None:
    assert required_content([REGIONS]) == RequiredContent(regions=True, pixels=False)
    assert required_content([REGIONS, pixels(8)]) == RequiredContent(regions=True, pixels=True)
    assert required_content([ModelInputs(image=None)], True) == RequiredContent(regions=False, pixels=True, texts=True)
    with pytest.raises(ParamsError, match=r"shards\.pixels: false"):
        required_content([pixels(8)], False)


def test_pictures_may_not_be_smaller_than_a_models_patch() -> None:
    assert required_content([REGIONS, pixels(32), pixels(16)], min_side=32).pixels
    with pytest.raises(ParamsError, match=r"patches of 32 pixels, and `validate\.min_image_side: 16`"):
        required_content([REGIONS, pixels(32), pixels(16)], min_side=16)


def test_pictures_may_not_be_larger_than_shards_are_read() -> None:
    assert required_content([REGIONS], max_pixels=200_000_000).regions, "a detector reads the files"
    for inputs, packed in (([pixels(8)], "auto"), ([REGIONS], True)):
        with pytest.raises(ParamsError, match=r"`validate\.max_image_pixels: 200000000` accepts larger .* 50000000"):
            required_content(inputs, packed, max_pixels=200_000_000)


def test_what_can_not_be_packed_is_told_before_params_yaml_is_changed(tmp_path: Path) -> None:
    path = Path(shutil.copy(ROOT / "params.yaml", tmp_path / "params.yaml"))
    for preset in ("flickr8k", "flickr8k-vlmo"):
        apply_overlay(path, ROOT / "presets" / f"{preset}.yaml", [])
    before = path.read_bytes()
    for wrong, said in {"validate.min_image_side=16": "patches of 32", "shards.pixels=false": "reads pixels"}.items():
        with pytest.raises(ParamsError, match=said):
            apply_overlay(path, None, [wrong])
    assert path.read_bytes() == before
