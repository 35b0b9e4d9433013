"""Eyes to begin with: the image's side of a model of pixels learns which words hold of what lies in each of its cells.

The papers' CNNs and patches begin with weights that a million labelled images taught. Where none fit (drawings, another
architecture, a field of one's own), the boxes of the train split stand for them: what teaches a detector, and so what
models of regions begin with. What tells the words from the cells is thrown away.

Shape suffixes: B images, R rows and C columns of cells, W words, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vlp_models.data.batch import Pixels
from vlp_models.data.pixels import PixelInput, collate_pixels, place_boxes, random_box
from vlp_models.vision.image_io import read_image
from vlp_models.vision.training import LabeledImage, Marked, TrainingOptions, TrainingResult, fit

Cells = Callable[[Pixels], Tensor]  # [B, R, C, D]


@dataclass(frozen=True, kw_only=True)
class Eyes:
    """A model that can learn to see.

    cells: its image's side. wanted: what it reads. side: pixels of that in a cell. hidden: the D of its cells.
    """

    model: nn.Module
    cells: Cells
    wanted: PixelInput
    side: int
    hidden: int


def warm_up_vision(
    eyes: Eyes,
    images: Sequence[LabeledImage],
    held_out: Sequence[LabeledImage],
    words: int,
    options: TrainingOptions,
    *,
    crop: float,
    device: torch.device,
    lower: str,
) -> tuple[TrainingResult, float | None]:
    """Trains the model in place and leaves it in eval mode. What the image's side does not use stays as it is.

    Args:
        held_out: what the second result is measured on; none: it is None.
        words: how many the images' `words` tell of.
        crop: the least share of a picture that is shown; 1: always all of it.
        lower: the setting to lower where training diverges.

    Returns:
        What training was like, and the mean F1 over words, of cells where any holds.

    Raises:
        NonFiniteLossError: training diverged.
        DataError: an image can't be read.
    """
    torch.manual_seed(options.seed)
    head = nn.Linear(eyes.hidden, words)
    learner = nn.ModuleList([eyes.model, head]).to(device).train()

    rng = np.random.default_rng([options.seed, 1])

    def losses(batch: Marked) -> dict[str, Tensor]:
        shown = [_shown(image, mirror, crop, rng) for image, mirror in batch]
        seen_KD, true_KW = _look(eyes, shown, device)
        return {"words": F.binary_cross_entropy_with_logits(head(seen_KD), true_KW)}

    result = fit(learner, losses, images, options, what="eyes", lower=lower)
    learner.eval()
    f1 = _f1(eyes, head, held_out, options.batch_size, device) if held_out else None
    eyes.model.to("cpu")
    return result, f1


def cell_word_targets(
    boxes_N4: NDArray[np.float32], words_NW: NDArray[np.float32], rows: int, columns: int, side: int
) -> Tensor:
    """float32 [R, C, W]: what holds of the smallest object that the middle of a cell lies in. An object that has no
    cell's middle has the one that its own middle lies in.

    Args:
        boxes_N4: pixels of the input. words_NW: 1 where a word holds. side: of a cell, in pixels.
    """
    found = np.zeros((rows, columns, words_NW.shape[1]), np.float32)
    x, y = (np.arange(columns) + 0.5) * side, (np.arange(rows) + 0.5) * side
    sizes = (boxes_N4[:, 2:] - boxes_N4[:, :2]).prod(1)
    for box, words in [(boxes_N4[n], words_NW[n]) for n in np.argsort(-sizes, kind="stable")]:
        x1, y1, x2, y2 = box
        here = ((y >= y1) & (y < y2))[:, None] & ((x >= x1) & (x < x2))
        row, column = int((y1 + y2) / 2 // side), int((x1 + x2) / 2 // side)
        if not here.any() and 0 <= row < rows and 0 <= column < columns:
            here[row, column] = True
        found[here] = words
    return torch.from_numpy(found)


Shown = tuple[Image.Image, NDArray[np.float32], NDArray[np.float32]]  # a picture, boxes in its pixels, their words


def _shown(image: LabeledImage, mirror: bool, crop: float, rng: np.random.Generator | None) -> Shown:
    """A picture as it is learnt from: a part of it, maybe mirrored. Without `rng`, all of it."""
    picture = Image.fromarray(read_image(image.path, image.width, image.height).permute(1, 2, 0).numpy())
    boxes = image.boxes
    if rng is not None and crop < 1:
        left, top, right, bottom = random_box(picture.width, picture.height, (crop, 1.0), rng)
        picture = picture.crop((left, top, right, bottom))
        boxes = boxes - np.array([left, top, left, top], np.float32)
        boxes = boxes.clip(0, np.array([picture.width, picture.height] * 2, np.float32))
    if mirror:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        boxes = np.stack([picture.width - boxes[:, 2], boxes[:, 1], picture.width - boxes[:, 0], boxes[:, 3]], 1)
    left_over = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return picture, boxes[left_over], image.words[left_over]


def _look(eyes: Eyes, shown: Sequence[Shown], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the K cells with picture: [K, D] of what is seen, and [K, W] of what is true."""
    pictures = [picture for picture, _, _ in shown]
    pixels = collate_pixels(pictures, eyes.wanted, [None] * len(pictures)).to(device)
    seen = eyes.cells(pixels)
    rows, columns = seen.shape[1:3]
    true = [cell_word_targets(place_boxes(b, p, eyes.wanted), words, rows, columns, eyes.side) for p, b, words in shown]
    there = torch.ones(seen.shape[:3], dtype=torch.bool, device=device)
    if pixels.mask_BHW is not None:
        y, x = (((torch.arange(n, device=device) + 0.5) * eyes.side).long() for n in (rows, columns))
        height, width = pixels.mask_BHW.shape[1:]
        there = pixels.mask_BHW[:, y.clamp(max=height - 1)[:, None], x.clamp(max=width - 1)]
    return seen[there], torch.stack(true).to(device)[there]


@torch.no_grad()
def _f1(eyes: Eyes, head: nn.Module, images: Sequence[LabeledImage], size: int, device: torch.device) -> float | None:
    right = wrong = torch.zeros((), device=device)
    for first in range(0, len(images), size):
        shown = [_shown(image, False, 1.0, None) for image in images[first : first + size]]
        seen, true = _look(eyes, shown, device)
        somewhere = true.any(-1)
        said_KW, true_KW = head(seen)[somewhere] > 0, true[somewhere] > 0
        right = right + (said_KW & true_KW).sum(0)
        wrong = wrong + (said_KW ^ true_KW).sum(0)
    asked = 2 * right + wrong
    return float((2 * right / asked)[asked > 0].mean()) if bool((asked > 0).any()) else None
