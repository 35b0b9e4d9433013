"""Published weights: a file whose config.json, if any, lies beside it, or torchvision's own by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from vlp_models.common.state_dicts import load_exactly, read_state_dict
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import DetectorBackbone
from vlp_models.vision.config import BACKGROUND, PUBLISHED, DetectorConfig
from vlp_models.vision.detector import build_detector
from vlp_models.vision.state import CONFIG, Detector, load_detector
from vlp_models.vision.weights import fetch_torchvision

_HEAD = "roi_heads.box_predictor.cls_score.weight"
COCO_CLASSES = 91  # torchvision's, background and gaps included
# torchvision's first COCO weights were trained with batch norms that add nothing to the variance; it sets them so when
# it loads its own.
_FIRST = "resnet50_fpn"


def load_published(path: Path, backbone: DetectorBackbone, names: Sequence[str]) -> Detector:
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
    state = read_state_dict(path)
    return _detector(state, backbone, _classes(path, state, names), path)


def fetch_published(weights: str, backbone: DetectorBackbone, where: str) -> Detector:
    """A detector with torchvision's COCO weights, from its cache or the network.

    Args:
        weights: `torchvision`.
        where: the place in params.yaml that says so.

    Raises:
        ParamsError: torchvision has none for this.
        CheckpointError: they can't be had.
    """
    if weights != "torchvision" or backbone not in PUBLISHED:
        raise ParamsError(
            f"{where}: {weights}: torchvision has weights for detector.backbone {', '.join(PUBLISHED)}, not {backbone}"
        )
    state, about = fetch_torchvision(f"fasterrcnn_{backbone}", where)
    return _detector(state, backbone, (BACKGROUND, *about["categories"][1:]), where)


def _detector(
    state: Mapping[str, Tensor], backbone: DetectorBackbone, classes: tuple[str, ...], where: object
) -> Detector:
    config = PUBLISHED.get(backbone, DetectorConfig())
    if _HEAD in state and state[_HEAD].dim() == 2:
        config = dataclasses.replace(config, feature_dim=state[_HEAD].shape[1])
    counted = any(name.endswith("num_batches_tracked") for name in state)
    if backbone == _FIRST and len(classes) == COCO_CLASSES and not counted:
        config = dataclasses.replace(config, norm_eps=0.0)
    model = build_detector(config, len(classes))
    load_exactly(model, state, where, "detector.backbone")
    return Detector(model=model.eval(), config=config, classes=classes, detector_id="")


def _classes(path: Path, state: Mapping[str, Tensor], names: Sequence[str]) -> tuple[str, ...]:
    ours = (BACKGROUND, *names)
    count = state[_HEAD].shape[0] if _HEAD in state else len(ours)
    if count == COCO_CLASSES:
        from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

        return tuple(FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
    if count != len(ours):
        raise CheckpointError(
            f"{path}: {count} classes with the background, but the data has {len(ours)}; put a {CONFIG} beside it that "
            "names them (data/detector/config.json of a trained detector shows the form)"
        )
    return ours
