"""Which regions an answer rests on: each is left out in turn, and the model is asked again how likely its answer is.

Attention would say where a layer took its values from, not what changes if they are gone, and means another thing in
each model. Leaving out means the same in all of them, and costs as many passes as there are regions.
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
from vlp_models.data.inputs import Extractor, ModelInputs, prepare_images
from vlp_models.data.pixels import PixelInput, place_boxes
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.models.protocols import Generates
from vlp_models.tasks.base import TaskModel
from vlp_models.tasks.vqa import VQA

AT_ONCE = 32  # passes
MOST = 3  # regions that are shown as the weightiest
NEGLIGIBLE = 0.05  # in nats: a twentieth less likely


class Remembering:
    """An extractor that keeps the regions of the last picture: a photo is asked about more than once."""

    def __init__(self, extractor: Extractor) -> None:
        self._extractor = extractor
        self._last: tuple[tuple[tuple[int, int], bytes], RegionArrays] | None = None

    def extract(self, images: Sequence[Image.Image]) -> list[RegionArrays]:
        if len(images) != 1:
            return self._extractor.extract(images)
        key = (images[0].size, images[0].tobytes())
        if self._last is None or self._last[0] != key:
            self._last = (key, self._extractor.extract(images)[0])
        return [self._last[1]]


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """
    likelihood  of the answer with all regions: a log-probability
    losses      [R]: how much of it is lost without each region (or cell), in nats; below 0, it is likelier without
    """

    likelihood: float
    losses: tuple[float, ...]

    @property
    def weightiest(self) -> tuple[int, ...]:
        """At most `MOST`, those that are missed most first; none that make no difference."""
        order = sorted(range(len(self.losses)), key=lambda i: -self.losses[i])
        return tuple(i for i in order[:MOST] if self.losses[i] > NEGLIGIBLE)


def given(regions: RegionArrays, max_regions: int) -> RegionArrays:
    """Those that the model reads: the first ones."""
    return _chosen(regions, np.arange(min(len(regions), max_regions)))


def weigh(task_model: TaskModel, regions: RegionArrays, text: str, said: str) -> Weighed:
    """
    Args:
        regions: as `given` leaves them.
        text: the question; of a captioner it says nothing.
        said: what the model answered: a caption, or one of its labels.
    """
    kept = [np.arange(len(regions)), *(np.delete(np.arange(len(regions)), i) for i in range(len(regions)))]
    if len(regions) < 2:  # nothing would be left to look at
        kept = kept[:1]
    sample = asked_of(task_model, text, said)
    found: list[float] = []
    for start in range(0, len(kept), AT_ONCE):
        block = [
            replace(sample, image_id=f"{start + i}", regions=_chosen(regions, rows))  # each is a picture of its own
            for i, rows in enumerate(kept[start : start + AT_ONCE])
        ]
        found += log_probabilities(task_model, task_model.read(block), said)
    whole = found[0]
    return Weighed(likelihood=whole, losses=tuple(whole - one for one in found[1:]) or (0.0,) * len(regions))


def asked_of(task_model: TaskModel, text: str, said: str) -> Sample:
    """A sample without an image, whose text is what the model reads: the question, or the caption it has said."""
    return Sample(sample_id="", image_id="", source="", text=said if task_model.task == "captioning" else text)


@torch.no_grad()
def log_probabilities(task_model: TaskModel, batch: Batch, said: str) -> list[float]:
    """Of `said`, for each sample: a caption's tokens one after the other, or an answer's own probability."""
    batch = batch.to(next(task_model.parameters()).device)
    if isinstance(task_model, VQA):
        answer_B = task_model.probabilities(batch)[:, task_model.labels.index(said)]
        return [float(p) for p in answer_B.clamp(min=1e-12).log()]
    at_BT = batch.text.has_next_BT
    logits_MV = cast(Generates, task_model.model).generation_logits(batch.image, batch.text, at_BT)
    targets_M = batch.text.next_tokens(at_BT)
    found_M = logits_MV.float().log_softmax(-1).gather(1, targets_M[:, None]).squeeze(1)
    return [float(own.sum()) for own in found_M.split(at_BT.sum(1).tolist())]


def _chosen(regions: RegionArrays, rows: np.ndarray) -> RegionArrays:
    return RegionArrays(
        features=regions.features[rows],
        boxes=regions.boxes[rows],
        class_probs=regions.class_probs[rows],
        scores=regions.scores[rows],
    )


GRID = 4  # cells a side
CELLS_AT_ONCE = 8  # passes; pictures may be large


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
    whole = task_model.read([replace(asked_of(task_model, text, said), **prepare_images(inputs, [photo], None)[0])])
    blank_3HW = cast(Pixels, whole.image).blanked().pixels_B3HW[0]
    found: list[float] = []
    for start in range(0, 1 + len(corners), CELLS_AT_ONCE):
        numbers = range(start, min(start + CELLS_AT_ONCE, 1 + len(corners)))  # 0: the picture as it is
        block = whole.select(torch.zeros(len(numbers), dtype=torch.long))  # copies
        for row, number in enumerate(numbers):
            if number:
                left, top, right, bottom = corners[number - 1]
                cell = (slice(None), slice(top, bottom), slice(left, right))
                cast(Pixels, block.image).pixels_B3HW[row][cell] = blank_3HW[cell]
        found += log_probabilities(task_model, block, said)
    size_4 = np.array([photo.width, photo.height] * 2, np.float32)
    return Weighed(likelihood=found[0], losses=tuple(found[0] - one for one in found[1:])), cells_N4 / size_4
