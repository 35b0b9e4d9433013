"""One JSON file for each arm and seed: a study goes on where it was, and several processes share it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pretraining_study.arms import Arm
from pretraining_study.setting import Setting
from pretraining_study.sizes import sizes

ROOT = Path(__file__).resolve().parents[2]


class Results:
    """The results of one study with one setting, below `directory`. What was made otherwise lies in another folder."""

    def __init__(self, directory: Path, setting: Setting) -> None:
        self.directory = directory
        self.setting = setting

    def read(self, arm: Arm, seed: int) -> dict[str, Any] | None:
        """None: not there yet."""
        file = self._file(arm, seed)
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def write(self, arm: Arm, seed: int, result: dict[str, Any]) -> None:
        """Whole or not at all. The code's commit is written with it."""
        write_whole(self._file(arm, seed), {**result, "commit": commit()})

    def add_missing(self, arm: Arm, seed: int, result: dict[str, Any]) -> None:
        """Write a result of another sitting, with its commit, unless there already is one."""
        file = self._file(arm, seed)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, result)

    @contextmanager
    def claimed(self, arm: Arm, seed: int) -> Iterator[bool]:
        """Whether this process may make it: no other one is at it. The claim ends with the process at the latest."""
        file = self._file(arm, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{file}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _file(self, arm: Arm, seed: int) -> Path:
        families = {one.family: sizes(one.family, self.setting) for one in (arm, arm.fine_tuning.captioner) if one}
        made_of = self.setting.fingerprint(arm, families)
        return self.directory / f"{arm.name}-{made_of}" / f"seed-{seed}.json"


def read_recorded(file: Path, made_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runs that `file` has; `made_of`: the settings that this run shares with them.

    Raises:
        ValueError: there are none, or they were made with other settings.
    """
    if not file.exists():
        raise ValueError(f"{file}: no runs are recorded; run without --recorded")
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name, own in made_of.items():
        if kept[name] != json.loads(json.dumps(own)):
            raise ValueError(f"{file}: its {name} is not this run's; run without --recorded")
    return kept


def write_whole(file: Path, value: Any) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def commit() -> str:
    """The commit of the code, with a + where files differ from it; empty outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "vlp_models", "studies"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
