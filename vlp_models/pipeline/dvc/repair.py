"""Mends what a killed DVC, or one that found the disk full, can leave behind in a workspace.

DVC writes .dvc/tmp/rwlock and dvc.lock in place: ended in between, it leaves an empty or cut-off file, and every later
command fails. (Seen with DVC 3.67: dvc/utils/serialize/_common.py, `_dump_data`.)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import yaml

LOCK_FILE = "dvc.lock"
KEPT = f".work/{LOCK_FILE}"  # the last one that was whole


def preflight(root: Path) -> list[str]:
    """Returns what it did, one line each; does nothing while a DVC process is alive here."""
    lock, lock_file = root / ".dvc" / "tmp" / "rwlock", root / LOCK_FILE
    rwlock_damaged, lock_file_damaged = _damaged_json(lock), lock_file.exists() and locked_stages(lock_file) is None
    kept = root / KEPT
    if lock_file.exists() and not locked_stages(lock_file) and (locked_stages(kept) or not lock_file.stat().st_size):
        lock_file_damaged = True  # emptied
    if not (rwlock_damaged or lock_file_damaged or locked_stages(lock_file)) or dvc_is_running(root):
        return []
    if not lock_file_damaged:
        keep_lock_file(root)  # the first stage may be killed before it has done so
    done = []
    if rwlock_damaged:
        lock.unlink()
        done.append(f"removed a damaged {lock.relative_to(root)}: no DVC process is alive")
    if lock_file_damaged and locked_stages(kept):
        replace(lock_file, kept.read_bytes())
        done.append(f"{LOCK_FILE} was damaged: put back as it was before the last stage ({KEPT})")
    elif lock_file_damaged:
        aside = lock_file.with_suffix(".lock.damaged")
        lock_file.replace(aside)
        done.append(f"{LOCK_FILE} was damaged: set aside as {aside.name}; `git checkout {LOCK_FILE}` may have one")
    return done


def keep_lock_file(root: Path) -> None:
    """Keeps a copy of a whole dvc.lock. A stage calls this when DVC has started it, so nothing is being written."""
    source, kept = root / LOCK_FILE, root / KEPT
    if locked_stages(source):
        kept.parent.mkdir(exist_ok=True)
        replace(kept, source.read_bytes())


def lock_entry(root: Path, stage: str) -> Any:
    """What dvc.lock records of a stage; None if nothing."""
    return (locked_stages(root / LOCK_FILE) or {}).get(stage)


def dvc_is_running(root: Path) -> bool:
    """Whether a `dvc` of this user works in `root` or below it."""
    root = root.resolve()
    for process in psutil.process_iter(["cmdline", "cwd"]):
        names = [Path(word).name for word in (process.info["cmdline"] or [])[:3]]  # dvc | python dvc | python -m dvc
        if "dvc" in names and process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(root):
            return True
    return False


def _damaged_json(path: Path) -> bool:
    try:
        return path.exists() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (ValueError, OSError):
        return True


def locked_stages(path: Path) -> dict[str, Any] | None:
    """The stages of a lock file; None if it can't be read, {} if it is empty."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.load(text, Loader=loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not text.strip():
        return {}
    if not text.endswith("\n"):  # cut off where it happens to be YAML still
        return None
    stages = found.get("stages") if isinstance(found, dict) else None
    return stages if isinstance(stages, dict) and all(isinstance(s, dict) for s in stages.values()) else None


def replace(path: Path, content: bytes) -> None:
    """Writes a file anew: whole, and on the disk, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
