"""What the decoding benchmarks share: images at random, a beam search of full length, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vlp_models.data.batch import Image, Regions
from vlp_models.models.decoding.search import Hypothesis, Steps, beam_search

LENGTH = 20  # tokens of every sentence: the models' [SEP] is made impossible
SEP_ID = 3


def random_regions(images: int, regions: int, feature_dim: int, *, classes: int = 1) -> Regions:
    generator = torch.Generator().manual_seed(1)
    return Regions(
        features_BRF=torch.randn(images, regions, feature_dim, generator=generator),
        boxes_BR4=torch.rand(images, regions, 4, generator=generator).sort(-1).values,
        class_probs_BRC=torch.randn(images, regions, classes, generator=generator).softmax(-1),
        mask_BR=torch.ones(images, regions, dtype=torch.bool),
    )


def decode(model: Steps, image: Image, beam: int) -> list[Hypothesis]:
    found = beam_search(model, image, max_len=LENGTH, bos_id=2, eos_id=SEP_ID, beam_size=beam)
    assert all(len(hypothesis.ids) == LENGTH for hypothesis in found)
    return found


def seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start
