"""Runs on a machine or a file system that lacks something which most have.

A run either completes with the undisturbed run's result, or ends at once with a message that names the cause; without
the condition, the next run then completes.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ground import TRAININGS, Command, Ground, environment
from moments import Fault, Outcome, expect_message, set_params, start
from parts import TORCHRUN, train_with_two

IMPOSSIBLE = "not possible on this machine"
NAMES = (  # of the project's folder
    "Meine Fötos",
    "100% of it",
    "a 'quoted' name, #1 [draft]",
    "/".join(["a folder whose name has sixty characters, as some servers do"] * 3),
)
WORKERS = {"trainer.num_workers": 2}


def without_locks(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Let `flock` fail, as on file systems without locks: ENOSYS, ENOLCK or EOPNOTSUPP."""
    code = _choose(fault, (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP))
    outcome.note = errno.errorcode[code]
    return _run(ground, fault, outcome, _shim(ground, f"fcntl.flock = fcntl.lockf = refuse({code})"), [], "lock")


def without_links(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Let hard links or symbolic links fail."""
    codes = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP)
    name, code = _choose(fault, [("link", code) for code in codes] + [("symlink", errno.EPERM)])
    outcome.note = f"{name}: {errno.errorcode[code]}"
    return _run(ground, fault, outcome, _shim(ground, f"os.{name} = refuse({code})"), [], "link")


def cache_types(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Let DVC link the workspace to its cache; in half of the cases the cache is on another file system."""
    kind = _choose(fault, ("symlink", "hardlink", "reflink,copy", "copy"))
    elsewhere = Path("/dev/shm") / f"vlp-faults-{os.getpid()}-{ground.lane}"
    outcome.note = f"{kind}{', cache in /dev/shm' if fault.number % 2 else ''}"
    dvc = [sys.executable, "-m", "dvc"]
    commands = [
        [*dvc, "config", "--quiet", "cache.type", kind],
        [*dvc, "checkout", "--quiet", "--relink", "--allow-missing"],
    ]
    if fault.number % 2:
        shutil.copytree(ground.project / ".dvc" / "cache", elsewhere)
        shutil.rmtree(ground.project / ".dvc" / "cache")
        commands.insert(0, [*dvc, "config", "--quiet", "cache.dir", str(elsewhere)])
        outcome.clean_up = lambda: shutil.rmtree(elsewhere)
    for command in commands:
        done = subprocess.run(
            command, cwd=ground.project, env=environment(ground.project), capture_output=True, text=True
        )
        if done.returncode:
            outcome.blame("silent", f"{' '.join(command[3:])}: {done.stderr[-300:]}")
    return _run(ground, fault, outcome, {}, [], "cache")


def odd_name(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Run in a folder with blanks, an umlaut, `%`, quotes, or 200 characters; `inflict` has put it there."""
    outcome.note = ground.project.relative_to(ground.folder).as_posix()[:40]
    return _run(ground, fault, outcome, {}, [], "path", "folder", "name")


def no_host_name(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Give the machine a host name that does not resolve, as in a container; the training is started by torchrun."""
    nameless = 'hostname no-such-host-xyz && mount --bind /dev/null /etc/hosts && exec "$@"'
    outcome.reference = train_with_two(ground, fault)
    set_params(ground, TORCHRUN)
    return _run(ground, fault, outcome, {}, ["unshare", "-rum", "sh", "-c", nameless, "sh"], "host name")


def small_shared_memory(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Give loader processes a /dev/shm of 4 kB to 16 MB, as in a container."""
    kilobytes = _choose(fault, (4, 64, 64, 1024, 16384))
    outcome.note = f"{kilobytes} kB"
    wrap = _mounted(f"mount -t tmpfs -o size={kilobytes}k tmpfs /dev/shm")
    restore = set_params(ground, WORKERS)
    run = _run(ground, fault, outcome, {}, wrap, "/dev/shm")
    restore()
    return run


def bad_temporary_folder(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Let TMPDIR be too long for a socket's path, read-only, tiny, or missing; trainings have loader processes."""
    outcome.note = _choose(fault, ("150 characters", "read-only", "64 kB", "missing"))
    folder, wrap = ground.folder / "temporary", []
    shutil.rmtree(folder, ignore_errors=True)
    if outcome.note == "150 characters":
        folder = folder / ("t" * max(10, 149 - len(str(folder))))
    if outcome.note != "missing":
        folder.mkdir(parents=True)
    if outcome.note in ("read-only", "64 kB"):
        option = "ro" if outcome.note == "read-only" else "size=64k"
        # Python falls back to /tmp and the working directory: they stay writable, as on such machines.
        wrap = _mounted(f"mount -t tmpfs -o {option} tmpfs '{folder}'")
    restore = set_params(ground, WORKERS if fault.stage in TRAININGS else {})
    run = _run(ground, fault, outcome, {"TMPDIR": str(folder)}, wrap, "tmpdir", "temporary", "full")
    restore()
    shutil.rmtree(ground.folder / "temporary", ignore_errors=True)
    return run


CONDITIONS: dict[str, Callable[[Ground, Fault, Outcome], Command]] = {
    "no file locks": without_locks,
    "no links": without_links,
    "cache linked": cache_types,
    "odd folder name": odd_name,
    "host name does not resolve": no_host_name,
    "small /dev/shm": small_shared_memory,
    "bad TMPDIR": bad_temporary_folder,
}


def _run(
    ground: Ground, fault: Fault, outcome: Outcome, variables: dict[str, str], wrap: list[str], *causes: str
) -> Command:
    """Run the fault's command under the condition; check the end, and the message of a refusal."""
    if wrap and subprocess.run([*wrap, "true"], capture_output=True).returncode:
        outcome.hit, outcome.output = False, IMPOSSIBLE
        return Command("true", ground.project)
    recorded = ground.recorded()
    run = start(ground, fault, env=environment(ground.project) | variables, wrap=wrap)
    outcome.exit_code = run.wait()
    expect_message(outcome, run, *causes)
    if outcome.exit_code and ground.recorded() - recorded:
        outcome.blame("lost", "it was refused only after a stage")
    return run


def _choose(fault: Fault, options: Sequence[Any]) -> Any:
    return random.Random(fault.chance).choice(options)


def _mounted(mount: str) -> list[str]:
    return ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def _shim(ground: Ground, statement: str) -> dict[str, str]:
    """Return the variables with which every Python process runs a statement first."""
    folder = ground.folder / "shim"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"{_SHIM}\n{statement}\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ground.project}"}


_SHIM = '''"""A file system without a function."""

import fcntl
import os


def refuse(code):
    def function(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return function

'''
