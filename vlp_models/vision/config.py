"""What a detector is: enough, with its class names, to build it again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from vlp_models.params import DetectorBackbone

BACKGROUND = "__background__"  # always class 0


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """A Faster R-CNN.

    `small` is for drawn scenes on a CPU: three convolution blocks, one map at stride 8. The others are torchvision's
    (`PUBLISHED`); they use only `feature_dim`, `norm_eps` and the image fields.
    """

    backbone: DetectorBackbone = "small"
    feature_dim: int = 256  # of one region: the width of the box head
    channels: tuple[int, int, int] = (24, 48, 96)
    anchors: tuple[float, ...] = (16.0, 24.0, 36.0)  # sides in pixels; square
    roi_size: int = 5
    words: tuple[str, ...] = ()  # that say what an object is like; `small` learns to tell them besides the class
    min_side: int = 0  # pixels the shorter side is resized to; 0: images stay as they are
    max_side: int = 640  # a longer image is shrunk to this
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.25, 0.25, 0.25)
    norm_eps: float = 1e-5  # of the backbone's batch norms; 0 with torchvision's first COCO weights


def _published(backbone: DetectorBackbone, min_side: int, max_side: int) -> DetectorConfig:
    return DetectorConfig(
        backbone=backbone,
        feature_dim=1024,
        min_side=min_side,
        max_side=max_side,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )


# torchvision's, as its COCO weights want them
PUBLISHED: dict[str, DetectorConfig] = {
    "resnet50_fpn": _published("resnet50_fpn", 800, 1333),
    "resnet50_fpn_v2": _published("resnet50_fpn_v2", 800, 1333),
    "mobilenet_v3_large_fpn": _published("mobilenet_v3_large_fpn", 800, 1333),
    "mobilenet_v3_large_320_fpn": _published("mobilenet_v3_large_320_fpn", 320, 640),
}
RESNET50_FPN = PUBLISHED["resnet50_fpn"]


def configure(
    backbone: DetectorBackbone, feature_dim: int, boxes: np.ndarray, words: tuple[str, ...] = ()
) -> DetectorConfig:
    """The config to train with.

    Args:
        words: all words of class names and attributes.
        boxes: [N, 4] of the training images, x1 y1 x2 y2 in pixels. The small backbone's anchors are the sizes of a
            typical small, middling and large one.
    """
    if backbone in PUBLISHED:
        return dataclasses.replace(PUBLISHED[backbone], feature_dim=feature_dim)
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    small, middle, large = (max(8.0, float(round(side))) for side in np.quantile(sides, [1 / 6, 1 / 2, 5 / 6]))
    return DetectorConfig(feature_dim=feature_dim, anchors=(small, middle, large), words=words)
