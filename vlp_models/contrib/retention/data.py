"""Delete old data from DVC's cache and remote by `dvc gc`, which also keeps what the kept versions and commits need."""

from __future__ import annotations

import posixpath
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vlp_models.common.environment import command_environment
from vlp_models.common.workspace import dvc_files, run_git
from vlp_models.errors import DataError, last_words
from vlp_models.pipeline.dvc.stale import dvc_error

REMOVING = "Removing "  # begins the lines of `dvc gc --dry`
Files = Mapping[str, Mapping[str, Any]]  # path -> its entry in a dvc.lock or .dvc file


def read_lock(text: str) -> dict[str, Mapping[str, Any]]:
    """Return the files of a dvc.lock: every output, and what no stage has made: raw data."""
    stages = ((yaml.safe_load(text) or {}).get("stages") or {}).values()
    files: dict[str, Mapping[str, Any]] = {out["path"]: out for stage in stages for out in stage.get("outs", [])}
    inputs = [dep for stage in stages for dep in stage.get("deps", []) if dep["path"].startswith("data/")]
    for dependency in sorted(inputs, key=lambda dep: len(dep["path"])):  # a folder before what is in it
        if not any(_overlap(dependency["path"], path) for path in files):
            files[dependency["path"]] = dependency
    return files


def read_commits(root: Path, count: int) -> Iterator[Files]:
    """Yield the files of the newest commits of every branch, and of every tag.

    They are read here and not by `dvc gc --all-branches`, which fails on a commit that is older than a remote whose
    password is in .dvc/config.local.
    """
    branches = _run(root, ["git", "for-each-ref", "--format=%(refname)", "refs/heads"]).split()
    commits = set(_run(root, ["git", "rev-list", "--no-walk", "--tags"]).split())
    for branch in branches:
        commits |= set(_run(root, ["git", "rev-list", f"--max-count={count}", branch]).split())
    for commit in sorted(commits):
        files = read_lock(_show(root, commit, "dvc.lock"))
        for name in _run(root, ["git", "ls-tree", "-r", "-z", "--name-only", commit]).split("\0"):
            if name.endswith(".dvc"):
                folder = posixpath.dirname(name)
                for out in (yaml.safe_load(_show(root, commit, name)) or {}).get("outs", []):
                    path = posixpath.normpath(posixpath.join(folder, out["path"]))
                    files[path] = {**out, "path": path}
        yield files


def _show(root: Path, commit: str, name: str) -> str:
    """Return a file of a commit; empty if it has none."""
    return (run_git(root, "show", f"{commit}:./{name}") or b"").decode("utf-8", errors="replace")


def write_project(folder: Path, needed: Iterable[Files], root: Path) -> None:
    """Write a DVC project with the files of kept versions and commits, which `dvc gc --projects` then keeps.

    Raises:
        DataError: the cache is not the project's own, whose other users would lose their data.
    """
    cache = dvc_files(root).parents[1]  # of CACHE/files/md5
    if not cache.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{cache}: DVC's cache is outside of the project; set retention.commits: 0, and see `dvc gc -p`"
        )
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text(
        f'[core]\n    no_scm = true\n[cache]\n    dir = "{cache}"\n', encoding="utf-8"
    )
    for number, files in enumerate(needed):
        part = folder / str(number)
        part.mkdir()
        stage = {"cmd": "true", "outs": list(files)}  # one stage stands for all of them
        (part / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"kept": stage}}), encoding="utf-8")
        lock = {"schema": "2.0", "stages": {"kept": {"cmd": "true", "outs": list(files.values())}}}
        (part / "dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")


def _overlap(path: str, other: str) -> bool:
    """Return whether one path is the other, or in it."""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


def require_whole(root: Path, needed: Iterable[Files]) -> None:
    """
    Raises:
        DataError: the cache lacks a folder's list of files, so `dvc gc` would not know which files of the remote
            are needed; or the git remotes have commits that no branch here has, whose data would be deleted.
    """
    for files in needed:
        for path, entry in files.items():
            md5 = str(entry.get("md5", ""))
            if md5.endswith(".dir") and not (dvc_files(root) / md5[:2] / md5[2:]).exists():
                raise DataError(f"{path} of a kept version or commit: not in DVC's cache; set retention.remote: false")
    if _run(root, ["git", "remote"]).strip():
        _run(root, ["git", "fetch", "--quiet", "--all"])
        if _run(root, ["git", "rev-list", "--max-count=1", "--remotes", "--not", "--branches"]).strip():
            raise DataError("git's remotes have commits that are not here; pull them, or set retention.remote: false")


def collect_garbage(root: Path, project: Path, *, remote: bool, dry: bool) -> tuple[int, int]:
    """Delete, or only list, what neither the workspace nor the other project needs.

    Returns:
        How many files of the cache, and their bytes.

    Raises:
        DataError: DVC failed, for example because its remote is away; nothing was deleted there.
    """
    command = [sys.executable, "-m", "dvc", "gc", "--force", "--workspace", "--projects", str(project)]
    listed = _run(root, [*command, "--dry"])
    files = [Path(line.removeprefix(REMOVING)) for line in listed.splitlines() if line.startswith(REMOVING)]
    size = sum(file.stat().st_size for file in files if file.is_file())
    if not dry and (files or remote):
        _run(root, [*command, "--cloud"] if remote else command)
    return len(files), size


def _run(root: Path, command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=root, env=command_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise DataError(
            f"git: {last_words(done.stderr)}" if command[0] == "git" else f"dvc gc: {dvc_error(done.stderr)}"
        )
    return done.stdout + done.stderr
