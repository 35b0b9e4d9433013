"""Lists of samples to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.data.batch import Batch, Regions, ScoredRegions, Text
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError


def collate_regions(images: Sequence[RegionArrays], max_regions: int, *, scores: bool = False) -> Regions:
    """Pads to the longest image, at most `max_regions` rows, the most confident ones. scores: as `ScoredRegions`.

    An image without a region gets one all-zero row whose mask is True: attention needs something to look at.
    """
    if not images:
        raise ValueError("a batch needs at least one image")
    if max_regions < 1:
        raise ValueError(f"max_regions must be at least 1: {max_regions}")
    counts = [min(len(image), max_regions) for image in images]
    rows = max(1, *counts)
    shape = (len(images), rows)
    features = np.zeros((*shape, images[0].features.shape[1]), dtype=np.float32)
    boxes = np.zeros((*shape, 4), dtype=np.float32)
    class_probs = np.zeros((*shape, images[0].class_probs.shape[1]), dtype=np.float32)
    mask = np.zeros(shape, dtype=bool)
    for i, (image, n) in enumerate(zip(images, counts, strict=True)):
        features[i, :n] = image.features[:n]
        boxes[i, :n] = image.boxes[:n]
        class_probs[i, :n] = image.class_probs[:n]
        mask[i, : max(1, n)] = True
    regions = Regions(
        features_BRF=torch.from_numpy(features),
        boxes_BR4=torch.from_numpy(boxes),
        class_probs_BRC=torch.from_numpy(class_probs),
        mask_BR=torch.from_numpy(mask),
    )
    if not scores:
        return regions
    confidence = np.zeros(shape, dtype=np.float32)
    for i, (image, n) in enumerate(zip(images, counts, strict=True)):
        confidence[i, :n] = image.scores[:n]
    return ScoredRegions(**vars(regions), scores_BR=torch.from_numpy(confidence))


def objects_first(regions: RegionArrays, boxes: Sequence[Sequence[float]], min_overlap: float = 0.5) -> RegionArrays:
    """The regions with known objects in front, which `collate_regions` then keeps first.

    An object has its own box, and feature and class probabilities of the detected region that overlaps it most; zeros
    where none does by `min_overlap` (intersection over union). Its score is 1.

    Args:
        boxes: the objects', x1, y1, x2, y2 as fractions.
    """
    if not boxes:
        return regions
    objects_K4 = np.asarray(boxes, dtype=np.float32)
    features = np.zeros((len(boxes), regions.features.shape[1]), dtype=np.float16)
    class_probs = np.zeros((len(boxes), regions.class_probs.shape[1]), dtype=np.float16)
    if len(regions):
        overlap_KN = _overlap(objects_K4, regions.boxes)
        best_K = overlap_KN.argmax(1)
        seen_K = overlap_KN[np.arange(len(boxes)), best_K] >= min_overlap
        features[seen_K], class_probs[seen_K] = regions.features[best_K[seen_K]], regions.class_probs[best_K[seen_K]]
    return RegionArrays(
        features=np.concatenate([features, regions.features]),
        boxes=np.concatenate([objects_K4, regions.boxes]),
        class_probs=np.concatenate([class_probs, regions.class_probs]),
        scores=np.concatenate([np.ones(len(boxes), dtype=np.float32), regions.scores]),
    )


def _overlap(a_K4: NDArray[np.float32], b_N4: NDArray[np.float32]) -> NDArray[np.float32]:
    """[K, N]: intersection over union."""
    sides_KN2 = np.minimum(a_K4[:, None, 2:], b_N4[:, 2:]) - np.maximum(a_K4[:, None, :2], b_N4[:, :2])
    common_KN = sides_KN2.clip(min=0).prod(-1)
    area_K, area_N = (a_K4[:, 2:] - a_K4[:, :2]).prod(-1), (b_N4[:, 2:] - b_N4[:, :2]).prod(-1)
    union_KN = area_K[:, None] + area_N - common_KN
    return (common_KN / np.maximum(union_KN, np.finfo(np.float32).tiny)).astype(np.float32)


def collate_text(texts: Sequence[str], tokenizer: Tokenizer, max_len: int) -> Text:
    """[CLS] ... [SEP], cut to `max_len` and padded to the longest text of the batch."""
    return tokenizer.encode_batch(texts, max_len)


def collate_samples(samples: Sequence[Sample], tokenizer: Tokenizer, *, max_text_len: int, max_regions: int) -> Batch:
    """Images and texts side by side, without targets.

    Raises:
        DataError: a sample was read without its image's regions.
    """
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        image_ids=tuple(image_id for sample in samples for image_id in sample.image_ids),
        image=collate_regions(regions_of(samples), max_regions),
        text=collate_text([sample.text for sample in samples], tokenizer, max_text_len),
        image_owner_M=image_owners(samples),
    )


def image_owners(samples: Sequence[Sample]) -> Tensor | None:
    """int64 [M]: which sample each image belongs to; None where each sample has one."""
    counts = torch.tensor([len(sample.image_ids) for sample in samples], dtype=torch.int64)
    return None if bool((counts == 1).all()) else torch.arange(len(samples)).repeat_interleave(counts)


def one_for_neighbours(samples: Sequence[Sample]) -> tuple[list[Sample], Tensor]:
    """The first of each run of samples that show one image, with one draw; and int64 [N], the run of each sample.

    Samples whose image has no name share none.
    """
    firsts: list[Sample] = []
    owners = []
    for sample in samples:
        shown = (firsts[-1].image_id, firsts[-1].draw) if firsts else None
        if not sample.image_id or (sample.image_id, sample.draw) != shown:
            firsts.append(sample)
        owners.append(len(firsts) - 1)
    return firsts, torch.tensor(owners, dtype=torch.int64)


def regions_of(samples: Sequence[Sample]) -> list[RegionArrays]:
    """Of every image of the samples, one sample's behind each other.

    Raises:
        DataError: a sample was read without its image's regions.
    """
    regions = []
    for sample in samples:
        for image in sample.images:
            if image.regions is None:
                raise DataError(f"{sample.sample_id}: image {image.image_id} was read without its region features")
            regions.append(image.regions)
    return regions
