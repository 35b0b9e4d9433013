"""Delete old data from DVC's cache and remote: `dvc gc`, which is told what the kept versions need."""

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
    """
    (folder / ".dvc").mkdir()
    # The cache that the files of the outputs are in: dvc_files is CACHE/files/md5.
    (folder / ".dvc" / "config").write_text(f"[cache]\n    dir = {dvc_files(root).parents[1]}\n", encoding="utf-8")
    for number, text in enumerate(sorted(set(locks))):
        recorded = ((yaml.safe_load(text) or {}).get("stages") or {}).values()
        # Every output, and what no stage has made: raw data. One stage stands for all of them.
        files = {out["path"]: out for stage in recorded for out in stage.get("outs", [])}
        for dependency in (dep for stage in recorded for dep in stage.get("deps", [])):
            if dependency["path"].startswith("data/") and not _is_within(dependency["path"], files):
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


def _is_within(path: str, outputs: Iterable[str]) -> bool:
    """Return whether a path is an output, in one, or around one."""
    return any(f"{path}/".startswith(f"{out}/") or f"{out}/".startswith(f"{path}/") for out in outputs)


def collect_garbage(root: Path, commits: int, project: Path, *, remote: bool, dry: bool) -> tuple[int, int]:
    """Delete, or only list, what neither the workspace nor the newest commits nor the other project need.

    Returns:
        How many files of the cache, and their bytes.

    Raises:
        DataError: DVC failed, for example because its remote is away; nothing was deleted there.
    """
    command = [sys.executable, "-m", "dvc", "gc", "--force", "--workspace", "--rev", "HEAD", "--num", str(commits)]
    command += ["--projects", str(project)]
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
