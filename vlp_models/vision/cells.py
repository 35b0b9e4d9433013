"""Cells of a backbone's feature map as regions: what needs no boxes to learn from, and reads photographs.

The whole picture is scaled to the backbone's square; nothing is cut off, as it is when ImageNet is classified. Each
cell is a region: its box is its share of the picture, its class probabilities are the backbone's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import DataError
from vlp_models.vision.backbone_state import LoadedBackbone, load_backbone
from vlp_models.vision.images import to_tensor
from vlp_models.vision.source import FromImages
from vlp_models.vision.threads import one_thread

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class CellExtractor:
    """Turns images into regions, those first whose class is surest.

    Args:
        max_regions: at most; a finer map is averaged down to a grid of that many, so that no part of a picture is lost.
    """

    def __init__(self, backbone: LoadedBackbone, *, max_regions: int) -> None:
        config = backbone.model.config
        self.detector_id = backbone.detector_id
        self.classes = backbone.classes
        self.feature_dim = config.feature_dim
        self._model = backbone.model
        self._device = next(backbone.model.parameters()).device
        self.device = self._device.type
        self._side, self._resampling = config.side, RESAMPLING[config.interpolation]
        self._mean, self._std = (torch.tensor(value, device=self._device) for value in (config.mean, config.std))
        self._max_regions = max_regions

    @classmethod
    def load(cls, directory: Path, device: str = "cpu", *, max_regions: int) -> CellExtractor:
        """An extractor from data/detector or a copy of it.

        Raises:
            CheckpointError: there is no backbone, or a damaged one.
        """
        return cls(load_backbone(directory, device), max_regions=max_regions)

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """The regions of each image, in the order given; one at a time and, on a CPU, with one thread, so that an
        image's regions are the same to the last bit whoever made them (`RegionExtractor.extract`).

        Args:
            images: pictures, or uint8 tensors [3, H, W], of any sizes.

        Raises:
            DataError: an image of next to no pixels.
        """
        with one_thread() if self.device == "cpu" else nullcontext():
            return [self._extract(to_tensor(image) if isinstance(image, Image.Image) else image) for image in images]

    @torch.inference_mode()
    def _extract(self, image_3HW: Tensor) -> RegionArrays:
        features, logits, (rows, columns) = self._model(self.pixels(image_3HW), self._max_regions)
        probs = torch.nn.functional.pad(logits.float().softmax(-1), (1, 0)) if self.classes else logits  # no background
        scores = probs.max(dim=1).values if self.classes else probs.new_ones(len(features))
        order = scores.argsort(descending=True, stable=True)
        top, left = np.divmod(np.arange(rows * columns), columns)
        boxes = np.stack([left / columns, top / rows, (left + 1) / columns, (top + 1) / rows], axis=1)
        features, probs, scores = (tensor[order].float().cpu() for tensor in (features, probs, scores))
        return RegionArrays(
            features=features.numpy().astype(np.float16),
            boxes=boxes[order.cpu().numpy()].astype(np.float32),
            class_probs=probs.numpy().astype(np.float16),
            scores=scores.numpy(),
        )

    def pixels(self, image_3HW: Tensor) -> Tensor:
        """The picture as the backbone takes it: float32 [1, 3, side, side]."""
        height, width = image_3HW.shape[1:]
        if min(height, width) < LEAST_SIDE:
            raise DataError(
                f"an image of {width} x {height} pixels shows nothing: {LEAST_SIDE} are the least, each way"
            )
        picture = Image.fromarray(image_3HW.permute(1, 2, 0).numpy()).resize((self._side, self._side), self._resampling)
        scaled_HW3 = torch.from_numpy(np.array(picture)).to(self._device).float() / 255
        return ((scaled_HW3 - self._mean) / self._std).permute(2, 0, 1)[None].contiguous()


class CellSource(FromImages):
    """A `RegionSource` of cells."""
