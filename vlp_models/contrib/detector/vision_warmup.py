"""Vision warm-up: train the image encoder to predict each feature-map cell's object words.

The papers' CNNs and patch embeddings start from weights trained on a million labeled images. If no suitable weights
exist (drawings, another architecture, a special domain), train on the train split's boxes instead; detectors, and so
the region features of other models, are trained on the same boxes. The head that predicts the words is discarded.

Shape suffixes: B images, R rows and C columns of cells, K cells with image content, W words, D hidden, N objects.
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

from vlp_models.contrib.detector.training import (
    FlipBatch,
    LabeledImage,
    TrainingOptions,
    TrainingResult,
    backward_of,
    fit,
)
from vlp_models.data.batch import Pixels
from vlp_models.data.pixels import PixelInput, collate_pixels, place_boxes, random_box
from vlp_models.vision.image_io import read_image

Example = tuple[Image.Image, NDArray[np.float32], NDArray[np.float32]]  # image, its boxes in pixels, their words


@dataclass(frozen=True, kw_only=True)
class VisionEncoder:
    """The image side of a model.

    model       the whole model
    cells       computes its map of cells, [B, R, C, D]
    pixel_input how it reads images
    cell_side   pixels of a cell's side
    hidden      D
    """

    model: nn.Module
    cells: Callable[[Pixels], Tensor]
    pixel_input: PixelInput
    cell_side: int
    hidden: int


def warm_up_vision(
    encoder: VisionEncoder,
    images: Sequence[LabeledImage],
    held_out: Sequence[LabeledImage],
    words: int,
    options: TrainingOptions,
    *,
    crop: float,
    device: torch.device,
    lr_key: str,
) -> tuple[TrainingResult, float | None]:
    """Train the model's image side in place and leave the model in eval mode. Other weights do not change.

    Args:
        held_out: images to measure F1 on; may be empty.
        words: W, the number of words in the images' `words`.
        crop: minimum share of an image's area in a random crop; 1: no cropping.
        lr_key: the key in params.yaml to lower if training diverges.

    Returns:
        Training statistics, and the F1 averaged over words, on held-out cells where any word applies; None if
        `held_out` is empty.

    Raises:
        NonFiniteLossError: training diverged.
        DataError: an image can't be read.
    """
    torch.manual_seed(options.seed)
    head = nn.Linear(encoder.hidden, words)
    # AdamW skips weights without a gradient, so those outside of the image side do not change.
    learner = nn.ModuleList([encoder.model, head]).to(device).train()

    # A stream of its own for crops: `batches` draws from the plain seed.
    rng = np.random.default_rng([options.seed, 1])

    def backward(batch: FlipBatch) -> dict[str, float]:
        examples = [_load_example(image, flip, crop, rng) for image, flip in batch]
        states_KD, targets_KW = _encode_cells(encoder, examples, device)
        return backward_of({"words": F.binary_cross_entropy_with_logits(head(states_KD), targets_KW)})

    result = fit(learner, backward, images, options, model_name="the vision encoder", lr_key=lr_key)
    learner.eval()
    f1 = _mean_f1(encoder, head, held_out, options.batch_size, device) if held_out else None
    encoder.model.to("cpu")
    return result, f1


def cell_word_targets(
    boxes_N4: NDArray[np.float32], words_NW: NDArray[np.float32], rows: int, columns: int, cell_side: int
) -> Tensor:
    """Return float32 [R, C, W]: the words of the smallest object that contains a cell's center.

    An object that contains no cell's center is assigned to the cell that contains the object's center.

    Args:
        boxes_N4: in pixels of the input. words_NW: 1 if a word applies. cell_side: in pixels.
    """
    targets = np.zeros((rows, columns, words_NW.shape[1]), np.float32)
    # The centers of the cells, in pixels of the input.
    x, y = (np.arange(columns) + 0.5) * cell_side, (np.arange(rows) + 0.5) * cell_side
    sizes = (boxes_N4[:, 2:] - boxes_N4[:, :2]).prod(1)
    # From large to small, so that smaller objects overwrite larger ones.
    for number in np.argsort(-sizes, kind="stable"):
        x1, y1, x2, y2 = boxes_N4[number]
        covered = ((y >= y1) & (y < y2))[:, None] & ((x >= x1) & (x < x2))  # [R, C]: cells whose center is inside
        # The cell of the object's center, for an object that covers no cell's center.
        row, column = int((y1 + y2) / 2 // cell_side), int((x1 + x2) / 2 // cell_side)
        if not covered.any() and 0 <= row < rows and 0 <= column < columns:
            covered[row, column] = True
        targets[covered] = words_NW[number]
    return torch.from_numpy(targets)


def _load_example(image: LabeledImage, flip: bool, crop: float, rng: np.random.Generator | None) -> Example:
    """Return an image, randomly cropped unless `rng` is None, and flipped horizontally if `flip`, with its boxes."""
    picture = Image.fromarray(read_image(image.path, image.width, image.height).permute(1, 2, 0).numpy())
    boxes = image.boxes
    if rng is not None and crop < 1:
        left, top, right, bottom = random_box(picture.width, picture.height, (crop, 1.0), rng)
        picture = picture.crop((left, top, right, bottom))
        boxes = boxes - np.array([left, top, left, top], np.float32)
        boxes = boxes.clip(0, np.array([picture.width, picture.height] * 2, np.float32))
    if flip:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        boxes = np.stack([picture.width - boxes[:, 2], boxes[:, 1], picture.width - boxes[:, 0], boxes[:, 3]], 1)
    # A crop may leave nothing of an object.
    inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return picture, boxes[inside], image.words[inside]


def _encode_cells(encoder: VisionEncoder, examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return states [K, D] and target words [K, W] of the cells that are not padding."""
    pictures = [picture for picture, _, _ in examples]
    pixels = collate_pixels(pictures, encoder.pixel_input, [None] * len(pictures)).to(device)
    # (B, R, C, D): the state of each cell, padding included.
    states = encoder.cells(pixels)
    rows, columns = states.shape[1:3]
    targets = [
        cell_word_targets(place_boxes(boxes, picture, encoder.pixel_input), words, rows, columns, encoder.cell_side)
        for picture, boxes, words in examples
    ]
    valid = torch.ones(states.shape[:3], dtype=torch.bool, device=device)
    if pixels.mask_BHW is not None:
        # A cell is valid if its center is not padding.
        y = ((torch.arange(rows, device=device) + 0.5) * encoder.cell_side).long()
        x = ((torch.arange(columns, device=device) + 0.5) * encoder.cell_side).long()
        # The last cells may extend beyond the input, whose side need not be a multiple of a cell's.
        height, width = pixels.mask_BHW.shape[1:]
        valid = pixels.mask_BHW[:, y.clamp(max=height - 1)[:, None], x.clamp(max=width - 1)]
    return states[valid], torch.stack(targets).to(device)[valid]


@torch.no_grad()
def _mean_f1(
    encoder: VisionEncoder, head: nn.Module, images: Sequence[LabeledImage], batch_size: int, device: torch.device
) -> float | None:
    correct = wrong = torch.zeros((), device=device)
    for first in range(0, len(images), batch_size):
        examples = [_load_example(image, False, 1.0, None) for image in images[first : first + batch_size]]
        states, targets = _encode_cells(encoder, examples, device)
        labeled = targets.any(-1)  # cells to which a word applies
        # A logit above 0 is a probability above one half.
        predicted_KW, true_KW = head(states)[labeled] > 0, targets[labeled] > 0
        correct = correct + (predicted_KW & true_KW).sum(0)
        wrong = wrong + (predicted_KW ^ true_KW).sum(0)
    # F1 of a word is 2 TP / (2 TP + FP + FN); words that neither occur nor are predicted have none.
    total = 2 * correct + wrong
    return float((2 * correct / total)[total > 0].mean()) if bool((total > 0).any()) else None
