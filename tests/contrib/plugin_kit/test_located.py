"""Located states: in every family, state r is that of box r of the upright image, and padding is masked.

The test of a state's place changes the input inside one box, a region's feature or the image's pixels, and finds which
state changed most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from vlp_models.contrib.plugin_kit.conformance.checks import Problem
from vlp_models.contrib.plugin_kit.conformance.families import check_located
from vlp_models.contrib.plugin_kit.conformance.scenes import MAX_REGIONS, SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import Trial, build_trial, small_config
from vlp_models.data.boxes import overlap
from vlp_models.data.pixels import encode
from vlp_models.data.sample import Sample
from vlp_models.models.protocols import Located, LocatesStates

REGION_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tden": ("tden", {}),
    "tden-single-stream": ("tden", {"structure": "single_stream"}),
    "tden-separate-ffn": ("tden", {"separate_ffn": True}),
    "unified_vlp": ("unified_vlp", {}),
    "xgpt": ("xgpt", {}),
    "xgpt-two-stacks": ("xgpt", {"structure": "enc_dec"}),
}
CROP = {"augment": ["random_resized_crop", "flip"], "crop_scale": [0.5, 0.8]}
PIXEL_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vlmo": ("vlmo", {}),
    "vlmo-augmented": ("vlmo", CROP),
    "soho-pad": ("soho", {"resize": "pad"}),
    "soho-squash": ("soho", {"resize": "squash"}),
    "soho-crop": ("soho", {"resize": "crop"}),
    "soho-pad-augmented": ("soho", {"resize": "pad", **CROP}),
    "soho-tight": ("soho", {"resize": "pad", "pool_first": True, "tight_canvas": True}),
}
SIZES = ((96, 60), (60, 96), (64, 64))  # of images, width and height
LONG, SHORT = "a red circle and two blue squares", "a circle"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


def built(scenes: SampleScenes, model: tuple[str, dict[str, Any]]) -> Trial:
    trial = build_trial(model[0], small_config(*model), scenes)
    trial.model.eval()
    return trial


@torch.no_grad()
def locate(trial: Trial, samples: Sequence[Sample]) -> Located:
    batch = trial.reader().collate(samples)
    assert isinstance(trial.model, LocatesStates)
    return trial.model.locate(batch.image, batch.text)


def most_changed(found: Located, other: Located, row: int) -> int:
    changed_R = (found.states_NRD - other.states_NRD)[row].norm(dim=-1)
    return int(changed_R.where(found.mask_NR[row], -1.0).argmax())


@pytest.mark.parametrize("name", REGION_MODELS)
def test_the_states_of_regions_have_the_detectors_boxes(name: str, scenes: SampleScenes) -> None:
    trial = built(scenes, REGION_MODELS[name])
    samples = trial.scenes.samples("captions", trial.reader())[::2][:4]
    counts = [2, 4, 0, 3]
    samples = [
        dataclasses.replace(s, text=text, regions=_first(s.regions, n))
        for s, n, text in zip(samples, counts, (LONG, SHORT, LONG, SHORT), strict=True)
    ]
    found = locate(trial, samples)
    assert found.states_NRD.shape == (4, 4, trial.model.located_dim)
    assert found.mask_NR.sum(1).tolist() == counts  # the image without regions has no located state
    for sample, n, boxes_R4 in zip(samples, counts, found.boxes_NR4.numpy(), strict=True):
        assert np.array_equal(boxes_R4[:n], sample.regions.boxes) and not boxes_R4[n:].any()  # type: ignore[union-attr]

    for row, n in enumerate(counts):
        for region in range(n):
            features = samples[row].regions.features.copy()  # type: ignore[union-attr]
            features[region] += 1
            other = list(samples)
            other[row] = dataclasses.replace(
                samples[row],
                regions=dataclasses.replace(samples[row].regions, features=features),  # type: ignore[type-var]
            )
            assert most_changed(found, locate(trial, other), row) == region


def _first(regions: Any, count: int) -> Any:
    return dataclasses.replace(regions, **{f: getattr(regions, f)[:count] for f in vars(regions)})


class Averages(nn.Module):
    """In place of a CNN with random weights, whose cells see far beyond their borders: the mean color of each cell."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.AvgPool2d(backbone.stride, ceil_mode=True), nn.Conv2d(3, backbone.channels, 1))

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        found: Tensor = self.net(pixels_B3HW)
        return found


