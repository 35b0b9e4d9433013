"""A stage's process: it stops when asked or when its DVC dies, and never runs twice at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from vlp_models.common.environment import SHELLS
from vlp_models.common.lock import file_lock
from vlp_models.common.log import announce_stop, get_logger
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.supervise import kill_stopped_descendants
from vlp_models.common.workspace import Workspace
from vlp_models.errors import Terminated
from vlp_models.pipeline.dvc.lock_file import back_up

logger = get_logger(__name__)

METERS = Table("meters", {})  # name -> `module:function` of a workspace's root and a stage: a context that measures it

LAUNCHED = "VLP_LAUNCHED"  # environment variable of the processes that a launcher has started
RECORDED = "VLP_RECORDED"  # set there if DVC runs the launching stage
LOCK_WAIT = 60.0  # seconds a stage waits for another process of the same stage, which may be saving its state
LOCK_WAIT_LAUNCHED = 180.0  # a file server frees the locks of a lost machine after about 90 s
CHECK_EVERY = 1.0
REPEAT_EVERY = 10.0
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_by_dvc() -> bool:
    """Return whether DVC started this process as a stage."""
    return bool(os.environ.get("DVC_STAGE"))


def recorded_by_dvc() -> bool:
    """Return whether DVC will record this stage's outputs: it started this process, or the one that launched it."""
    return run_by_dvc() or RECORDED in os.environ


@contextmanager
def guarded(workspace: Workspace, stage: str, *, launching: bool = False) -> Iterator[None]:
    """Run the block as the only process of `stage`; SIGTERM, or the death of the DVC above it, raises `Terminated`.

    A stop is announced at once, and ends the stage also if a library turns what the handler raises into its own error.

    In a distributed training only rank 0 holds the lock.

    Args:
        launching: this process only starts the stage elsewhere; it has a lock of its own, and rank 0 there the stage's.

    Raises:
        BusyError: another process of this stage is running in this workspace and does not end.
    """
    # ranks above 0: rank 0 has the lock, and announces the stop
    if any(os.environ.get(name, "0") != "0" for name in RANKS):
        with stopped_by_signals(stage, announce=False):
            yield
        return
    name = f"{'launch-' if launching else ''}{stage.replace('@', '-')}.lock"
    lock = workspace.root / ".work" / "locks" / name
    wait = LOCK_WAIT_LAUNCHED if LAUNCHED in os.environ else LOCK_WAIT
    command = f"`vlp stage {stage.replace('@', ' ')}`"
    # Signals first, so that a stop while this waits for the lock is announced as well.
    with stopped_by_signals(stage), file_lock(lock, command, wait=wait):
        threading.Thread(target=kill_stopped_descendants, daemon=True).start()
        if run_by_dvc():  # DVC is not writing dvc.lock while a stage runs
            back_up(workspace.root)
            # The ancestors are read now, since this process gets another parent when DVC dies.
            threading.Thread(target=_stop_with_dvc, args=(_ancestors(),), daemon=True).start()
        with nullcontext() if launching else measured(workspace.root, stage):
            yield


@contextmanager
def measured(root: Path, stage: str) -> Iterator[None]:
    """Measure what the block costs (contrib/costs)."""
    with ExitStack() as meters:
        for target in METERS.values():
            meters.enter_context(import_target(target)(root, stage))
        yield


@contextmanager
def stopped_by_signals(stage: str, *, announce: bool = True) -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and KeyboardInterrupt on SIGINT, wherever the block is."""
    # the handler runs between any two instructions, and may run more than once
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if announce and not received:
            announce_stop(f"{stage}: stopping")
        received.append(number)
        raise _make_stop(number)

    # Python lets only the main thread set handlers.
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    # A library may have turned the stop into an error of its own.
    except Exception:
        if received:
            raise _make_stop(received[0]) from None
        raise
    finally:
        # None stands for a handler that was not set from Python, which `signal.signal` does not accept.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _make_stop(number: int) -> BaseException:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _ancestors() -> list[int]:
    """Return the ids of the processes above this one up to DVC, which runs a stage through a shell."""
    import psutil

    # DVC -> shell -> this process; without a shell DVC is the parent
    ids = [os.getppid()]
    with suppress(psutil.Error):
        parent = psutil.Process(ids[0])
        if parent.name() in SHELLS:
            ids.append(parent.ppid())
    return ids


def _stop_with_dvc(ancestors: list[int]) -> None:
    """Stop this process when DVC dies: else it writes into the next run's files, and nothing records its output."""
    while _are_alive(ancestors):
        time.sleep(CHECK_EVERY)
    with suppress(OSError):
        logger.warning("the DVC process that ran this stage is gone; stopping")
    while True:  # a library may swallow what the handler raises
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(REPEAT_EVERY)


def _are_alive(ancestors: list[int]) -> bool:
    """Return whether each is still the parent of the one below it: orphans get another parent."""
    import psutil

    if os.getppid() != ancestors[0]:
        return False
    try:
        return len(ancestors) == 1 or psutil.Process(ancestors[0]).ppid() == ancestors[1]
    except psutil.Error:
        return False
