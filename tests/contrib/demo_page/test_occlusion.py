"""Occlusion: which regions, or cells of an image, an answer depends on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from toy_dataset import make_toy
from toy_tasks import any_generator, learn, make

from vlp_models.contrib.demo_page.occlusion import (
    CachingExtractor,
    Occlusion,
    occlude_cells,
    occlude_regions,
    truncate_regions,
)
from vlp_models.data.batch import Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fused
from vlp_models.tasks.vqa import VQA

GRAY = 128  # the model's mean color
SCALE = 40.0


class Brightness(nn.Module):
    """A model whose feature is the image's brightness relative to the mean, so that losses can be computed by hand."""

    config: ClassVar[dict[str, Any]] = {}
    fused_dim = 1

    def __init__(self, resize: Literal["squash", "crop", "pad"], side: int = 16) -> None:
        super().__init__()
        self.inputs = ModelInputs(
            image=PixelInput(height=side, width=side, resize=resize, mean=(GRAY / 255,) * 3, std=(0.5,) * 3)
        )

    def fuse(self, image: Pixels, text: Text) -> Fused:
        pooled_B1 = image.pixels_B3HW.mean((1, 2, 3))[:, None]
        empty: Tensor = pooled_B1.new_zeros(len(pooled_B1), 0, 1)
        return Fused(image_BRD=empty, text_BTD=empty, pooled_BP=pooled_B1)


def answerer(resize: Literal["squash", "crop", "pad"], side: int = 16) -> VQA:
    tokenizer = Tokenizer.train(["is it bright ?"], 30, 1, True)
    info = CheckpointInfo(family="own", name="own", model_config={}, task="vqa", max_text_len=8)
    task_model = VQA(Brightness(resize, side), tokenizer, info, labels=["bright", "dark"])
    assert isinstance(task_model.head, nn.Linear)
    task_model.head.weight.data = torch.tensor([[SCALE], [-SCALE]])
    task_model.head.bias.data.zero_()
    return task_model.eval()


@pytest.mark.parametrize(
    ("resize", "size", "number", "lamp"),
    [
        ("squash", (16, 16), 6, (8, 4, 12, 8)),
        ("squash", (128, 64), 7, (96, 16, 128, 32)),
        ("pad", (32, 64), 8, (0, 32, 8, 48)),
        ("crop", (96, 32), 14, (48, 24, 56, 32)),  # only the middle is visible
        ("crop", (32, 96), 0, (0, 32, 8, 40)),
    ],
)
def test_finds_the_cell_that_the_answer_depends_on(
    resize: Literal["squash", "crop", "pad"], size: tuple[int, int], number: int, lamp: tuple[int, int, int, int]
) -> None:
    """A gray image with a lamp that fills one cell."""
    photo = Image.new("RGB", size, (GRAY,) * 3)
    photo.paste((255,) * 3, lamp)
    found, cells = occlude_cells(answerer(resize), photo, "is it bright ?", "bright")
    assert found.most_important == (number,) and len(found.losses) == len(cells) == 16
    assert cells[number] == pytest.approx(np.array(lamp) / (size * 2))
    if size == (16, 16):  # the model's own size
        brightness = (255 - GRAY) / 255 / 0.5 / 16
        whole, blank = -math.log1p(math.exp(-SCALE * brightness)), -math.log(2)
        assert found.log_probability == pytest.approx(whole, abs=1e-5)
        expected = [whole - blank if cell == number else 0.0 for cell in range(16)]
        assert found.losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [(640, 480), (480, 640)])
def test_cells_at_the_edge_of_a_cropped_photo_are_blanked(size: tuple[int, int]) -> None:
    """The visible square begins between two pixels of the resized photo."""
    task_model = answerer("crop", side=224)
    for number, (row, column) in enumerate(np.ndindex(4, 4)):
        photo = Image.new("RGB", size, (GRAY,) * 3)
        left, top = (size[0] - 480) // 2 + column * 120, (size[1] - 480) // 2 + row * 120
        photo.paste((255,) * 3, (left, top, left + 120, top + 120))
        found, _ = occlude_cells(task_model, photo, "is it bright ?", "bright")
        assert found.most_important[:1] == (number,)


def test_cropped_margins_are_in_no_cell() -> None:
    photo = Image.new("RGB", (96, 32), (GRAY,) * 3)
    photo.paste((255,) * 3, (0, 0, 16, 32))
    found, cells = occlude_cells(answerer("crop"), photo, "is it bright ?", "bright")
    assert found.most_important == () and cells[:, 0].min() == pytest.approx(1 / 3)
    assert cells[:, 2].max() == pytest.approx(2 / 3)


def without(regions: RegionArrays, left_out: int) -> RegionArrays:
    return RegionArrays(**{name: np.delete(value, left_out, axis=0) for name, value in vars(regions).items()})


@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_loss_of_a_region_is_what_the_answer_loses_without_it(tmp_path: Path, task: str) -> None:
    """A caption's log-probability is the training loss; an answer's is its predicted probability."""
    toy = make_toy(tmp_path)
    task_model = make(toy, task)
    learn(task_model, toy, steps=10)
    sample = ShardDataset(toy.shards, "train", task_model.view)[0]
    assert sample.regions is not None and len(sample.regions) == 2

    def log_probability(regions: RegionArrays) -> float:
        occluded = [replace(sample, regions=regions)]
        batch = task_model.collate(occluded)
        if task == "captioning":
            with torch.no_grad():
                return -float(task_model.eval().loss(batch, generator=any_generator()).sum)
        return math.log(dict(task_model.predict(batch, occluded)[0]["top"])[answer])

    predicted = task_model.predict(task_model.collate([sample]), [sample])[0]
    answer = sample.text if task == "captioning" else predicted["answer"]
    found = occlude_regions(task_model, truncate_regions(sample.regions, 4), sample.text, answer)
    whole = log_probability(sample.regions)
    assert found.log_probability == pytest.approx(whole, abs=1e-4)
    losses = [whole - log_probability(without(sample.regions, i)) for i in range(2)]
    assert found.losses == pytest.approx(losses, abs=1e-4) and losses[0] != losses[1]
    alone = occlude_regions(task_model, truncate_regions(sample.regions, 1), sample.text, answer)
    assert alone.losses == (0.0,) and alone.most_important == ()


def test_most_important_regions_are_at_most_three_without_negligible_ones() -> None:
    assert Occlusion(log_probability=-1.0, losses=(0.01, 2.0, -1.0, 0.5, 0.3, 0.2)).most_important == (1, 3, 4)


def test_regions_of_a_photo_are_extracted_once() -> None:
    class Counting:
        calls = 0

        def extract(self, images: Any) -> list[RegionArrays]:
            self.calls += 1
            empty = np.zeros((0, 4), np.float32)
            half = np.zeros((0, 2), np.float16)
            return [RegionArrays(features=half, boxes=empty, class_probs=half, scores=empty[:, 0]) for _ in images]

    counting = Counting()
    caching = CachingExtractor(counting)
    red, blue = Image.new("RGB", (4, 2), "red"), Image.new("RGB", (4, 2), "blue")
    assert caching.extract([red])[0] is caching.extract([red.copy()])[0] and counting.calls == 1
    caching.extract([blue])
    caching.extract([Image.new("RGB", (2, 4), "blue")])
    assert counting.calls == 3 and len(caching.extract([red, blue])) == 2
