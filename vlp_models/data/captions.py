"""Images with several of their captions each, for a model that encodes an image once for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlp_models.data.batch import Batch
from vlp_models.data.inputs import InputReader
from vlp_models.data.sample import Sample


@dataclass(frozen=True, kw_only=True)
class CaptionsOfImages:
    """Collates samples of the view `images`: each with `count` of its captions, `Text.owner_N` says whose they are.

    Of a sample with a draw they are drawn, anew in each epoch, none twice before all were drawn; else the first ones.
    """

    reader: InputReader
    count: int

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        chosen = [choose(sample["captions"], self.count, sample.draw) for sample in samples]
        text = self.reader.text([caption for own in chosen for caption in own])
        owner_N = torch.arange(len(samples)).repeat_interleave(self.count)
        return self.reader.collate(samples, text=dataclasses.replace(text, owner_N=owner_N))


def choose(captions: Sequence[str], count: int, draw: int | None) -> list[str]:
    """`count` of these captions, at least one; with fewer of them some come again."""
    order = list(range(len(captions)))
    if draw is not None:
        order = np.random.default_rng([draw, 1]).permutation(len(captions)).tolist()  # the picture has the first stream
    return [captions[order[i % len(order)]] for i in range(count)]
