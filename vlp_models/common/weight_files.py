"""What params.yaml may say of weights: a file, an installed package that holds one, or the library's own.

    a/path.safetensors        a file, from the project's root
    package:NAME              the one weights file of an installed package
    timm, timm:NAME           timm's own of a model: downloaded once where there is a network
    torchvision               torchvision's own of a detector, likewise

Nothing here opens a file; vlp_models/common/state_dicts.py does.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.common.packages import PREFIX, check_noted, data_files, dependency, find_package
from vlp_models.errors import CheckpointError

LIBRARIES = ("timm", "torchvision")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def watched(weights: str) -> str:
    """What DVC watches in place of `weights`; empty where there are none, or a library has them."""
    return "" if library_of(weights) else dependency(weights)


def is_source(weights: str) -> bool:
    """Whether `weights` is one of the above, and no folder with a checkpoint of this project."""
    return bool(library_of(weights)) or weights.startswith(PREFIX) or weights.endswith(SUFFIXES)


def library_of(weights: str) -> str:
    """`timm` or `torchvision`, where the weights are that library's own; else empty."""
    return next((name for name in LIBRARIES if weights == name or weights.startswith(f"{name}:")), "")


def file_of(weights: str, root: Path, where: str) -> Path:
    """The file of a path or of a package.

    Args:
        root: what a path starts from.
        where: the place in params.yaml that says `weights`, for messages.

    Raises:
        ParamsError, MissingToolError: see `find_package`.
        CheckpointError: the package holds no weights file, or several.
        DataError: the installed package is another than packages/NAME.json has noted.
    """
    if not weights.startswith(PREFIX):
        return root / weights
    found = find_package(weights, f"{where}: {weights}")
    check_noted(weights, root, where)
    paths = [path for path in data_files(found).values() if path.suffix in SUFFIXES]
    if len(paths) != 1:
        listed = ", ".join(sorted(path.name for path in paths)) or "none"
        raise CheckpointError(
            f"{where}: {weights}: holds not one weights file ({', '.join(SUFFIXES)}) but: {listed}; give a file's path"
        )
    return paths[0]
