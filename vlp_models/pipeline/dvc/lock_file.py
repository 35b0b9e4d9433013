"""Read, back up and repair dvc.lock, and make DVC notice damaged outputs.

DVC writes .dvc/tmp/rwlock and dvc.lock in place: killed at that moment, or on a full disk, it leaves an empty or
truncated file, and every later command fails (seen with DVC 3.67: dvc/utils/serialize/_common.py, `_dump_data`).

The rwlock has the pids of the DVC processes that use a path. DVC drops those of processes that have ended, but after a
reboot or in a new pod such a pid may belong to any program, and DVC then waits for that one.

DVC hashes neither an output whose size and time are unchanged nor a read-only file of its cache. What a disk damages
stays so, and with hard or symbolic links `dvc checkout` restores the damaged file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from vlp_models.common.checksums import SUMS, find_damaged
from vlp_models.common.io import write_text
from vlp_models.errors import DataError

LOCK_FILE = "dvc.lock"
BACKUP = f".work/{LOCK_FILE}"  # the last intact one
DAMAGED = f".work/{LOCK_FILE}.damaged"  # what a restored backup replaced
RWLOCK = ".dvc/tmp/rwlock"  # {"write": {path: {"pid", "cmd"}}, "read": {path: [{"pid", "cmd"}, ...]}}
REPRO_MODULE = "vlp_models.pipeline.dvc.repro"  # runs `dvc repro` in its own process


def read_stages(path: Path) -> dict[str, Any] | None:
    """Return the stages of a lock file; None if it is missing or damaged, {} if it is empty."""
    try:
        return parse_stages(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def parse_stages(text: str) -> dict[str, Any] | None:
    """Return the stages of a lock file's content; None if it is damaged, {} if it is empty."""
    if not text.strip():
        return {}
    if not text.endswith("\n"):  # truncated where it happens to be valid YAML
        return None
    try:
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (ValueError, yaml.YAMLError):
        return None
    stages = content.get("stages") if isinstance(content, dict) else None
    return stages if isinstance(stages, dict) and all(isinstance(s, dict) for s in stages.values()) else None


def drop_former_inputs(root: Path, pipeline: Mapping[str, Any]) -> str | None:
    """Return dvc.lock without the entries of stages that have read more than they will; None if there are none.

    DVC compares what dvc.yaml lists: a stage that loses a dependency, such as a dataset, would keep its result.

    Args:
        pipeline: the stages of dvc.yaml. One for each run or dataset (`foreach`) lists the same inputs always.
    """
    stages = read_stages(root / LOCK_FILE) or {}
    unchanged = {}
    for name, entry in stages.items():
        listed = pipeline.get(name, {}).get("deps")
        if listed is None or {dep["path"] for dep in entry.get("deps", [])} <= {*listed}:
            unchanged[name] = entry
    if len(unchanged) == len(stages):
        return None
    return yaml.safe_dump({"schema": "2.0", "stages": unchanged}, sort_keys=False, allow_unicode=True)


def output_hashes(stages: Mapping[str, Any]) -> dict[str, str]:
    """Return output path -> md5 of all stages; empty for an output without one."""
    return {out["path"]: out.get("md5", "") for stage in stages.values() for out in stage.get("outs", [])}


def repair(root: Path) -> list[str]:
    """Restore or remove the files that a killed DVC damaged, drop its entries from the rwlock, expose damaged outputs.

    Do nothing while a DVC process is alive here.

    Returns:
        What was done, one line each.

    Raises:
        DataError: a merge left git's conflict markers in dvc.lock.
    """
    rwlock, lock_file, backup = root / RWLOCK, root / LOCK_FILE, root / BACKUP
    _check_merged(lock_file)
    rwlock_damaged = _is_damaged_json(rwlock)
    stages, saved = read_stages(lock_file), read_stages(backup)
    # An empty lock file is damaged as well: DVC truncates it before it writes.
    damaged = lock_file.exists() and (stages is None or (not stages and bool(saved or not lock_file.stat().st_size)))
    # Nothing to repair, or a DVC that is alive may be writing at this moment.
    if not (rwlock_damaged or damaged or stages or rwlock.exists()) or dvc_is_running(root):
        return []
    if not damaged:
        back_up(root)  # DVC may be killed before its first stage does so
    # first the locks, then dvc.lock itself
    done = []
    if rwlock_damaged:
        rwlock.unlink()
        done.append(f"removed a damaged {RWLOCK}: no DVC process is alive")
    elif dropped := _drop_ended_holders(rwlock):
        done.append(f"{RWLOCK}: dropped the entries of DVC processes that have ended: pid {', '.join(dropped)}")
    if damaged and saved:
        # Kept, because it may have entries that the backup lacks.
        (root / DAMAGED).write_bytes(lock_file.read_bytes())
        write_text(lock_file, backup.read_text(encoding="utf-8"), sync=True)
        done.append(
            f"{LOCK_FILE} was damaged: restored from {BACKUP}, as it was before the last stage; the damaged file is "
            f"{DAMAGED}"
        )
    elif damaged:
        aside = lock_file.with_suffix(".lock.damaged")
        lock_file.replace(aside)
        done.append(f"{LOCK_FILE} was damaged: moved to {aside.name}; `git checkout {LOCK_FILE}` may restore it")
    return [*done, *_expose_damaged(root, stages or saved or {})]


