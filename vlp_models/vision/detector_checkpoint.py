"""Detectors on disk: `detector.safetensors` with `config.json`, or published weights files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vlp_models.common.limits import check_numbers
from vlp_models.common.state_dicts import load_external_state_dict, read_state_dict
from vlp_models.errors import CheckpointError, ParamsError, first_line
from vlp_models.params import DetectorBackbone, to_plain
from vlp_models.vision.detector import PUBLISHED, DetectorConfig, build_detector
from vlp_models.vision.region_source import BACKGROUND
from vlp_models.vision.torchvision_parts import FasterRCNN, FasterRCNN_ResNet50_FPN_Weights, get_model_weights

FORMAT = "vlp-detector/1"
WEIGHTS = "detector.safetensors"
CONFIG = "config.json"
NO_DETECTOR = "none"
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
    return save_network(directory / WEIGHTS, FORMAT, model, config, classes, training)


def save_network(
    path: Path, kind: str, net: nn.Module, config: Any, classes: Sequence[str], training: Mapping[str, Any]
) -> str:
    """Write weights to `path`, next to a config.json of format `kind`; return a hash of both without `training`."""
    from safetensors.torch import save_file

    # safetensors stores contiguous tensors only; a detector may be in the channels-last layout.
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}
    save_file(state, path)
    description = {"architecture": to_plain(config), "classes": list(classes)}
    detector_id = hash_weights(path, description)
    write_config(path.parent, kind, {**description, "detector_id": detector_id, "training": dict(training)})
    return detector_id


def save_no_detector(directory: Path, training: Mapping[str, Any]) -> str:
    """Write a config.json without a detector, for imported features and symbols."""
    write_config(directory, FORMAT, {"classes": [], "detector_id": NO_DETECTOR, "training": dict(training)})
    return NO_DETECTOR


def load_detector(directory: Path, device: str = "cpu", weights: str = WEIGHTS) -> Detector:
    """Load what `save_detector` wrote.

    Args:
        weights: name of the weights file in `directory`.

    Raises:
        CheckpointError: no detector, a damaged one, or weights of another architecture.
    """
    record = read_config(directory)
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


# ---- Files shared by detectors and backbones -----------------------------------------------------------------------


def hash_weights(weights: Path, description: Mapping[str, Any]) -> str:
    """Return the start of the sha256 of a weights file and its description."""
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(description, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def check_weights_hash(weights: Path, record: Mapping[str, Any], kind: str) -> None:
    """Check that weights and config.json were saved together.

    Args:
        record: content of the config.json next to the weights.
        kind: `detector` or `backbone`, for the message.

    Raises:
        CheckpointError: they were not.
    """
    description = {"architecture": record["architecture"], "classes": record["classes"]}
    if hash_weights(weights, description) != record["detector_id"]:
        folder = weights.parent
        raise CheckpointError(
            f"{weights}: damaged: weights and config.json do not match {kind} {record['detector_id']}; `rm -r "
            f"{folder}` and `dvc checkout {folder}` may restore it, `dvc repro --force detector` makes it again"
        )


def read_config(directory: Path, form: str = FORMAT, description: str = "a detector's config") -> dict[str, Any]:
    """Read config.json and check its format.

    Raises:
        CheckpointError: missing, damaged or of another format.
    """
    path = directory / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}; `dvc repro detector` makes it") from None
    file_format = record.get("format") if isinstance(record, dict) else None
    if file_format != form or "detector_id" not in record:
        raise CheckpointError(f"{path}: not {description} ({form}; found {file_format}); `dvc repro detector` makes it")
    return dict(record)


def write_config(directory: Path, form: str, record: Mapping[str, Any]) -> None:
    text = json.dumps({"format": form, **record}, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_architecture(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a detector's or backbone's config, from a file that may come from anywhere.

    Raises:
        KeyError, AttributeError: config.json has no section `architecture`. ValueError: an absurdly large number.
    """
    fields = {}
    for name, value in record["architecture"].items():
        # JSON has lists where a config has tuples.
        fields[name] = tuple(value) if isinstance(value, list) else value
    check_numbers(fields)
    return fields


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
