"""Detectors: torchvision's Faster R-CNN (Ren et al., 2015), with its own backbones or a small one for scenes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.contrib.detector.torchvision_parts import (
    AnchorGenerator,
    BalancedPositiveNegativeSampler,
    FasterRCNN,
    FastRCNNPredictor,
    GeneralizedRCNNTransform,
    MultiScaleRoIAlign,
    RoIHeads,
    TwoMLPHead,
    fastrcnn_loss,
    get_model,
)
from vlp_models.params import DetectorBackbone
from vlp_models.vision.small_backbone import STRIDE, SmallBackbone

WORDS_WEIGHT = 5.0  # the loss is a mean over words, and few apply, so it is small

# ---- Configuration -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """The architecture of a detector; with its class names, enough to rebuild it.

    `small`: three convolution blocks, one feature map of stride 8. The other backbones are torchvision's (`PUBLISHED`)
    and use only `feature_dim`, `norm_eps` and the image fields.
    """

    backbone: DetectorBackbone = "small"
    feature_dim: int = 256  # of a region: the width of the box head
    channels: tuple[int, int, int] = (24, 48, 96)
    anchors: tuple[float, ...] = (16.0, 24.0, 36.0)  # sides in pixels; square
    roi_size: int = 5
    words: tuple[str, ...] = ()  # categories and attributes; `small` learns to predict them besides the class
    min_side: int = 0  # pixels the shorter side is resized to; 0: no resizing
    max_side: int = 640  # larger images are shrunk to this
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


# torchvision's detectors, as their COCO weights expect images
PUBLISHED: dict[str, DetectorConfig] = {
    "resnet50_fpn": _published("resnet50_fpn", 800, 1333),
    "resnet50_fpn_v2": _published("resnet50_fpn_v2", 800, 1333),
    "mobilenet_v3_large_fpn": _published("mobilenet_v3_large_fpn", 800, 1333),
    "mobilenet_v3_large_320_fpn": _published("mobilenet_v3_large_320_fpn", 320, 640),
}


def configure(
    backbone: DetectorBackbone, feature_dim: int, boxes: np.ndarray, words: tuple[str, ...] = ()
) -> DetectorConfig:
    """Return the config for training a detector.

    Args:
        words: all words of class names and attributes.
        boxes: [N, 4] of the training images, x1 y1 x2 y2 in pixels. The small backbone's anchors are the 1/6, 1/2 and
            5/6 quantiles of their sizes.
    """
    if backbone in PUBLISHED:
        return dataclasses.replace(PUBLISHED[backbone], feature_dim=feature_dim)
    sides = np.sqrt((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    # One anchor for each third of the objects by size, at its middle.
    quantiles = np.quantile(sides, [1 / 6, 1 / 2, 5 / 6])
    small, middle, large = (max(8.0, float(round(side))) for side in quantiles)
    return DetectorConfig(feature_dim=feature_dim, anchors=(small, middle, large), words=words)


# ---- Model -------------------------------------------------------------------------------------------------------


def build_detector(config: DetectorConfig, num_classes: int) -> FasterRCNN:
    """Return a detector with random weights; nothing is downloaded. num_classes: including the background."""
    if config.backbone in PUBLISHED:
        model = get_model(f"fasterrcnn_{config.backbone}", weights=None, weights_backbone=None, num_classes=num_classes)
        # Another width than torchvision's needs new layers from the pooled map on.
        if config.feature_dim != model.roi_heads.box_predictor.cls_score.in_features:
            # The box head reads all channels of a square pooled map, flattened.
            pooled = model.backbone.out_channels * model.roi_heads.box_roi_pool.output_size[0] ** 2
            model.roi_heads.box_head = TwoMLPHead(pooled, config.feature_dim)
            model.roi_heads.box_predictor = FastRCNNPredictor(config.feature_dim, num_classes)
        for module in model.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = config.norm_eps
        model.transform = _Resize(config, size_divisible=32)
        return model
    backbone = SmallBackbone(config.channels)
    model = FasterRCNN(
        backbone,
        # One feature map with square anchors of several sizes.
        rpn_anchor_generator=AnchorGenerator((config.anchors,), ((1.0,),)),
        rpn_pre_nms_top_n_train=256,
        rpn_pre_nms_top_n_test=256,
        rpn_post_nms_top_n_train=96,
        rpn_post_nms_top_n_test=64,
        rpn_batch_size_per_image=128,
        box_roi_pool=SeparableRoIAlign(config.roi_size, sampling_ratio=2, stride=STRIDE),
        box_head=_BoxHead(backbone.out_channels * config.roi_size**2, config.feature_dim),
        box_predictor=FastRCNNPredictor(config.feature_dim, num_classes),
        box_batch_size_per_image=64,
        box_positive_fraction=0.5,
    )
    model.transform = _Resize(config, size_divisible=STRIDE)
    if config.words:
        # The heads that FasterRCNN built stay as they are, and learn words in addition.
        model.roi_heads.__class__ = _WordHeads
        model.roi_heads.word_predictor = nn.Linear(config.feature_dim, len(config.words))
    return model


class _BoxHead(nn.Module):
    """torchvision's TwoMLPHead with batch norm; without it, a few hundred steps at a high learning rate kill units."""

    def __init__(self, pooled: int, feature_dim: int) -> None:
        super().__init__()
        self.fc6 = nn.Linear(pooled, feature_dim, bias=False)
        self.norm6 = nn.BatchNorm1d(feature_dim)
        self.fc7 = nn.Linear(feature_dim, feature_dim, bias=False)
        self.norm7 = nn.BatchNorm1d(feature_dim)

    def forward(self, pooled_NCHW: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, feature_dim]"""
        hidden = F.relu(self.norm6(self.fc6(pooled_NCHW.flatten(1))))
        return F.relu(self.norm7(self.fc7(hidden)))


class _WordHeads(RoIHeads):
    """RoI heads that also learn which words apply to an object, as bottom-up attention learns attributes (Anderson et
    al., 2018, section 3.1). Words are shared between classes, so features carry more information than the class."""

    word_predictor: nn.Linear

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """As torchvision's; in training, `targets` hold `words`, float32 [N, W], besides boxes and labels."""
        if not self.training or targets is None:
            return super().forward(features, proposals, image_shapes, targets)
        # As torchvision's forward pass, and the loss of the words of the proposals that are objects
        proposals, matched, labels, regression = self.select_training_samples(proposals, targets)
        box_features = self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        logits, boxes = self.box_predictor(box_features)
        classifier, box_reg = fastrcnn_loss(logits, boxes, labels, regression)
        # Label 0 is the background, to which no word applies.
        object_rows = torch.cat(labels) > 0
        # The words of the object that each proposal is matched with: [proposals of all images, W]
        words = torch.cat([target["words"][rows] for target, rows in zip(targets, matched, strict=True)])
        logits_of_words = self.word_predictor(box_features[object_rows])
        loss = F.binary_cross_entropy_with_logits(logits_of_words, words[object_rows])
        return [], {"loss_classifier": classifier, "loss_box_reg": box_reg, "loss_words": WORDS_WEIGHT * loss}


