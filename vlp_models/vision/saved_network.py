"""Networks that turn pixels into regions, on disk: weights as safetensors, and a config.json with their classes.

data/detector has a timm backbone, a detector (contrib/detector), or a record that there is neither. `detector_id` is a
hash of weights, architecture and classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vlp_models.common.limits import check_numbers
from vlp_models.errors import CheckpointError
from vlp_models.params import to_plain

CONFIG = "config.json"
DETECTOR_FORMAT = "vlp-detector/1"  # of a detector's config.json, also without a detector
NO_DETECTOR = "none"


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
    write_config(directory, DETECTOR_FORMAT, {"classes": [], "detector_id": NO_DETECTOR, "training": dict(training)})
    return NO_DETECTOR


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


def read_config(directory: Path, form: str, description: str) -> dict[str, Any]:
    """Read config.json and check its format.

    Args:
        form: the format. description: of such a file, for the message.

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
