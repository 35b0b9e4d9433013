"""Lists of samples to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError


def collate_regions(images: Sequence[RegionArrays], max_regions: int) -> Regions:
    """Pads to the longest image, at most `max_regions` rows, the most confident ones.

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
    return Regions(
        features_BRF=torch.from_numpy(features),
        boxes_BR4=torch.from_numpy(boxes),
        class_probs_BRC=torch.from_numpy(class_probs),
        mask_BR=torch.from_numpy(mask),
    )


def collate_text(texts: Sequence[str], tokenizer: Tokenizer, max_len: int) -> Text:
    """[CLS] ... [SEP], cut to `max_len` and padded to the longest text of the batch."""
    return tokenizer.encode_batch(texts, max_len)


def collate_samples(samples: Sequence[Sample], tokenizer: Tokenizer, *, max_text_len: int, max_regions: int) -> Batch:
    """Images and texts side by side, without targets.

    Raises:
        DataError: a sample was read without its image's regions.
    """
    regions = []
    for sample in samples:
        if sample.regions is None:
            raise DataError(f"{sample.sample_id}: image {sample.image_id} was read without its region features")
        regions.append(sample.regions)
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        image_ids=tuple(sample.image_id for sample in samples),
        image=collate_regions(regions, max_regions),
        text=collate_text([sample.text for sample in samples], tokenizer, max_text_len),
    )
