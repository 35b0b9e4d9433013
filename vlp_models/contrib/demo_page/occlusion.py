"""Occlusion: which regions or cells of an image an answer depends on.

Each region is left out in turn (for a model that reads pixels, each cell of a grid is blanked) to measure how much less
likely the answer becomes. Attention would show where a layer took its values from, not what changes without them, and
it means something else in each model. Occlusion means the same in all of them and costs one forward pass per region. A
blanked cell has the mean color, as in the blind baseline (`Pixels.blanked`); a cell is not an object. Two regions that
show the same thing compensate for each other, so neither may matter alone.

Shape suffixes: R regions, N cells, B samples, M tokens of all captions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vlp_models.data.batch import Batch, Pixels
from vlp_models.data.inputs import ExtractsRegions, ModelInputs, prepare_images
from vlp_models.data.pixels import PixelInput, place_boxes
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.models.protocols import Generates
from vlp_models.tasks.base import TaskModel
from vlp_models.tasks.vqa import VQA

REGIONS_AT_ONCE = 32  # forward passes
CELLS_AT_ONCE = 8  # forward passes; pixel inputs are larger
GRID = 4  # cells per side
MAX_SHOWN = 3  # most important regions shown
NEGLIGIBLE = 0.05  # nats: a twentieth less likely


class CachingExtractor:
    """An extractor that keeps the regions of the last image, since several questions are asked about one photo."""

    def __init__(self, extractor: ExtractsRegions) -> None:
        self._extractor = extractor
        self._last: tuple[tuple[tuple[int, int], bytes], RegionArrays] | None = None

    def extract(self, images: Sequence[Image.Image]) -> list[RegionArrays]:
        """Return the regions of each image."""
        if len(images) != 1:
            return self._extractor.extract(images)
        # The pixels themselves are the key: each event opens the photo again.
        key = (images[0].size, images[0].tobytes())
        if self._last is None or self._last[0] != key:
            self._last = (key, self._extractor.extract(images)[0])
        return [self._last[1]]


@dataclass(frozen=True, kw_only=True)
class Occlusion:
    """
    log_probability  of the answer with the whole image
    losses           [R]: how much of it is lost without each region (or cell), in nats; negative: likelier without
    """

    log_probability: float
    losses: tuple[float, ...]

    @property
    def most_important(self) -> tuple[int, ...]:
        """The `MAX_SHOWN` regions with the largest losses, largest first, without negligible ones."""
        order = sorted(range(len(self.losses)), key=lambda i: -self.losses[i])
        return tuple(i for i in order[:MAX_SHOWN] if self.losses[i] > NEGLIGIBLE)


def truncate_regions(regions: RegionArrays, max_regions: int) -> RegionArrays:
    """Return the regions that the model reads: the first `max_regions`."""
    return _select_regions(regions, np.arange(min(len(regions), max_regions)))


def occlude_regions(task_model: TaskModel, regions: RegionArrays, text: str, answer: str) -> Occlusion:
    """Leave out each region in turn.

    Args:
        regions: as returned by `truncate_regions`.
        text: the question; unused by a captioner.
        answer: the model's output: a caption, or one of its labels.
    """
    numbers = np.arange(len(regions))
    # R + 1 subsets of rows: all regions, then all but one.
    subsets = [numbers, *(np.delete(numbers, i) for i in numbers)]
    if len(regions) < 2:  # without its only region the image would be empty
        subsets = subsets[:1]
    sample = _text_sample(task_model, text, answer)
    values: list[float] = []  # log-probabilities: first with all regions, then without each
    for start in range(0, len(subsets), REGIONS_AT_ONCE):
        block = [
            # An id per copy: equal ids would share one encoded image.
            replace(sample, image_id=f"{start + i}", regions=_select_regions(regions, rows))
            for i, rows in enumerate(subsets[start : start + REGIONS_AT_ONCE])
        ]
        values += _log_probabilities(task_model, task_model.read(block), answer)
    # Losses are relative to the first value, with all regions; a single region has nothing to compare with.
    losses = tuple(values[0] - value for value in values[1:]) or (0.0,) * len(regions)
    return Occlusion(log_probability=values[0], losses=losses)


def occlude_cells(
    task_model: TaskModel, photo: Image.Image, text: str, answer: str
) -> tuple[Occlusion, NDArray[np.float32]]:
    """Blank each cell of a grid in turn, for a model that reads pixels.

    Args:
        text: the question; unused by a captioner.
        answer: the model's output: a caption, or one of its labels.

    Returns:
        The occlusion, and the cells [N, 4] as fractions of the photo's width and height.
    """
    inputs = cast(ModelInputs, task_model.model.inputs)
    pixel_input = cast(PixelInput, inputs.image)
    # Cells of the photo, and the same cells in the pixels that the model reads.
    cells_N4 = _grid_cells(photo, pixel_input)
    # A cell at the edge may be placed half a pixel outside, and a slice would count -1 from the other end
    corners = place_boxes(cells_N4, photo, pixel_input).round().clip(min=0).astype(int).tolist()
    sample = _text_sample(task_model, text, answer)
    whole = task_model.read([replace(sample, **prepare_images(inputs, [photo], None)[0])])
    # (3, H, W), the image with all content replaced by the mean color.
    blank_3HW = cast(Pixels, whole.image).blanked().pixels_B3HW[0]
    values: list[float] = []
    for start in range(0, 1 + len(corners), CELLS_AT_ONCE):
        numbers = range(start, min(start + CELLS_AT_ONCE, 1 + len(corners)))  # 0: nothing is blanked
        block = whole.select(torch.zeros(len(numbers), dtype=torch.long))  # copies of the one image
        for row, number in enumerate(numbers):
            if number:
                left, top, right, bottom = corners[number - 1]
                cell = (slice(None), slice(top, bottom), slice(left, right))
                # Replace one cell of this row's copy; the other rows are not affected.
                cast(Pixels, block.image).pixels_B3HW[row][cell] = blank_3HW[cell]
        values += _log_probabilities(task_model, block, answer)
    # Width and height twice: (x1, y1, x2, y2) in pixels -> fractions of the photo.
    size_4 = np.array([photo.width, photo.height] * 2, np.float32)
    losses = tuple(values[0] - value for value in values[1:])
    return Occlusion(log_probability=values[0], losses=losses), cells_N4 / size_4


def _grid_cells(photo: Image.Image, pixel_input: PixelInput) -> NDArray[np.float32]:
    """Return the cells row by row, x1, y1, x2, y2 in pixels of the photo; cropped-off margins are in no cell. [N, 4]"""
    size, target = np.array(photo.size), np.array([pixel_input.width, pixel_input.height])
    # With `crop` the photo fills the input and its longer side is cut: only the central part of the input's shape
    # remains.
    visible = target / (target / size).max() if pixel_input.resize == "crop" else size
    # Two rows of GRID + 1 edges, along x and along y, around the photo's center.
    x, y = ((size - visible)[:, None] / 2 + np.outer(visible, np.linspace(0, 1, GRID + 1))).tolist()
    cells = [(x[i], y[j], x[i + 1], y[j + 1]) for j in range(GRID) for i in range(GRID)]
    return np.array(cells, np.float32)


def _text_sample(task_model: TaskModel, text: str, answer: str) -> Sample:
    """Return a sample without an image whose text is what the model reads: the question, or its own caption."""
    return Sample(sample_id="", image_id="", source="", text=answer if task_model.task == "captioning" else text)


@torch.no_grad()
def _log_probabilities(task_model: TaskModel, batch: Batch, answer: str) -> list[float]:
    """Return the log-probability of `answer` for each sample: the sum over a caption's tokens, or the label's own."""
    batch = batch.to(next(task_model.parameters()).device)
    if isinstance(task_model, VQA):
        # (B, answers) -> (B,): the probability of this answer; clamped, since the logarithm of 0 is not finite.
        answer_B = task_model.probabilities(batch)[:, task_model.labels.index(answer)]
        return [float(p) for p in answer_B.clamp(min=1e-12).log()]
    # (B, T): the positions of a caption that have a next token.
    at_BT = batch.text.has_next_BT
    # (M, V) logits of all M such positions, sample after sample.
    logits_MV = cast(Generates, task_model.model).generation_logits(batch.image, batch.text, at_BT)
    targets_M = batch.text.next_tokens(at_BT)
    values_M = logits_MV.float().log_softmax(-1).gather(1, targets_M[:, None]).squeeze(1)
    # Split the M values by sample and add them up: the log-probability of its caption.
    return [float(values.sum()) for values in values_M.split(at_BT.sum(1).tolist())]


def _select_regions(regions: RegionArrays, rows: np.ndarray) -> RegionArrays:
    return RegionArrays(
        features=regions.features[rows],
        boxes=regions.boxes[rows],
        class_probs=regions.class_probs[rows],
        scores=regions.scores[rows],
    )