@pytest.mark.parametrize("name", PIXEL_MODELS)
def test_the_states_of_cells_have_the_boxes_of_the_image_that_they_show(name: str, scenes: SampleScenes) -> None:
    """A white rectangle is drawn into the image file where the box is: the state of that box changes most."""
    trial = built(scenes, PIXEL_MODELS[name])
    if trial.family == "soho":
        trial.model.backbone = Averages(trial.model.backbone)
    rng = np.random.default_rng(3)
    pictures = [
        Image.fromarray(rng.integers(60, 120, (6, 6, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
        for size in SIZES
    ]

    def samples(drawn: Sequence[Image.Image]) -> list[Sample]:
        return [
            Sample(sample_id=f"s{i}", image_id=f"i{i}", source="x", text=text, pixels=encode(picture), seed=i + 5)
            for i, (picture, text) in enumerate(zip(drawn, (LONG, SHORT, LONG), strict=True))
        ]

    found = locate(trial, samples(pictures))
    boxes, mask = found.boxes_NR4, found.mask_NR
    assert found.states_NRD.shape == (*boxes.shape[:2], trial.model.located_dim)
    assert ((boxes >= 0) & (boxes <= 1)).all() and not boxes[~mask].any() and mask.any(1).all()
    if trial.model.inputs.image.resize == "pad" and not trial.model.inputs.image.augment:  # type: ignore[attr-defined]
        assert not mask[:2].all(1).any(), "an image that is not square has padding"
        assert (boxes[:, :, 2:].amax(1) == 1).all(), "the last cells end where the image ends, not where padding does"
    right = wrong = 0
    for row, picture in enumerate(pictures):
        for r in mask[row].nonzero().flatten().tolist():
            box = boxes[row, r]
            size = torch.tensor(picture.size * 2)
            x1, y1, x2, y2 = (box * size).round().int().tolist()
            if min(x2 - x1, y2 - y1) < 5:
                continue  # a sliver at the border
            changed = picture.copy()
            dx, dy = (x2 - x1) // 4, (y2 - y1) // 4
            ImageDraw.Draw(changed).rectangle((x1 + dx, y1 + dy, x2 - 1 - dx, y2 - 1 - dy), (255, 255, 255))
            drawn = [*pictures[:row], changed, *pictures[row + 1 :]]
            best = most_changed(found, locate(trial, samples(drawn)), row)
            right, wrong = right + (best == r), wrong + (best != r)
    assert wrong == 0 and right > 20, (right, wrong)


def test_a_grid_covers_the_image_once(scenes: SampleScenes) -> None:
    """VLMo's patches are its side divided by the patch's, in row-major order."""
    trial = built(scenes, PIXEL_MODELS["vlmo"])
    found = locate(trial, trial.scenes.samples("captions", trial.reader())[:1])
    expected = [(x / 4, y / 4, (x + 1) / 4, (y + 1) / 4) for y in range(4) for x in range(4)]
    torch.testing.assert_close(found.boxes_NR4[0], torch.tensor(expected))
    assert found.mask_NR.all() and not overlap(found.boxes_NR4[0, 0], found.boxes_NR4[0, 1:]).any()


@pytest.mark.parametrize("name", ["tden", "unified_vlp", "xgpt"])
def test_a_blanked_image_has_no_located_region(name: str, scenes: SampleScenes) -> None:
    trial = built(scenes, REGION_MODELS[name])
    batch = trial.reader().collate(trial.scenes.samples("captions", trial.reader())[:2])
    assert batch.image.mask_BR.shape[1] <= MAX_REGIONS
    assert not trial.model.locate(batch.image.blanked(), batch.text).mask_NR.any()  # type: ignore[operator]


def test_conformance_names_boxes_in_pixels(scenes: SampleScenes, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = built(scenes, PIXEL_MODELS["vlmo"])
    locate_right = trial.model.locate

    def in_pixels(image: Any, text: Any) -> Located:
        found = locate_right(image, text)  # type: ignore[operator]
        return dataclasses.replace(found, boxes_NR4=found.boxes_NR4 * 64)

    monkeypatch.setattr(trial.model, "locate", in_pixels)
    with pytest.raises(Problem, match="locate: a box leaves the image or has no area"):
        check_located(trial)
