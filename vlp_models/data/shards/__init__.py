"""Shards: WebDataset tars with an index, and how training reads them."""

from pathlib import Path
from typing import Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import MissingToolError

AUGMENTED = Table("augmented", {})  # samples -> `module:function`, of contrib/augment
STREAMING = Table("streaming", {})  # open, layout, order -> `module:object`, of contrib/streaming


def streaming(part: str) -> Any:
    """Return a part of contrib/streaming.

    Raises:
        MissingToolError: the folder is missing.
    """
    if part not in STREAMING:
        raise MissingToolError(
            "params.yaml: `trainer.stream.address` needs vlp_models/contrib/streaming, which is not installed"
        )
    return import_target(STREAMING[part])


def augmented(base: Any, *, directory: Path, shards: Path, control: bool) -> Any:
    """Return the samples of `base`, a view of captions, followed by generated ones (contrib/augment).

    Args:
        directory: data/augmented/NAME, the generated captions.
        control: use captions of the images in `base` in their place.

    Raises:
        MissingToolError: the folder is missing.
    """
    if "samples" not in AUGMENTED:
        raise MissingToolError("params.yaml: `augment` needs vlp_models/contrib/augment, which is not installed")
    return import_target(AUGMENTED["samples"])(base, directory, shards, control=control)
