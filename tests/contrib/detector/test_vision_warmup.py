"""Vision warm-up: target words per cell, boxes under resizing and cropping, and that the image side learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn_workspace import make_workspace
from PIL import Image, ImageDraw
from torch import Tensor, nn

from vlp_models.contrib.detector.training import (
    LabeledImage,
    TrainingOptions,
    TrainingResult,
    categories_of,
    labeled_images,
    words_of,
)
from vlp_models.contrib.detector.vision_warmup import (
    VisionEncoder,
    _encode_cells,
    _load_example,
    cell_word_targets,
    warm_up_vision,
)
from vlp_models.data.batch import Pixels
from vlp_models.data.joins import read_boxed
from vlp_models.data.pixels import PixelInput, fit, place_boxes
from vlp_models.models import DataFacts, build_model
from vlp_models.vision.small_backbone import SmallBackbone

INPUT = PixelInput(height=32, width=32)
RED = (255, 0, 0)
SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1, "init_std": 0.2}
VLMO = {**SIZES, "side": 32, "patch": 8, "vl_start": 1, "max_positions": 12, "image_codes": 8, "layer_scale": 1.0}
STEM = {**VLMO, "stem": "convolutions"}
TIMM = {**VLMO, "stem": "timm", "stem_backbone": "test_efficientnet", "stem_stage": 1}
SOHO = {**SIZES, "backbone": "small", "backbone_options": {"channels": [8, 8, 8]}, "backbone_stage": 0, "pool": 2}
SOHO |= {"height": 64, "width": 64, "resize": "squash", "dictionary_size": 7, "longer": 0, "shorter": 0}
Drawn = tuple[list[LabeledImage], list[LabeledImage], tuple[str, ...]]


def boxes(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 4)


def test_cell_has_the_words_of_the_smallest_object_at_its_center() -> None:
    words = np.eye(3, dtype=np.float32)
    small, large, tiny = (0, 0, 11, 11), (0, 0, 28, 19), (30.5, 0.1, 32, 2)
    cells = cell_word_targets(boxes(small, large, tiny), words, 2, 4, 10)  # centers: x 5, 15, 25, 35; y 5, 15
    assert cells.shape == (2, 4, 3)
    held = [[cells[r, c].nonzero().flatten().tolist() for c in range(4)] for r in range(2)]
    assert held == [
        [[0], [1], [1], [2]],
        [[1], [1], [1], []],
    ]  # the third contains no center: the cell that contains its own center
    assert not cell_word_targets(boxes(), words[:0], 2, 2, 10).any()


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize("size", [(60, 90), (90, 60), (20, 20)])
def test_boxes_follow_their_pixels_when_resized(resize: str, size: tuple[int, int]) -> None:
    picture = Image.new("RGB", size)
    box = (size[0] // 3, size[1] // 4, size[0] * 2 // 3, size[1] * 3 // 4)
    ImageDraw.Draw(picture).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), RED)
    wanted = PixelInput(height=48, width=64, resize=resize, longer=60, shorter=40)  # type: ignore[arg-type]
    pixels, *_ = fit(picture, wanted, None)
    rows, columns = (pixels[..., 0] > 127).nonzero()
    (placed,) = place_boxes(boxes(box), picture, wanted)
    expected = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert np.abs(placed.clip(0, (64, 48, 64, 48)) - expected).max() <= 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    workspace = make_workspace(tmp_path_factory.mktemp("drawn"))
    rows = read_boxed(workspace.validated)
    words = words_of(rows)
    train, val = (labeled_images(rows, split, categories_of(rows), words, workspace.root) for split in ("train", "val"))
    return train, val, words


def test_crops_and_flips_keep_boxes_and_words_aligned(drawn: Drawn) -> None:
    rng, checked = np.random.default_rng(1), 0
    colors = {"red": RED, "blue": (0, 0, 255)}
    for turn in range(40):
        image = drawn[0][turn % 6]
        picture, found, words = _load_example(image, bool(turn % 2), 0.3, rng)
        assert picture.width * picture.height <= 64 * 64
        for (x1, y1, x2, y2), holds in zip(found.astype(int), words, strict=True):
            color = next(word for word, held in zip(drawn[2], holds, strict=True) if held and word in colors)
            part = np.asarray(picture)[y1:y2, x1:x2]
            assert part.size and np.array_equal(part, np.broadcast_to(colors[color], part.shape))
            checked += 1
    assert checked > 50


class Toy(nn.Module):
    """An image side, and a text side that does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = SmallBackbone((4, 8, 8)), nn.Linear(3, 3)

    def cells(self, image: Pixels) -> Tensor:
        return self.image(image.pixels_B3HW).permute(0, 2, 3, 1)


