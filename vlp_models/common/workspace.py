"""The project's paths, and what every stage records: fingerprint and manifest.

The paths that stages read and write are defined here. `atomic_write` and `output_directory` (io.py) keep outputs
complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vlp_models.common.environment import program_environment
from vlp_models.common.io import hash_path, write_json
from vlp_models.errors import DataError

WITHDRAWN = "data/withdrawn.jsonl"
REGISTERED = Path(".work", "registered")  # touched when `register` has run, and not when DVC restores its result
# What a commit of a project consists of, next to its code. Folders are named as a whole.
PROJECT_FOLDERS = ("packages/", "promotions/", "presets/", "plugins/")
PROJECT_FILES = (
    *("dvc.lock", "params.yaml", "dvc.yaml"),
    *("packages", "promotions", "presets", "plugins", "*.dvc", "data/*.gitignore", WITHDRAWN),
)
SEARCH = "search"  # folder of an evaluation and of a bundle: decoding settings and retrieval memory


class _Path:
    """A path that every workspace has, relative to its root."""

    def __init__(self, relative: str) -> None:
        self._relative = relative

    def __get__(self, workspace: Workspace, _: type) -> Path:
        return workspace.root / self._relative


@dataclass(frozen=True)
class Workspace:
    """The project's root; every path a stage reads or writes is an attribute or method of it."""

    root: Path = field(default_factory=Path.cwd)

    lock = _Path(".work/run.lock")  # of `vlp run`, `vlp forget` and the flows: one of them at a time uses a workspace
    withdrawn = _Path(WITHDRAWN)  # images that must not be used (again), by `vlp forget`; in git, may not exist
    validated = _Path("data/validated")
    detector = _Path("data/detector")
    features = _Path("data/features")
    tokenizer = _Path("data/tokenizer")
    shards = _Path("data/shards")
    contents = _Path("data/contents")  # hashes of the shards' content (data/shards/contents.py)
    plan = _Path("data/plan")
    reports = _Path("reports")

    def raw(self, name: str) -> Path:
        return self.root / "data" / "raw" / name

    def interim(self, source: str) -> Path:
        return self.root / "data" / "interim" / source

    def augmented(self, name: str) -> Path:
        """Captions that a model generated for training images."""
        return self.root / "data" / "augmented" / name

    def checkpoint(self, start: str) -> Path:
        """Checkpoint `initial/MODEL`, `pretrain/RUN` or `finetune/RUN`."""
        return self.root / "checkpoints" / start

    def curve(self, run: str) -> Path:
        """Loss curve of `pretrain/RUN` or `finetune/RUN`."""
        return self.reports / "curves" / f"{run}.csv"

    def training(self, run: str) -> Path:
        """Final metrics and cost of `pretrain/RUN` or `finetune/RUN`."""
        return self.reports / "training" / f"{run}.json"

    def figures(self, run: str) -> Path:
        """Figures that the model of `pretrain/RUN` draws of itself; an empty list for most models."""
        return self.reports / "figures" / f"{run}.json"

    def evaluation(self, run: str) -> Path:
        return self.reports / "eval" / run

    def work(self, stage: str, fingerprint: str) -> Path:
        """Create the folder of a stage's resume state. It is not a DVC out: DVC deletes outs before a stage starts."""
        path = self.root / ".work" / stage / fingerprint[:16]
        path.mkdir(parents=True, exist_ok=True)
        return path

    def relative(self, path: Path) -> str:
        """Return `path` as tables store it: relative to the root if it is inside, else absolute."""
        path = path.absolute()
        return str(path.relative_to(self.root.absolute())) if path.is_relative_to(self.root.absolute()) else str(path)


def run_git(root: Path, *arguments: str) -> bytes | None:
    """Return git's output; None if it fails, hangs or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, env=program_environment(), capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def find_uncommitted(root: Path) -> list[str]:
    """Return the project's own files and folders that are untracked or changed; empty without git."""
    # Paths of `git status` start at the repository's root, which may be above the project.
    prefix = run_git(root, "rev-parse", "--show-prefix")
    status = run_git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", *PROJECT_FILES)
    if prefix is None or status is None:
        return []
    start = len(os.fsdecode(prefix).rstrip("\n"))
    # An entry is two letters of state, a space and the path.
    paths = [os.fsdecode(entry[3:])[start:] for entry in status.split(b"\0") if entry]
    # A folder of the project stands for all files in it.
    names = {path.partition("/")[0] if path.startswith(PROJECT_FOLDERS) else path for path in paths}
    # Files and folders of the project first.
    return sorted(names, key=lambda path: (path not in PROJECT_FILES, path))


@cache
def dvc_setting(root: Path, *words: str) -> str:
    """Return the first line that `dvc WORDS` prints; empty if it fails."""
    command = [sys.executable, "-m", "dvc", *words]
    try:
        done = subprocess.run(command, cwd=root, env=program_environment(), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.partition("\n")[0]


def dvc_files(root: Path) -> Path:
    """Return the folder of DVC's cached files, by their md5; the default one if DVC is not installed."""
    # DVC stores a file with md5 `abcdef...` as files/md5/ab/cdef...
    return Path(dvc_setting(root, "cache", "dir") or root.absolute() / ".dvc" / "cache") / "files" / "md5"


def project_root(root: Path) -> Path:
    """Return the project of a workspace: for a temporary copy by `dvc exp run --temp`, the original.

    Copies share the original's registry and records.
    """
    parts = root.absolute().parts
    # DVC makes its copies in `.dvc/tmp/exps/NAME` of the original project.
    for depth in range(len(parts) - 2):
        if parts[depth : depth + 3] == (".dvc", "tmp", "exps"):
            return Path(*parts[:depth])
    return root


def require_output(path: Path, made_by: str) -> Path:
    """Return `path`, or raise a DataError that names the stage that writes it."""
    if not path.exists():
        raise DataError(f"{path}: not found; run `dvc repro {made_by}`")
    return path


def fingerprint(params: Any, inputs: dict[str, Path]) -> str:
    """Return the hash of a stage's params and the content of its inputs."""
    # The inputs' names count and not their paths, so that a copy of the project has the same fingerprint.
    value = {"params": params, "inputs": {name: hash_path(path) for name, path in inputs.items()}}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_manifest(directory: Path, *, stage: str, params: Any, counts: dict[str, Any], **more: Any) -> None:
    """Write manifest.json into an output; it is deterministic, so that equal work gives equal bytes."""
    write_json(directory / "manifest.json", {"stage": stage, "params": params, "counts": counts, **more})
