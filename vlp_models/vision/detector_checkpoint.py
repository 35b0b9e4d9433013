"""Detectors on disk: `detector.safetensors` and `config.json`, or published weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torchvision.models.detection import FasterRCNN

from vlp_models.common.limits import check_numbers
from vlp_models.common.state_dicts import load_strict, read_state_dict
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import DetectorBackbone, to_plain
from vlp_models.vision.detector import BACKGROUND, PUBLISHED, DetectorConfig, build_detector
from vlp_models.vision.pretrained_weights import fetch_torchvision

FORMAT = "vlp-detector/1"
WEIGHTS = "detector.safetensors"
CONFIG = "config.json"
NO_DETECTOR = "none"


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A detector ready for use (eval mode) and what it is."""

    model: FasterRCNN
    config: DetectorConfig
    classes: tuple[str, ...]  # names, background first
    detector_id: str


def save_detector(
    directory: Path, model: FasterRCNN, config: DetectorConfig, classes: Sequence[str], training: Mapping[str, Any]
) -> str:
    """Writes both files and returns the detector's id: the start of the sha256 of weights, architecture and classes."""
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / WEIGHTS)
    what = {"architecture": to_plain(config), "classes": list(classes)}
    detector_id = identity_of(directory / WEIGHTS, what)
    write_config(directory, FORMAT, {**what, "detector_id": detector_id, "training": dict(training)})
    return detector_id


def identity_of(weights: Path, what: Mapping[str, Any]) -> str:
    """The start of the sha256 of a weights file and of what it is."""
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(what, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def save_no_detector(directory: Path, training: Mapping[str, Any]) -> str:
    """Writes a config.json that says there is none: features are imported or symbols."""
    write_config(directory, FORMAT, {"classes": [], "detector_id": NO_DETECTOR, "training": dict(training)})
    return NO_DETECTOR


def load_detector(directory: Path, device: str = "cpu", weights: str = WEIGHTS) -> Detector:
    """Reads what `save_detector` wrote.

    Args:
        weights: the file's name in `directory`.

    Raises:
        CheckpointError: no detector there, a damaged one, or weights of another architecture.
    """
    record = read_config(directory)
    if record["detector_id"] == NO_DETECTOR:
        raise CheckpointError(
            f"{directory / CONFIG}: there is no detector here (detector.source: none), so pixels can't be turned into "
            "regions; set detector.source to `train` or `weights` in params.yaml"
        )
    try:
        config, classes = DetectorConfig(**read_architecture(record)), tuple(map(str, record["classes"]))
        model = build_detector(config, len(classes))
    except Exception as error:  # the file is from outside: whatever torchvision makes of it, the file is at fault
        raise CheckpointError(
            f"{directory / CONFIG}: not a detector's config ({error}); `dvc repro detector`"
        ) from None
    load_strict(model, read_state_dict(directory / weights), directory / weights, "detector.backbone")
    if weights == WEIGHTS:
        check_identity(directory / WEIGHTS, record, "detector")
    model.to(device).eval()
    return Detector(model=model, config=config, classes=classes, detector_id=record["detector_id"])


def check_identity(weights: Path, record: Mapping[str, Any], kind: str) -> None:
    """
    Args:
        record: the config.json beside the weights.
        kind: `detector` or `backbone`, for the message.

    Raises:
        CheckpointError: weights and record are not those that were saved together.
    """
    what = {"architecture": record["architecture"], "classes": record["classes"]}
    if identity_of(weights, what) != record["detector_id"]:
        folder = weights.parent
        raise CheckpointError(
            f"{weights}: damaged: weights and config.json are not what {kind} {record['detector_id']} was; `rm -r "
            f"{folder}` and `dvc checkout {folder}` may bring it back, `dvc repro --force detector` makes it anew"
        )


def read_config(directory: Path, form: str = FORMAT, what: str = "a detector's config") -> dict[str, Any]:
    """config.json, checked to be of this format.

    Raises:
        CheckpointError: missing, damaged or of another format.
    """
    path = directory / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}; `dvc repro detector` makes it") from None
    found = record.get("format") if isinstance(record, dict) else None
    if found != form or "detector_id" not in record:
        raise CheckpointError(f"{path}: not {what} ({form}; found {found}); `dvc repro detector` makes it")
    return dict(record)


def write_config(directory: Path, form: str, record: Mapping[str, Any]) -> None:
    text = json.dumps({"format": form, **record}, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_architecture(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a detector's or a backbone's config, from a file that may be from anywhere.

    Raises:
        KeyError, AttributeError: config.json lacks it, or it is no section. ValueError: a number beyond reason.
    """
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record["architecture"].items()
    }
    check_numbers(fields)
    return fields


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
    return _build_published(state, backbone, _published_classes(path, state, names), path)


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
    return _build_published(state, backbone, (BACKGROUND, *about["categories"][1:]), where)


def _build_published(
    state: Mapping[str, Tensor], backbone: DetectorBackbone, classes: tuple[str, ...], where: object
) -> Detector:
    config = PUBLISHED.get(backbone, DetectorConfig())
    if _HEAD in state and state[_HEAD].dim() == 2:
        config = dataclasses.replace(config, feature_dim=state[_HEAD].shape[1])
    counted = any(name.endswith("num_batches_tracked") for name in state)
    if backbone == _FIRST and len(classes) == COCO_CLASSES and not counted:
        config = dataclasses.replace(config, norm_eps=0.0)
    model = build_detector(config, len(classes))
    load_strict(model, state, where, "detector.backbone")
    return Detector(model=model.eval(), config=config, classes=classes, detector_id="")


def _published_classes(path: Path, state: Mapping[str, Tensor], names: Sequence[str]) -> tuple[str, ...]:
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
