"""Region features from a detector.

The detector proposes boxes. Of strongly overlapping boxes only the most confident one is kept, whatever its class, so
that one object gives one region. The features of the kept boxes are pooled again from the final boxes, and class
probabilities and score come from that second pass. (Bottom-up attention, Anderson et al., 2018, keeps the features of
the proposals instead.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlp_models.contrib.detector.checkpoint import Detector, load_detector
from vlp_models.contrib.detector.torchvision_parts import nms
from vlp_models.data.sample import RegionArrays
from vlp_models.vision.image_io import one_thread, to_tensor

Content = Literal["roi", "probabilities"]
SAME_OBJECT_IOU = 0.3  # on scenes, 0.5 leaves 1.8 stray regions per image and 0.3 leaves 0.2, losing 2% of the objects


class RegionExtractor:
    """Extracts regions from images.

    Args:
        min_score: minimum class probability of a region.
        max_regions: maximum per image; the most confident are kept.
        content: what a region's feature is. `roi`: the RoI head's output, as in the papers. `probabilities`: the class
            probabilities and the probability of each word that the detector learned (colors, sizes, ...): few numbers
            near 0 and 1, which a small model learns from in the preset nlvr.
    """

    def __init__(
        self,
        detector: Detector,
        *,
        min_score: float = 0.2,
        max_regions: int = 16,
        content: Content = "roi",
    ) -> None:
        self.detector_id = detector.detector_id
        self.classes = detector.classes
        words = detector.config.words
        self.feature_dim = detector.config.feature_dim if content == "roi" else len(self.classes) + len(words)
        self._content = content
        self._words = detector.model.roi_heads.word_predictor if words else None
        # Channels last is the fastest layout for convolutions.
        self._model = detector.model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self._roi_heads = copy.copy(detector.model.roi_heads)  # the same weights with another threshold
        self._roi_heads.score_thresh = min_score
        self._device = next(detector.model.parameters()).device
        self.device = self._device.type
        self._min_score = min_score
        self._max_regions = max_regions

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """Return the regions of each image, in order.

        One image at a time, and on a CPU with one thread: with batches or several threads sums are added in another
        order, so an image's last bits would depend on the other images or on the number of cores, and features of two
        runs could not be compared. Use more processes to use more CPUs.

        Args:
            images: PIL images, or uint8 tensors [3, H, W], of any size.
        """
        tensors = [to_tensor(image) if isinstance(image, Image.Image) else image for image in images]
        with one_thread() if self.device == "cpu" else nullcontext():
            return [self._extract(tensor) for tensor in tensors]

    @torch.inference_mode()
    def _extract(self, image_3HW: Tensor) -> RegionArrays:
        model, heads = self._model, self._roi_heads
        pixels, _ = model.transform([image_3HW.to(self._device).float() / 255])
        maps = model.backbone(pixels.tensors)
        # A backbone with a single map returns it without a name, which RoI pooling needs.
        if isinstance(maps, Tensor):
            maps = {"0": maps}
        proposals, _ = model.rpn(pixels, maps)
        (detected,), _ = heads(maps, proposals, pixels.image_sizes)
        # Class-agnostic non-maximum suppression, then a second pass over the remaining boxes.
        rows = nms(detected["boxes"], detected["scores"], SAME_OBJECT_IOU)[: self._max_regions]
        boxes = detected["boxes"][rows]
        features = heads.box_head(heads.box_roi_pool(maps, [boxes], pixels.image_sizes))
        probs = heads.box_predictor(features)[0].softmax(-1)
        if self._content == "probabilities":
            features = probs if self._words is None else torch.cat([probs, self._words(features).sigmoid()], dim=-1)

        height, width = pixels.image_sizes[0]
        # (N, 4) pixels of the resized image -> fractions, which are the same in the original.
        fractions = boxes / boxes.new_tensor([width, height, width, height])
        # By the second pass's scores, which may order the boxes differently, or put some below the minimum.
        scores = probs[:, 1:].max(dim=1).values
        keep = scores.argsort(descending=True, stable=True)
        keep = keep[scores[keep] >= self._min_score]
        tensors = (features, fractions, probs, scores)
        features, fractions, probs, scores = (tensor[keep].float().cpu().numpy() for tensor in tensors)
        return RegionArrays(
            features=features.astype(np.float16),
            boxes=fractions.clip(0, 1),
            class_probs=probs.astype(np.float16),
            scores=scores,
        )


def open_detector(settings: Mapping[str, Any], directory: Path, device: str) -> RegionExtractor:
    """Return the extractor of `features.source: detector`; see `vision.extractors.open_extractor`."""
    return RegionExtractor(
        load_detector(directory, device),
        min_score=settings["min_score"],
        max_regions=settings["max_regions"],
        content=settings["content"],
    )