class SeededSampler:
    """torchvision's `BalancedPositiveNegativeSampler`, with a random generator of its own instead of the global one.

    It takes at most `positive_fraction` of an image's samples from the positive ones, and fills up with negative ones.

    Args:
        like: has `batch_size_per_image` and `positive_fraction`.
        generator: of the CPU.
    """

    def __init__(self, like: BalancedPositiveNegativeSampler, generator: torch.Generator) -> None:
        self._samples = like.batch_size_per_image
        self._positives = int(like.batch_size_per_image * like.positive_fraction)
        self._generator = generator

    def __call__(self, matched: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return, for each image, the masks of the positive and of the negative samples, uint8 [N].

        matched: of each image, [N]: above 0 for a positive one, 0 for a negative one, -1 for one not to be used.
        """
        positive, negative = [], []
        for matched_N in matched:
            positive.append(self._choose(matched_N >= 1, self._positives))
            # Negatives fill up what the positives leave of the image's samples.
            negative.append(self._choose(matched_N == 0, self._samples - int(positive[-1].sum())))
        return positive, negative

    def _choose(self, allowed_N: Tensor, limit: int) -> Tensor:
        """Return a mask of at most `limit` of the allowed positions, uint8 [N]."""
        positions = allowed_N.nonzero().flatten()
        # Drawn on the CPU on every device, so that the choice does not depend on it.
        order = torch.randperm(len(positions), generator=self._generator)[:limit]
        mask_N = torch.zeros_like(allowed_N, dtype=torch.uint8)
        mask_N[positions[order.to(positions.device)]] = 1
        return mask_N


class _Resize(GeneralizedRCNNTransform):
    """torchvision's normalization; its resizing only if the config requests it or the image is too large."""

    def __init__(self, config: DetectorConfig, size_divisible: int) -> None:
        super().__init__(
            config.min_side or config.max_side,
            config.max_side,
            list(config.mean),
            list(config.std),
            size_divisible=size_divisible,
        )
        self._keep_size = config.min_side == 0

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self._keep_size and max(image.shape[-2:]) <= self.max_size:
            return image, target
        height, width = image.shape[-2:]
        # Scaled to the maximum, the shorter side still has more than one pixel.
        if min(height, width) * self.max_size > max(height, width):
            return super().resize(image, target)
        # torchvision would round the shorter side of such a strip to no pixel
        size = (1, self.max_size) if width > height else (self.max_size, 1)
        image = F.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0]
        if target is not None:
            factors = target["boxes"].new_tensor([size[1] / width, size[0] / height] * 2)
            target = {**target, "boxes": target["boxes"] * factors}
        return image, target


