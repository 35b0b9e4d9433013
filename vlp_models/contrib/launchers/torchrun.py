"""`trainer.launcher: torchrun`: processes of this machine, and of others that have called `vlp join`.

torchrun reaches no other machine by itself. With `trainer.num_nodes` above 1, the training waits until as many
machines take part: on each of the others run `vlp join` once, in the project's folder on the shared file system. It
joins every training of `vlp run` until it is stopped.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from vlp_models.common.environment import program_environment
from vlp_models.common.log import get_logger
from vlp_models.contrib.launchers.launch import LAUNCH, OUTCOME, POLL, STOP, Launch, is_there
from vlp_models.contrib.launchers.node import RESTARTS, run_node
from vlp_models.errors import LaunchError
from vlp_models.params import Params

logger = get_logger(__name__)

ENDED = "ended"  # file of a launch whose first node has ended


class LocalNode:
    """This machine's processes; see `launch.Job`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        command = [sys.executable, "-m", "vlp_models.contrib.launchers.node", str(launch.folder)]
        command += ["--endpoint", launch.endpoint] if launch.endpoint else []
        # A session of its own: Ctrl-C reaches this command only, which stops the training by the file `stop`.
        self._process = subprocess.Popen(
            command, env=program_environment(), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def end(self) -> str | None:
        if self._process.poll() is None:
            return None
        # Machines of `vlp join` must not join a launch whose first node has ended.
        (self._launch.folder / ENDED).touch()
        return f"torchrun exited with {self._process.returncode}"

    def cancel(self) -> None:
        (self._launch.folder / ENDED).touch()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def clean_up(self) -> None:
        pass


def start(launch: Launch, params: Params) -> LocalNode:
    """Start this machine's processes; several nodes need an endpoint where they meet."""
    if launch.nodes > 1:
        if not launch.endpoint:
            raise LaunchError(
                f"params.yaml: `trainer.num_nodes: {launch.nodes}` with `trainer.launcher: torchrun` needs "
                "`launchers.torchrun.endpoint`: HOST:PORT, this machine's name and a free port that the others reach"
            )
        logger.info("%s: waiting for %d more: run `vlp join` there, in %s", launch.name, launch.nodes - 1, launch.root)
    return LocalNode(launch)


def join(root: Path, index: int) -> None:
    """Take part in every training that another machine starts in the project, until this process is interrupted.

    Raises:
        LaunchError: a training was started without a place to meet.
    """
    logger.info("waiting for trainings of %s with `trainer.num_nodes` above 1", root)
    attempts: Counter[str] = Counter()  # launch -> how often this machine has taken part
    while True:
        for path in sorted((root / ".work" / "launches").glob(f"*/{LAUNCH}")):
            try:
                launch = Launch.read(path.parent)
            except LaunchError:  # being replaced
                continue
            over = any(is_there(path.parent / name) for name in (OUTCOME, ENDED, STOP))
            # At most 1 + RESTARTS attempts per launch: a machine that keeps failing does not join forever.
            if launch.nodes < 2 or over or attempts[launch.id] > RESTARTS:
                continue
            if not launch.endpoint:
                raise LaunchError(
                    f"{path}: {launch.name} was started without a place for machines to meet: set "
                    "`launchers.torchrun.endpoint` in params.yaml to HOST:PORT, with `trainer.launcher: torchrun`, and "
                    f"start it again; if it has ended, delete {path.parent}"
                )
            logger.info("%s: taking part", launch.name)
            code = run_node(path.parent, index, launch.endpoint)
            logger.info("%s: %s", launch.name, "ended" if code == 0 else f"torchrun exited with {code}")
            attempts[launch.id] += 1
        time.sleep(2 * POLL)
