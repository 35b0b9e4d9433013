"""Published weights: a file whose config.json, if any, lies beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.vision.config import BACKGROUND, RESNET50_FPN, DetectorConfig
from vlp_models.vision.detector import build_detector
from vlp_models.vision.state import CONFIG, Detector, load_detector, load_state, read_weights

_HEAD = "roi_heads.box_head.fc7.weight"
_CLASSES = "roi_heads.box_predictor.cls_score.weight"


def load_published(path: Path, backbone: Literal["small", "resnet50_fpn"], names: Sequence[str]) -> Detector:
    """A detector from a weights file.

    Its classes are those of the config.json beside the file; without one, torchvision's COCO names for 91 classes, or
    else `names`, the data's own categories in order, if they are as many.

    Raises:
        CheckpointError: no such file, another architecture, or classes nobody has named.
    """
    if (path.parent / CONFIG).exists() and path.suffix == ".safetensors":
        detector = load_detector(path.parent, weights=path.name)
        if detector.config.backbone != backbone:
            raise CheckpointError(
                f"{path.parent / CONFIG}: a {detector.config.backbone} detector, but detector.backbone is {backbone}"
            )
        return detector
    state = read_weights(path)
    classes = _classes(path, state, names)
    config = RESNET50_FPN if backbone == "resnet50_fpn" else DetectorConfig()
    if _HEAD in state and state[_HEAD].dim() == 2:
        config = dataclasses.replace(config, feature_dim=state[_HEAD].shape[0])
    model = build_detector(config, len(classes))
    load_state(model, state, path)
    return Detector(model=model.eval(), config=config, classes=classes, detector_id="")


def _classes(path: Path, state: dict[str, Tensor], names: Sequence[str]) -> tuple[str, ...]:
    ours = (BACKGROUND, *names)
    count = state[_CLASSES].shape[0] if _CLASSES in state else len(ours)
    if count == 91:
        from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

        return tuple(FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
    if count != len(ours):
        raise CheckpointError(
            f"{path}: {count} classes with the background, but the data has {len(ours)}; put a {CONFIG} beside it that "
            "names them (data/detector/config.json of a trained detector shows the form)"
        )
    return ours
