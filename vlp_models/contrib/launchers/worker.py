"""One process of a launched training (contrib/launchers): `vlp stage`, which stops on request of the launch's folder.

    python -m vlp_models.contrib.launchers.worker FOLDER ID      started by torchrun, once per device

The exit code is for torchrun: 0 if the training has an outcome, whatever it is, since to start it again would not
help, or if a newer launch has replaced this one; 1 if another process was lost.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from vlp_models.cli.main import main as run_command
from vlp_models.common.device import is_main_process
from vlp_models.contrib.launchers.launch import LAUNCH, OUTCOME, STOP, STOPPED, Launch, is_there, write_outcome
from vlp_models.errors import Preempted, ProcessLostError
from vlp_models.pipeline.guard import LAUNCHED, RECORDED

CHECK_EVERY = 1.0  # seconds
WAIT = 10.0  # seconds for the outcome of the process that failed first


def main() -> None:
    folder, launch_id = Path(sys.argv[1]), sys.argv[2]
    launch = Launch.read(folder)
    # A newer launch has replaced this one: nothing to do, and nothing to record.
    if launch.id != launch_id:
        sys.exit(0)
    if (folder / STOP).exists():
        sys.exit(finish(folder, STOPPED[-1], lost=False))
    threading.Thread(target=_stop_on_request, args=(folder, launch_id), daemon=True).start()
    os.environ[LAUNCHED] = launch_id
    if launch.by_dvc:
        os.environ[RECORDED] = "1"
    # From here on the process is that `vlp stage` command, with its messages and exit codes.
    sys.argv = ["vlp", "stage", launch.stage, launch.key, "--params", launch.params_file]
    code, lost = 0, False
    try:
        run_command()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        # `main` of the command line exits while it handles the error.
        lost = isinstance(ended.__context__, ProcessLostError)
        if isinstance(ended.__context__, Preempted):  # on ranks other than 0, `training.run.fit` exits with 0
            code = STOPPED[0]
    # The folder of a replaced launch is that of the newer one, whose outcome this is not.
    sys.exit(finish(folder, code, lost=lost) if _is_current(folder, launch_id) else 0)


def finish(folder: Path, code: int, *, lost: bool) -> int:
    """Record the outcome, and return the exit code for torchrun."""
    # Without a file `stop`, torchrun or the engine sent the signal, because another process or node was lost.
    replaced = code in STOPPED and not is_there(folder / STOP)
    if lost or replaced:
        deadline = time.monotonic() + WAIT
        while not is_there(folder / OUTCOME) and time.monotonic() < deadline:
            time.sleep(CHECK_EVERY)
        return 0 if is_there(folder / OUTCOME) else 1
    # All ranks raise `Preempted` together. Rank 0 writes it last: its node ends other processes soon after the outcome.
    if is_main_process() or code not in (0, STOPPED[0]):
        write_outcome(folder, socket.gethostname(), code)
    return 0


def _stop_on_request(folder: Path, launch_id: str) -> None:
    """Send this process SIGTERM once the folder has a file `stop`, or belongs to another launch."""
    while True:
        time.sleep(CHECK_EVERY)
        if is_there(folder / STOP) or not _is_current(folder, launch_id):
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_current(folder: Path, launch_id: str) -> bool:
    """Return whether the folder still belongs to this launch; a file that cannot be read now is no other launch."""
    try:
        return bool(json.loads((folder / LAUNCH).read_text(encoding="utf-8"))["id"] == launch_id)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True


if __name__ == "__main__":
    main()
