"""Delete old data from DVC's cache and remote by `dvc gc`, which also keeps what the kept versions need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

from vlp_models.common.environment import command_environment
from vlp_models.common.workspace import dvc_files
from vlp_models.errors import DataError, last_words

REMOVING = "Removing "  # begins the lines of `dvc gc --dry`


def write_project(folder: Path, locks: Iterable[str], root: Path) -> None:
    """Write a DVC project with the outputs of each dvc.lock, which `dvc gc --projects` then keeps.

    Args:
        locks: contents of the dvc.lock files of kept versions.

    Raises:
        DataError: the cache is not the project's own, whose other users would lose their data.
    """
    cache = dvc_files(root).parents[1]  # of CACHE/files/md5
    if not cache.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{cache}: DVC's cache is outside of the project; set retention.commits: 0, and see `dvc gc -p`"
        )
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text(f'[cache]\n    dir = "{cache}"\n', encoding="utf-8")
    for number, text in enumerate(sorted(set(locks))):
        recorded = ((yaml.safe_load(text) or {}).get("stages") or {}).values()
        # Every output, and what no stage has made: raw data. One stage stands for all of them.
        files = {out["path"]: out for stage in recorded for out in stage.get("outs", [])}
        inputs = [dep for stage in recorded for dep in stage.get("deps", []) if dep["path"].startswith("data/")]
        for dependency in sorted(inputs, key=lambda dep: len(dep["path"])):  # a folder before what is in it
            if not any(_overlap(dependency["path"], path) for path in files):
                files[dependency["path"]] = dependency
        stage = {"cmd": "true", "outs": list(files)}
        part = folder / str(number)
        part.mkdir()
        (part / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"kept": stage}}), encoding="utf-8")
        lock = {"schema": "2.0", "stages": {"kept": {"cmd": "true", "outs": list(files.values())}}}
        (part / "dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
    # `dvc gc --rev HEAD` reads a commit of this project, too.
    options = ("user.name=vlp", "user.email=vlp@localhost", "commit.gpgSign=false", f"core.hooksPath={os.devnull}")
    settings = [word for option in options for word in ("-c", option)]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "kept"]):
        _run(folder, ["git", *settings, *words])


def _overlap(path: str, other: str) -> bool:
    """Return whether one path is the other, or in it."""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


def require_whole(root: Path, locks: Iterable[str]) -> None:
    """
    Raises:
        DataError: the cache lacks a folder's list of files, so `dvc gc` would not know which files of the remote
            are needed; or the git remotes have commits that no branch here has, whose data would be deleted.
    """
    for text in locks:
        for stage in ((yaml.safe_load(text) or {}).get("stages") or {}).values():
            for out in stage.get("outs", []):
                md5 = str(out.get("md5", ""))
                if md5.endswith(".dir") and not (dvc_files(root) / md5[:2] / md5[2:]).exists():
                    raise DataError(f"{out['path']} of a kept version: not in DVC's cache; set retention.remote: false")
    if _run(root, ["git", "remote"]).strip():
        _run(root, ["git", "fetch", "--quiet", "--all"])
        if _run(root, ["git", "rev-list", "--max-count=1", "--remotes", "--not", "--branches"]).strip():
            raise DataError("git's remotes have commits that are not here; pull them, or set retention.remote: false")


def collect_garbage(root: Path, commits: int, project: Path, *, remote: bool, dry: bool) -> tuple[int, int]:
    """Delete, or only list, what neither the workspace nor the newest commits of any branch nor tags nor the other
    project need.

    Returns:
        How many files of the cache, and their bytes.

    Raises:
        DataError: DVC failed, for example because its remote is away; nothing was deleted there.
    """
    command = [sys.executable, "-m", "dvc", "gc", "--force", "--workspace", "--all-tags"]
    command += ["--all-branches", "--num", str(commits), "--projects", str(project)]
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
        name = "git" if command[0] == "git" else "dvc gc"
        raise DataError(f"{name}: {last_words(done.stderr, done.stdout)}")
    return done.stdout + done.stderr
