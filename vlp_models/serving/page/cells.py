"""Which cells of a picture an answer of a model of pixels rests on: each is blanked in turn, as a region is left out
(regions.py).

A cell is a part of a grid over what the model sees of the picture; it is no object. Blanked, it is as the blank control
makes whole pictures (`Pixels.blanked`): of the mean colour.

Shape suffixes: N cells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vlp_models.data.batch import Pixels
from vlp_models.data.inputs import ModelInputs, PixelInput, see
from vlp_models.data.pixels import place_boxes
from vlp_models.serving.page.regions import Weighed, asked_of, log_probabilities
from vlp_models.tasks.base import TaskModel

GRID = 4  # cells a side
AT_ONCE = 8  # passes; pictures may be large


def grid(photo: Image.Image, wanted: PixelInput) -> NDArray[np.float32]:
    """[N, 4]: the cells, row by row; x1, y1, x2, y2 in pixels of the photo. What is cropped off is in none."""
    own, size = np.array(photo.size), np.array([wanted.width, wanted.height])
    seen = size / (size / own).max() if wanted.resize == "crop" else own
    x, y = ((own - seen)[:, None] / 2 + np.outer(seen, np.linspace(0, 1, GRID + 1))).tolist()
    cells = [(x[i], y[j], x[i + 1], y[j + 1]) for j in range(GRID) for i in range(GRID)]
    return np.array(cells, np.float32)


def weigh_cells(task_model: TaskModel, photo: Image.Image, text: str, said: str) -> tuple[Weighed, NDArray[np.float32]]:
    """What is lost without each cell; and [N, 4], where they are, as fractions of the photo's width and height.

    Args:
        text: the question; of a captioner it says nothing.
        said: what the model answered: a caption, or one of its labels.
    """
    inputs = cast(ModelInputs, task_model.model.inputs)
    wanted = cast(PixelInput, inputs.image)
    cells_N4 = grid(photo, wanted)
    corners = place_boxes(cells_N4, photo, wanted).round().astype(int).tolist()
    whole = task_model.read([replace(asked_of(task_model, text, said), **see(inputs, [photo], None)[0])])
    blank_3HW = cast(Pixels, whole.image).blanked().pixels_B3HW[0]
    found: list[float] = []
    for start in range(0, 1 + len(corners), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, 1 + len(corners)))  # 0: the picture as it is
        block = whole.select(torch.zeros(len(numbers), dtype=torch.long))  # copies
        for row, number in enumerate(numbers):
            if number:
                left, top, right, bottom = corners[number - 1]
                cell = (slice(None), slice(top, bottom), slice(left, right))
                cast(Pixels, block.image).pixels_B3HW[row][cell] = blank_3HW[cell]
        found += log_probabilities(task_model, block, said)
    size_4 = np.array([photo.width, photo.height] * 2, np.float32)
    return Weighed(likelihood=found[0], losses=tuple(found[0] - one for one in found[1:])), cells_N4 / size_4
