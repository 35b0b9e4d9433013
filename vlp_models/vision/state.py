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

from vlp_models.errors import CheckpointError
from vlp_models.limits import check_numbers
from vlp_models.vision.config import DetectorConfig
from vlp_models.vision.detector import build_detector

FORMAT = "vlp-detector/1"
WEIGHTS = "detector.safetensors"
CONFIG = "config.json"
NO_DETECTOR = "none"
_COUNTER = "num_batches_tracked"


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
    what = {"architecture": _plain(config), "classes": list(classes)}
    detector_id = _identity(directory, what)
    _write_config(directory, {**what, "detector_id": detector_id, "training": dict(training)})
    return detector_id


def _identity(directory: Path, what: Mapping[str, Any]) -> str:
    digest = hashlib.sha256((directory / WEIGHTS).read_bytes())
    digest.update(json.dumps(what, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def save_no_detector(directory: Path, training: Mapping[str, Any]) -> str:
    """Writes a config.json that says there is none: features are imported or symbols."""
    _write_config(directory, {"classes": [], "detector_id": NO_DETECTOR, "training": dict(training)})
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
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record["architecture"].items()
        }
        check_numbers(fields)
        config, classes = DetectorConfig(**fields), tuple(map(str, record["classes"]))
        model = build_detector(config, len(classes))
    except Exception as error:  # the file is from outside: whatever torchvision makes of it, the file is at fault
        raise CheckpointError(
            f"{directory / CONFIG}: not a detector's config ({error}); `dvc repro detector`"
        ) from None
    load_state(model, read_weights(directory / weights), directory / weights)
    what = {"architecture": record["architecture"], "classes": record["classes"]}
    if weights == WEIGHTS and _identity(directory, what) != record["detector_id"]:
        raise CheckpointError(
            f"{directory / WEIGHTS}: damaged: weights and config.json are not what detector {record['detector_id']} "
            f"was; `rm -r {directory}` and `dvc checkout {directory}` may bring it back, `dvc repro --force detector` "
            "makes it anew"
        )
    model.to(device).eval()
    return Detector(model=model, config=config, classes=classes, detector_id=record["detector_id"])


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, checked to be a detector's."""
    path = directory / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}; `dvc repro detector` makes it") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or "detector_id" not in record:
        raise CheckpointError(f"{path}: not a detector's config ({FORMAT}); `dvc repro detector` makes it")
    return record


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, or a torch file holding nothing but tensors (torchvision's .pth).

    Raises:
        CheckpointError: missing, damaged, or a file that would run code when unpickled.
    """
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; set detector.weights in params.yaml to where it is") from None
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged or no weights file: {error}") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than tensors, so it is not loaded; save its state_dict() as .safetensors"
        ) from None
    if isinstance(state, dict) and isinstance(state.get("model"), dict):  # torchvision's training script nests it
        state = state["model"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: not a state dict; save the model's state_dict()")
    return dict(state)


def load_state(model: FasterRCNN, state: dict[str, Tensor], path: Path) -> None:
    """Strict loading.

    Raises:
        CheckpointError: listing missing and unexpected keys and wrong shapes.
    """
    own = model.state_dict()
    # Batch norm's counters play no part in eval mode, and torchvision's published ResNets lack them.
    counters = {name: tensor for name, tensor in own.items() if name.endswith(_COUNTER)}
    state = counters | {name: tensor for name, tensor in state.items() if name in own or not name.endswith(_COUNTER)}
    problems = {
        "missing": sorted(own.keys() - state.keys()),
        "unexpected": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"{name} {list(state[name].shape)} for {list(own[name].shape)}"
            for name in sorted(own.keys() & state.keys())
            if own[name].shape != state[name].shape
        ],
    }
    if any(problems.values()):
        lines = [f"  {len(keys)} {what}: {', '.join(keys)}" for what, keys in problems.items() if keys]
        raise CheckpointError(
            f"{path}: weights of another architecture than detector.backbone says:\n" + "\n".join(lines)
        )
    model.load_state_dict(state)


def _write_config(directory: Path, record: dict[str, Any]) -> None:
    text = json.dumps({"format": FORMAT, **record}, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def _plain(config: DetectorConfig) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(config).items()
    }
