"""Detectors on disk: `detector.safetensors` and `config.json`, or published weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchvision.models.detection import FasterRCNN

from vlp_models.common.limits import check_numbers
from vlp_models.common.state_dicts import load_exactly, read_state_dict
from vlp_models.errors import CheckpointError
from vlp_models.params import to_plain
from vlp_models.vision.config import DetectorConfig
from vlp_models.vision.detector import build_detector

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
    load_exactly(model, read_state_dict(directory / weights), directory / weights, "detector.backbone")
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