class SeparableRoIAlign(MultiScaleRoIAlign):
    """torchvision's `MultiScaleRoIAlign` (He et al., 2017) over a single map, as matrix products.

    Bilinear sampling is a product of a weight along y and one along x, so a box pools to W_y M W_x'. The values are
    torchvision's (`aligned=False`) up to rounding. The CPU gradient of torchvision's kernel took nearly half of the
    small detector's training time.

    Args:
        output_size: bins along each side.
        sampling_ratio: samples per bin along each side, which are averaged.
        stride: of the map, in pixels.
    """

    def __init__(self, output_size: int, sampling_ratio: int, stride: int) -> None:
        super().__init__(["0"], output_size, sampling_ratio)
        self.bins = output_size
        self.stride = stride

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """Pool boxes to [R of all images, C, output_size, output_size].

        Args:
            x: one map, [B, C, H, W].
            boxes: of each image, [R, 4] in pixels, x1 y1 x2 y2.
        """
        (maps_BCHW,) = x.values()
        return torch.cat([self._pool(m_CHW, b_R4) for m_CHW, b_R4 in zip(maps_BCHW, boxes, strict=True)])

    def _pool(self, map_CHW: Tensor, boxes_R4: Tensor) -> Tensor:
        channels, height, width = map_CHW.shape
        count, bins = len(boxes_R4), self.bins
        # W_y M W_x' for all channels: first along x, then along y.
        x_RSW = self._weights(boxes_R4[:, 0], boxes_R4[:, 2], width)
        y_RSH = self._weights(boxes_R4[:, 1], boxes_R4[:, 3], height)
        # (R * bins, W) @ (W, C * H) -> (R * bins, C * H): pooled along x.
        along_x = x_RSW.flatten(0, 1) @ map_CHW.permute(2, 0, 1).reshape(width, channels * height)
        pooled = along_x.view(count, bins * channels, height) @ y_RSH.transpose(1, 2)  # [R, x bins * C, y bins]
        return pooled.view(count, bins, channels, bins).permute(0, 2, 3, 1)

    def _weights(self, first_R: Tensor, last_R: Tensor, length: int) -> Tensor:
        """Return [R, bins, length]: the weight of each position of the map in a bin; 0 for samples far outside."""
        # (R,) pixels -> (R, S) sample points in cells -> (R, S, L) -> the mean of each bin's samples, (R, bins, L)
        samples = self.bins * self.sampling_ratio
        start_R, end_R = first_R / self.stride, last_R / self.stride
        steps_S = (torch.arange(samples, device=first_R.device, dtype=first_R.dtype) + 0.5) / samples
        # S sample points, evenly spaced in a box of at least one cell; a position's weight falls linearly from 1 at the
        # sample to 0 one cell away.
        at_RS = start_R[:, None] + (end_R - start_R).clamp(min=1)[:, None] * steps_S
        inside_RS = (at_RS >= -1) & (at_RS <= length)
        positions_L = torch.arange(length, device=first_R.device, dtype=first_R.dtype)
        hat_RSL = (1 - (at_RS.clamp(0, length - 1)[..., None] - positions_L).abs()).clamp(min=0) * inside_RS[..., None]
        return hat_RSL.unflatten(1, (self.bins, self.sampling_ratio)).mean(2)
