"""DVC commands of an ingest, each in its own process: fetch data that others versioned, and version the batches."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vlp_models.common.environment import command_environment
from vlp_models.data.batches import batch_folders
from vlp_models.data.formats.base import printable
from vlp_models.errors import DataError, first_line

LOCK_TIMEOUT = 120.0  # seconds to wait for another DVC process in the project
BATCHES_PER_COMMAND = 200


def fetch(root: Path, files: list[str], *, only_list: bool = False) -> list[Path]:
    """Run `dvc update` for imports and `dvc pull` for other .dvc files; return the folders they track.

    Raises:
        DataError: a .dvc file is missing or tracks several outputs, or DVC failed.
    """
    import yaml

    folders: list[Path] = []
    imports: list[str] = []
    pulled: list[str] = []
    for name in files:
        path = root / name
        try:
            entry: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
            # paths are relative to `wdir`, which is relative to the file
            (out,) = entry["outs"]
            folder = Path(os.path.normpath(path.parent / entry.get("wdir", ".") / out["path"]))
        except (OSError, yaml.YAMLError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not a .dvc file of one folder ({first_line(error)}); see ingest.fetch") from None
        folders.append(folder)
        # `dvc import` records where the data comes from under `deps`, `dvc add` does not.
        (imports if entry.get("deps") else pulled).append(name)
    if not only_list:
        if imports:
            _dvc(root, "update", "--quiet", *imports)
        if pulled:
            _dvc(root, "pull", "--quiet", *pulled)
    return [folder for folder in folders if folder.is_dir()]


def track(root: Path, dataset: Path) -> None:
    """Run `dvc add` for every batch without a .dvc file; one file a batch, so only new batches cost time."""
    batches = batch_folders(dataset)
    # Each batch has its own .dvc file next to its folder.
    new = [str(batch.relative_to(root)) for batch in batches if not batch.with_name(f"{batch.name}.dvc").exists()]
    for start in range(0, len(new), BATCHES_PER_COMMAND):
        _dvc(root, "add", "--quiet", *new[start : start + BATCHES_PER_COMMAND])


def require_project(root: Path) -> None:
    """Raise a `DataError` unless `root` is a DVC project."""
    if not (root / ".dvc").is_dir():
        raise DataError(f"{root}: not a DVC project; run `dvc init`, or set `ingest.track: false`")


def _dvc(root: Path, *arguments: str) -> None:
    require_project(root)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=root,
            env=command_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode == 0:
            return
        output = (done.stderr or done.stdout).strip()
        # another DVC process in the project: wait for it
        is_busy = "is busy" in output or "Unable to acquire lock" in output
        if not is_busy or time.monotonic() > deadline:
            message = "\n".join(map(printable, output[-2000:].splitlines()))
            raise DataError(f"dvc {arguments[0]} failed; run `vlp ingest` again once it works:\n{message}")
        time.sleep(1.0)