def warmed_up(drawn: Drawn, steps: int) -> tuple[Toy, TrainingResult, float | None]:
    torch.manual_seed(2)
    toy = Toy()
    options = TrainingOptions(steps=steps, batch_size=4, lr=1e-2, seed=3)
    train, val, words = drawn
    encoder = VisionEncoder(model=toy, cells=toy.cells, pixel_input=INPUT, cell_side=8, hidden=8)
    arguments = {"crop": 0.7, "device": torch.device("cpu"), "lr_key": "models.toy.vision_warmup.lr"}
    return toy, *warm_up_vision(encoder, train, val, len(words), options, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_only_the_image_side_is_trained_and_learns(drawn: Drawn) -> None:
    (early, before, low), (late, after, high) = warmed_up(drawn, 2), warmed_up(drawn, 80)
    assert after.losses["words"] < 0.5 * before.losses["words"]
    assert low is not None and high is not None and low < 0.8 < 0.9 < high  # `square` applies to every object
    assert all(torch.equal(a, b) for a, b in zip(early.text.parameters(), late.text.parameters(), strict=True))
    assert not torch.equal(early.image.blocks[0][0].weight, late.image.blocks[0][0].weight)  # type: ignore[index,union-attr,arg-type]
    assert not late.training
    again, _, same = warmed_up(drawn, 80)
    assert same == high
    assert all(torch.equal(a, b) for a, b in zip(late.state_dict().values(), again.state_dict().values(), strict=True))


def test_padding_cells_are_not_trained_on(drawn: Drawn) -> None:
    """A 64 x 64 image in an input of 32 x 64: half of each row is padding."""
    toy = Toy()
    wanted = PixelInput(height=32, width=64, resize="pad")
    encoder = VisionEncoder(model=toy, cells=toy.cells, pixel_input=wanted, cell_side=8, hidden=8)
    examples = [_load_example(image, False, 1.0, None) for image in drawn[0][:2]]
    states_KD, true_KW = _encode_cells(encoder, examples, torch.device("cpu"))
    assert len(states_KD) == len(true_KW) == 2 * 4 * 4
    assert true_KW.any(1).sum() >= 4  # both squares of both images are in the other half


@pytest.mark.parametrize(("family", "config"), [("vlmo", VLMO), ("vlmo", STEM), ("vlmo", TIMM), ("soho", SOHO)])
def test_cells_are_aligned_with_pixels(family: str, config: dict[str, Any]) -> None:
    """A change of pixels changes the cell at that position most: rows before columns, no [CLS] among the cells."""
    torch.manual_seed(1)
    model: Any = build_model(family, config, DataFacts(vocab_size=30, mask_id=4)).eval()
    side = model.cell_side
    pixels = torch.zeros(1, 3, 4 * side, 4 * side)
    cells = model.cells(Pixels(pixels_B3HW=pixels))
    assert cells.shape == (1, 4, 4, 16)
    changed = pixels.clone()
    changed[..., side : 2 * side, 3 * side :] = 3.0
    moved = (model.cells(Pixels(pixels_B3HW=changed)) - cells).norm(dim=-1)[0]
    assert divmod(int(moved.argmax()), 4) == (1, 3)