def _expose_damaged(root: Path, stages: Mapping[str, Any]) -> list[str]:
    """Make DVC hash the damaged files of checkpoints, and its cache's files that are links to them.

    DVC then restores them from its cache; an object that is damaged as well is removed, and the stage runs again.
    """
    lines: list[str] = []
    for name in output_hashes(stages):
        if not name.startswith("checkpoints/"):
            continue
        # a run of adapters has them in a folder of their own
        for sums in sorted((root / name).rglob(SUMS)):
            damaged = find_damaged(sums.parent)
            lines += [
                f"{reason}; DVC restores it from its cache, or runs its stage again" for reason in damaged.values()
            ]
            # SHA256SUMS too: it may be what is damaged
            for path in {*damaged, sums} if damaged else ():
                with suppress(OSError):  # it is missing
                    path.chmod(0o644)
                    os.utime(path)
    return lines


def _check_merged(lock_file: Path) -> None:
    """Refuse conflict markers: both sides are whole, and only the user can choose."""
    try:
        lines = lock_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return
    for number, line in enumerate(lines, start=1):
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            raise DataError(
                f"{lock_file}:{number}: git's conflict markers; take one side with `git checkout --ours {LOCK_FILE}` "
                f"or `git checkout --theirs {LOCK_FILE}`, then run again: what differs is computed again"
            )


def back_up(root: Path) -> None:
    """Copy an intact dvc.lock to .work. A stage that DVC started calls this: DVC is not writing then."""
    if read_stages(root / LOCK_FILE):
        write_text(root / BACKUP, (root / LOCK_FILE).read_text(encoding="utf-8"), sync=True)


def dvc_is_running(root: Path) -> bool:
    """Return whether a `dvc` process of this user runs in `root` or below it."""
    # A process reports its folder without symbolic links.
    root = root.resolve()
    # by its command line: its own pid files are what may be damaged
    for process in psutil.process_iter(["cmdline", "cwd"]):
        names = [Path(word).name for word in (process.info["cmdline"] or [])[:3]]  # dvc | python dvc | python -m dvc
        is_dvc = "dvc" in names or REPRO_MODULE in names
        if is_dvc and process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(root):
            return True
    return False


def read_holders(rwlock: Path) -> dict[int, str]:
    """Return pid -> command of the DVC processes that the rwlock names.

    Raises:
        FileNotFoundError: there is no rwlock.
        OSError, ValueError, KeyError, TypeError, AttributeError: it cannot be read.
    """
    return {int(entry["pid"]): str(entry["cmd"]) for entry in _entries(json.loads(rwlock.read_text(encoding="utf-8")))}


def _entries(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield {"pid", "cmd"} of all writers and readers of the rwlock."""
    yield from content.get("write", {}).values()
    for readers in content.get("read", {}).values():
        yield from readers


def _drop_ended_holders(rwlock: Path) -> list[str]:
    """Remove the entries of processes that have ended, whose pids may belong to other programs now; return the pids.

    An entry stays while a process with its pid may be the one that wrote it.
    """
    # the file is DVC's: its format may change
    try:
        ended = {pid for pid, command in read_holders(rwlock).items() if not _may_be_running(pid, command)}
        content = json.loads(rwlock.read_text(encoding="utf-8")) if ended else {}
        writers = {path: entry for path, entry in content.get("write", {}).items() if entry["pid"] not in ended}
        readers = {
            path: running
            for path, entries in content.get("read", {}).items()
            if (running := [entry for entry in entries if entry["pid"] not in ended])
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no such file, or not one of DVC's
        return []
    if ended:
        write_text(rwlock, json.dumps({"write": writers, "read": readers}))
    return [str(pid) for pid in sorted(ended)]


def _may_be_running(pid: int, command: str) -> bool:
    """Return whether the process with this pid may be the one that the rwlock describes by `command`, its sys.argv.

    A DVC command has `dvc` on its command line, a program that uses DVC as a library the name of its script or module.
    """
    # `python -m package` has the path of its __main__.py as sys.argv[0]
    program = Path(command.partition(" ")[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    except psutil.Error:  # it may not be examined
        return True
    # Words of the command line without folders and suffixes: `dvc`, `python -m dvc`, `dvc.exe`.
    return not {name, "dvc"}.isdisjoint(part for word in words for part in Path(word).name.split("."))


def _is_damaged_json(path: Path) -> bool:
    try:
        return path.exists() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (ValueError, OSError):
        return True
