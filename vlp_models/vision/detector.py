"""Faster R-CNN (Ren et al., 2015), torchvision's, at two sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from vlp_models.vision.config import PUBLISHED, DetectorConfig
from vlp_models.vision.roi_align import SeparableRoIAlign
from vlp_models.vision.small_backbone import STRIDE, SmallBackbone

WORDS_WEIGHT = 5.0  # the mean over words, few of which hold, is small


def build_detector(config: DetectorConfig, num_classes: int) -> FasterRCNN:
    """A detector with fresh weights; nothing is downloaded.

    Args:
        num_classes: background included.
    """
    if config.backbone in PUBLISHED:
        model = get_model(f"fasterrcnn_{config.backbone}", weights=None, weights_backbone=None, num_classes=num_classes)
        if config.feature_dim != model.roi_heads.box_predictor.cls_score.in_features:
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
        rpn_anchor_generator=AnchorGenerator((config.anchors,), ((1.0,),)),
        rpn_pre_nms_top_n_train=256,
        rpn_pre_nms_top_n_test=256,
        rpn_post_nms_top_n_train=96,
        rpn_post_nms_top_n_test=96,
        rpn_batch_size_per_image=128,
        box_roi_pool=SeparableRoIAlign(config.roi_size, sampling_ratio=2, stride=STRIDE),
        box_head=_BoxHead(backbone.out_channels * config.roi_size**2, config.feature_dim),
        box_predictor=FastRCNNPredictor(config.feature_dim, num_classes),
        box_batch_size_per_image=64,
        box_positive_fraction=0.5,
    )
    model.transform = _Resize(config, size_divisible=STRIDE)
    if config.words:
        model.roi_heads.__class__ = _WordHeads
        model.roi_heads.word_predictor = nn.Linear(config.feature_dim, len(config.words))
    return model


class _BoxHead(nn.Module):
    """torchvision's TwoMLPHead with batch norm: a few hundred steps at a high rate kill its units without."""

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
    """RoI heads that also learn which words hold of an object, as bottom-up attention's learn its attributes
    (Anderson et al., 2018, section 3.1): words are shared between classes, and a feature that tells them apart tells
    more than the class.
    """

    word_predictor: nn.Linear

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """As torchvision's; in training `targets` hold `words`, float32 [N, W], beside boxes and labels."""
        if not self.training or targets is None:
            return super().forward(features, proposals, image_shapes, targets)
        proposals, matched, labels, regression = self.select_training_samples(proposals, targets)
        box_features = self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        logits, boxes = self.box_predictor(box_features)
        classifier, box_reg = fastrcnn_loss(logits, boxes, labels, regression)
        object_rows = torch.cat(labels) > 0
        words = torch.cat([target["words"][rows] for target, rows in zip(targets, matched, strict=True)])[object_rows]
        loss = F.binary_cross_entropy_with_logits(self.word_predictor(box_features[object_rows]), words)
        return [], {"loss_classifier": classifier, "loss_box_reg": box_reg, "loss_words": WORDS_WEIGHT * loss}


class _Resize(GeneralizedRCNNTransform):
    """torchvision's normalisation, with its resizing only where the config asks for it or the image is too large."""

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
        return super().resize(image, target)
