"""DVC as a flow sees it: bring targets up to date, ask what is stale, clear the way beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from flows.process import StageFailed, environment, supervised
from vlp_models.pipeline.dvc.consistency import clear_records, explain_removal, remove_wrong_entries
from vlp_models.pipeline.dvc.dvc_yaml import is_ours
from vlp_models.pipeline.dvc.lock_file import repair

__all__ = ["is_stale", "plan", "repair", "repro"]


def is_stale(root: Path, targets: list[str]) -> bool:
    """Whether `dvc status` reports a change for any of the targets or what they depend on; no target: for anything."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json", *(["--with-deps"] if targets else []), *targets],
        cwd=root,
        env=environment(),
        capture_output=True,
        text=True,
    )
    try:
        return done.returncode != 0 or json.loads(done.stdout) != {}
    except json.JSONDecodeError:
        return True


def plan(root: Path, log: Callable[[str], None], *, hold: int | None = None) -> None:
    """dvc.yaml anew, where params.yaml has other models, runs or datasets than it had.

    Raises:
        StageFailed: params.yaml is wrong.
    """
    if is_ours(root):
        supervised(root, ["vlp", "plan"], log, hold=hold)


def repro(
    root: Path, targets: list[str], log: Callable[[str], None], *, timeout: float = 0, hold: int | None = None
) -> bool:
    """`dvc repro targets`, supervised. Returns whether a stage ran, or came from the run cache.

    Raises:
        StageFailed: and its kinds, as `supervised`.
    """
    changed = False

    def watch(line: str) -> None:
        nonlocal changed
        changed = changed or line.startswith("Running stage") or "is cached - skipping run" in line
        log(line)

    clear_records(root)
    try:
        supervised(root, [sys.executable, "-m", "dvc", "repro", *targets], watch, timeout=timeout, hold=hold)
    finally:
        if edited := remove_wrong_entries(root):
            log(explain_removal(edited))
    if edited:
        raise StageFailed(explain_removal(edited))
    return changed
