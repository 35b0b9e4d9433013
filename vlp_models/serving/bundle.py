"""What a registered version holds, put together and tried out before it is registered.

`checkpoint/` always; `detector/` and `features.json` (how the regions were made) where the model reads regions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlp_models.errors import CheckpointError, VLPError
from vlp_models.models.info import CheckpointInfo
from vlp_models.workspace.finished import link_or_copy
from vlp_models.workspace.paths import hash_path

BUNDLE = "bundle"  # the folder's own name: MLflow keeps it
CHECKPOINT, DETECTOR, FEATURES = "checkpoint", "detector", "features.json"
FROM_IMAGES = ("detector", "grid")  # `features.source`: what can be made again of an image alone


def bundle_info(bundle: Path) -> CheckpointInfo:
    """What the bundle's checkpoint says of itself.

    Raises:
        CheckpointError: config.json is missing, damaged or of another format.
    """
    return checkpoint_info(bundle / CHECKPOINT)


def checkpoint_info(directory: Path) -> CheckpointInfo:
    """
    Raises:
        CheckpointError: config.json is missing, damaged or of another format.
    """
    file = directory / "config.json"
    try:
        return CheckpointInfo.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: does not say what the checkpoint is ({error})") from None


def write_bundle(bundle: Path, *, checkpoint: Path, detector: Path, features: Mapping[str, Any]) -> CheckpointInfo:
    """Makes `bundle`; files are linked where the disk can, since weights may be large.

    Args:
        features: params of the features stage.

    Raises:
        CheckpointError: see `checkpoint_info`.
    """
    info = checkpoint_info(checkpoint)
    shutil.copytree(checkpoint, bundle / CHECKPOINT, copy_function=link_or_copy)
    if info.detector_id:
        shutil.copytree(detector, bundle / DETECTOR, copy_function=link_or_copy)
        (bundle / FEATURES).write_text(json.dumps(dict(features), indent=2) + "\n", encoding="utf-8")
    return info


def content_of(bundle: Path) -> str:
    """The identity of a version: what its bundle holds of weights."""
    detector = bundle / DETECTOR
    return hash_path(bundle / CHECKPOINT) + (hash_path(detector)[:16] if detector.exists() else "")


def not_served(bundle: Path) -> str:
    """Why nobody expects the bundle to predict from an image; empty: it must be able to.

    Raises:
        CheckpointError: see `bundle_info`.
    """
    from vlp_models.tasks import task_class

    info = bundle_info(bundle)
    if info.task is None or task_class(info.task).words is None:
        return f"the task {info.task} is not served"
    if info.detector_id:
        source = json.loads((bundle / FEATURES).read_text(encoding="utf-8"))["source"]
        if source not in FROM_IMAGES:
            return f"its regions come from `{source}`, which can't be made from an image"
    return ""


def try_out(bundle: Path, images: Sequence[Path]) -> str:
    """Predicts for one image (or as many as the task looks at) through the bundle, as a server would. Returns why not;
    empty: it can be served.

    Args:
        images: the first one that is there is taken, in every place.
    """
    from vlp_models.serving.predictor import Predictor
    from vlp_models.tasks import task_class

    there = next((path for path in images if path.is_file()), None)
    if there is None:
        return "no image of the val or test split is on this disk to try it with"
    try:
        predictor = Predictor(bundle)
        words = task_class(predictor.task).words
        texts = ["is there a picture?"] if words is not None and words.text else None
        count = 1 if words is None else words.images
        made = predictor.predict([there] if count == 1 else [[there] * count], texts)
    except VLPError as error:
        return str(error)
    except Exception as error:  # whatever breaks here would break in a server
        return f"{type(error).__name__}: {error}"
    return "" if len(made) == 1 and made[0] else "it predicts nothing"
