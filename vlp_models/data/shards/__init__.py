"""Shards: WebDataset tars with an index, and how training reads them."""

from typing import Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import MissingToolError

STREAMING = Table("streaming", {})  # open, layout, order -> `module:object`, of contrib/streaming


def streaming(part: str) -> Any:
    """Return a part of contrib/streaming.

    Raises:
        MissingToolError: the folder is missing.
    """
    if part not in STREAMING:
        raise MissingToolError("`trainer.stream.address` needs vlp_models/contrib/streaming, which is not installed")
    return import_target(STREAMING[part])
