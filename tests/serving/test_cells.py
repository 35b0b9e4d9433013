"""A model that reads pixels: which cells of the picture its answer rests on, and where they are drawn."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vlp_models.data.batch import Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Fused
from vlp_models.serving.page.occlusion import weigh_cells
from vlp_models.tasks.vqa import VQA

GREY = 128  # what the model takes for the mean
SURE = 40.0


class Brightness(nn.Module):
    """Its feature is how bright the picture is, the mean being 0: what an answer loses can be worked out by hand."""

    config: ClassVar[dict[str, Any]] = {}
    fused_dim = 1

    def __init__(self, resize: Literal["squash", "crop", "pad"]) -> None:
        super().__init__()
        self.inputs = ModelInputs(
            image=PixelInput(height=16, width=16, resize=resize, mean=(GREY / 255,) * 3, std=(0.5,) * 3)
        )

    def fuse(self, image: Pixels, text: Text) -> Fused:
        pooled_B1 = image.pixels_B3HW.mean((1, 2, 3))[:, None]
        nothing: Tensor = pooled_B1.new_zeros(len(pooled_B1), 0, 1)
        return Fused(image_BRD=nothing, text_BTD=nothing, pooled_BP=pooled_B1)


def answerer(resize: Literal["squash", "crop", "pad"]) -> VQA:
    tokenizer = Tokenizer.train(["is it bright ?"], 30, 1, True)
    info = CheckpointInfo(family="own", name="own", model_config={}, task="vqa", max_text_len=8)
    task_model = VQA(Brightness(resize), tokenizer, info, labels=["bright", "dark"])
    assert isinstance(task_model.head, nn.Linear)
    task_model.head.weight.data = torch.tensor([[SURE], [-SURE]])
    task_model.head.bias.data.zero_()
    return task_model.eval()


@pytest.mark.parametrize(
    ("resize", "size", "number", "lamp"),
    [
        ("squash", (16, 16), 6, (8, 4, 12, 8)),
        ("squash", (128, 64), 7, (96, 16, 128, 32)),
        ("pad", (32, 64), 8, (0, 32, 8, 48)),
        ("crop", (96, 32), 14, (48, 24, 56, 32)),  # of the middle, which alone is seen
        ("crop", (32, 96), 0, (0, 32, 8, 40)),
    ],
)
def test_the_cell_that_an_answer_rests_on_is_found_where_it_is(
    resize: Literal["squash", "crop", "pad"], size: tuple[int, int], number: int, lamp: tuple[int, int, int, int]
) -> None:
    """A grey picture with a lamp, and the cell that the lamp fills."""
    photo = Image.new("RGB", size, (GREY,) * 3)
    photo.paste((255,) * 3, lamp)
    found, cells = weigh_cells(answerer(resize), photo, "is it bright ?", "bright")
    assert found.weightiest == (number,) and len(found.losses) == len(cells) == 16
    assert cells[number] == pytest.approx(np.array(lamp) / (size * 2))
    if size == (16, 16):  # as the model sees it
        brightness = (255 - GREY) / 255 / 0.5 / 16
        whole, nothing = -math.log1p(math.exp(-SURE * brightness)), -math.log(2)
        assert found.likelihood == pytest.approx(whole, abs=1e-5)
        expected = [whole - nothing if cell == number else 0.0 for cell in range(16)]
        assert found.losses == pytest.approx(expected, abs=1e-5)


def test_what_is_cropped_off_is_in_no_cell() -> None:
    photo = Image.new("RGB", (96, 32), (GREY,) * 3)
    photo.paste((255,) * 3, (0, 0, 16, 32))
    found, cells = weigh_cells(answerer("crop"), photo, "is it bright ?", "bright")
    assert found.weightiest == () and cells[:, 0].min() == pytest.approx(1 / 3)
    assert cells[:, 2].max() == pytest.approx(2 / 3)
