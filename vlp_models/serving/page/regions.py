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
from PIL import Image

from vlp_models.data.batch import Batch
from vlp_models.data.inputs import Extractor
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
    at_BT = batch.text.followed_BT
    logits_MV = cast(Generates, task_model.model).generation_logits(batch.image, batch.text, at_BT)
    targets_M = batch.text.following(at_BT)
    found_M = logits_MV.float().log_softmax(-1).gather(1, targets_M[:, None]).squeeze(1)
    return [float(own.sum()) for own in found_M.split(at_BT.sum(1).tolist())]


def _chosen(regions: RegionArrays, rows: np.ndarray) -> RegionArrays:
    return RegionArrays(
        features=regions.features[rows],
        boxes=regions.boxes[rows],
        class_probs=regions.class_probs[rows],
        scores=regions.scores[rows],
    )
