"""Detectors on disk: `detector.safetensors` with `config.json`, or published weights files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vlp_models.common.state_dicts import load_external_state_dict, read_state_dict
from vlp_models.contrib.detector.faster_rcnn import PUBLISHED, DetectorConfig, build_detector
from vlp_models.contrib.detector.torchvision_parts import FasterRCNN, FasterRCNN_ResNet50_FPN_Weights, get_model_weights
from vlp_models.errors import CheckpointError, ParamsError, first_line
from vlp_models.params import DetectorBackbone
from vlp_models.vision.region_source import BACKGROUND
from vlp_models.vision.saved_network import (
    CONFIG,
    DETECTOR_FORMAT,
    NO_DETECTOR,
    check_weights_hash,
    read_architecture,
    read_config,
    save_network,
)

WEIGHTS = "detector.safetensors"
HEAD = "roi_heads.box_predictor.cls_score.weight"
COCO_CLASSES = 91  # torchvision's, including background and gaps


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A detector in eval mode. classes: names, background first. detector_id: empty before it is saved."""

    model: FasterRCNN
    config: DetectorConfig
    classes: tuple[str, ...]
    detector_id: str


# ---- Saved detectors ---------------------------------------------------------------------------------------------


def save_detector(
    directory: Path, model: FasterRCNN, config: DetectorConfig, classes: Sequence[str], training: Mapping[str, Any]
) -> str:
    """Write weights and config.json; return the detector's id, a hash of weights, architecture and classes."""
    return save_network(directory / WEIGHTS, DETECTOR_FORMAT, model, config, classes, training)


def load_detector(directory: Path, device: str = "cpu", weights: str = WEIGHTS) -> Detector:
    """Load what `save_detector` wrote.

    Args:
        weights: name of the weights file in `directory`.

    Raises:
        CheckpointError: no detector, a damaged one, or weights of another architecture.
    """
    record = read_config(directory, DETECTOR_FORMAT, "a detector's config")
    if record["detector_id"] == NO_DETECTOR:
        raise CheckpointError(
            f"{directory / CONFIG}: no detector (detector.source: none), so regions can't be extracted from pixels; "
            "set detector.source to `train` or `weights` in params.yaml"
        )
    try:
        config, classes = DetectorConfig(**read_architecture(record)), tuple(map(str, record["classes"]))
        model = build_detector(config, len(classes))
    except Exception as error:  # an external file may make torchvision raise anything
        raise CheckpointError(
            f"{directory / CONFIG}: not a detector's config ({error}); `dvc repro detector`"
        ) from None
    load_external_state_dict(model, read_state_dict(directory / weights), directory / weights, "detector.backbone")
    # The id in config.json is a hash of `WEIGHTS`; a published weights file next to it has another.
    if weights == WEIGHTS:
        check_weights_hash(directory / WEIGHTS, record, "detector")
    model.to(device).eval()
    return Detector(model=model, config=config, classes=classes, detector_id=record["detector_id"])


# ---- Published weights -------------------------------------------------------------------------------------------


def load_published(path: Path, backbone: DetectorBackbone, names: Sequence[str]) -> Detector:
    """Load a detector from a weights file.

    Its classes come from a config.json next to the file; without one, they are torchvision's COCO names if there are 91
    classes, or else `names`, the data's own categories, if the number is right.

    Raises:
        CheckpointError: no such file, another architecture, or the names of the classes are unknown.
    """
    if (path.parent / CONFIG).exists() and path.suffix == ".safetensors":
        detector = load_detector(path.parent, weights=path.name)
        if detector.config.backbone != backbone:
            raise CheckpointError(
                f"{path.parent / CONFIG}: a {detector.config.backbone} detector, but detector.backbone is {backbone}"
            )
        return detector
    state = read_state_dict(path)
    classes = (BACKGROUND, *names)
    # The rows of the file's classifier are its classes, including the background.
    count = state[HEAD].shape[0] if HEAD in state else len(classes)
    if count == COCO_CLASSES:
        classes = tuple(FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
    elif count != len(classes):
        raise CheckpointError(
            f"{path}: {count} classes with the background, but the data has {len(classes)}; put a {CONFIG} next to it "
            "that names them (see data/detector/config.json of a trained detector)"
        )
    return _build_published(state, backbone, classes, path)


def fetch_published(weights: str, backbone: DetectorBackbone, where: str) -> Detector:
    """Load a detector with torchvision's COCO weights, from its cache or the network.

    Args:
        weights: `torchvision`.
        where: the key in params.yaml, for messages.

    Raises:
        ParamsError: torchvision has no weights for this backbone.
        CheckpointError: the download failed.
    """
    if weights != "torchvision" or backbone not in PUBLISHED:
        raise ParamsError(
            f"{where}: {weights}: torchvision has weights for detector.backbone {', '.join(PUBLISHED)}, not {backbone}"
        )
    entry = get_model_weights(f"fasterrcnn_{backbone}")["DEFAULT"]
    try:
        state = entry.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # a download can raise anything
        raise CheckpointError(
            f"{where}: torchvision's weights are not available from {entry.url} ({first_line(error)}); without a "
            "network, name the file"
        ) from None
    # torchvision's first category is a background with a name of its own.
    return _build_published(dict(state), backbone, (BACKGROUND, *entry.meta["categories"][1:]), where)


def _build_published(
    state: Mapping[str, Tensor], backbone: DetectorBackbone, classes: tuple[str, ...], where: object
) -> Detector:
    config = PUBLISHED.get(backbone, DetectorConfig())
    if HEAD in state and state[HEAD].dim() == 2:
        config = dataclasses.replace(config, feature_dim=state[HEAD].shape[1])
    # torchvision's first COCO weights (ResNet-50, without batch counters) were trained with batch norms of eps 0, which
    # torchvision sets when it loads them itself.
    has_counters = any(name.endswith("num_batches_tracked") for name in state)
    if backbone == "resnet50_fpn" and len(classes) == COCO_CLASSES and not has_counters:
        config = dataclasses.replace(config, norm_eps=0.0)
    model = build_detector(config, len(classes))
    load_external_state_dict(model, state, where, "detector.backbone")
    return Detector(model=model.eval(), config=config, classes=classes, detector_id="")
