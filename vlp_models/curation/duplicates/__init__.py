"""Copies of images: near-duplicates between splits, and images that were withdrawn."""

from pathlib import Path
from typing import Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import MissingToolError

WITHDRAWN = Table("withdrawn", {})  # read -> `module:function`, of contrib/forgetting


def read_withdrawn(path: Path, rules: Any) -> Any:
    """Return the `WithdrawnList` of contrib/forgetting, against which every entry point of data checks new images.

    Args:
        path: the list that `vlp forget` writes; None is returned if it does not exist.
        rules: the `NearRules` of near-duplicates.

    Raises:
        DataError: a line of the list cannot be parsed.
        MissingToolError: there is a list, which must not be ignored, and contrib/forgetting is missing.
    """
    if not path.exists():
        return None
    if "read" not in WITHDRAWN:
        raise MissingToolError(f"{path}: withdrawn images need vlp_models/contrib/forgetting, which is not installed")
    return import_target(WITHDRAWN["read"])(path, rules)
