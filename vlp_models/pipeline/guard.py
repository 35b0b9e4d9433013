"""What a stage's process owes to the ones around it: to stop when told or left alone, and not to run twice at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from vlp_models.common.lock import file_lock
from vlp_models.common.workspace import Workspace
from vlp_models.errors import Terminated
from vlp_models.pipeline.dvc.lock_file import back_up

PATIENCE = 60.0  # seconds a stage waits for another process of the same stage, which may be saving its state
LOOK_EVERY = 1.0
REMIND_EVERY = 10.0
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
SHELLS = ("sh", "bash", "dash", "zsh")


def run_by_dvc() -> bool:
    return bool(os.environ.get("DVC_STAGE"))


@contextmanager
def guarded(workspace: Workspace, stage: str) -> Iterator[None]:
    """SIGTERM ends the block with `Terminated`; so does the death of the DVC above it. One process a stage.

    Of a distributed training, the first rank alone holds the lock.

    Raises:
        DataError: another process of this stage is at work in this workspace, and does not end.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    if any(os.environ.get(name, "0") != "0" for name in RANKS):
        yield
        return
    lock = workspace.root / ".work" / "locks" / f"{stage.replace('@', '-')}.lock"
    with file_lock(lock, f"`vlp stage {stage.replace('@', ' ')}`", wait=PATIENCE):
        if run_by_dvc():
            back_up(workspace.root)
            threading.Thread(target=_stop_with_dvc, args=(_above(),), daemon=True).start()
        yield


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _above() -> list[int]:
    """The process ids above this one up to DVC, which runs a stage by a shell."""
    import psutil

    ids = [os.getppid()]
    with suppress(psutil.Error):
        parent = psutil.Process(ids[0])
        if parent.name() in SHELLS:
            ids.append(parent.ppid())
    return ids


def _stop_with_dvc(above: list[int]) -> None:
    """A stage that outlives its DVC would write into the next run's files, and nobody would record what it made."""
    while _alive(above):
        time.sleep(LOOK_EVERY)
    with suppress(OSError):
        print("the DVC process that ran this stage is gone; stopping", file=sys.stderr)
    while True:  # a library may swallow what the handler raises
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(REMIND_EVERY)


def _alive(above: list[int]) -> bool:
    """Whether each is still the parent of the one below it: the children of the dead get another."""
    import psutil

    if os.getppid() != above[0]:
        return False
    try:
        return len(above) == 1 or psutil.Process(above[0]).ppid() == above[1]
    except psutil.Error:
        return False
