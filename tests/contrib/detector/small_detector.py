"""A very small detector and how the tests train it."""

from __future__ import annotations

import torch

from vlp_models.contrib.detector.checkpoint import Detector
from vlp_models.contrib.detector.faster_rcnn import DetectorConfig, build_detector
from vlp_models.contrib.detector.training import LabeledImage, TrainingOptions, TrainingResult, train_detector

CLASSES = ("__background__", "blue square", "red circle")
CONFIG = DetectorConfig(
    channels=(8, 16, 24), feature_dim=32, anchors=(16.0, 22.0, 28.0), words=("blue", "circle", "red", "square")
)


def train(drawings: list[LabeledImage], **options: object) -> tuple[Detector, TrainingResult]:
    torch.manual_seed(0)
    model = build_detector(CONFIG, len(CLASSES))
    settings = TrainingOptions(**{"steps": 100, "batch_size": 4, "lr": 0.003, "seed": 0, "flip": False} | options)
    result = train_detector(model, drawings, settings, torch.device("cpu"))
    return Detector(model=model, config=CONFIG, classes=CLASSES, detector_id="test"), result
