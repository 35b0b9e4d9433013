"""What every node of a launched training does: check that it can take part, and run torchrun with the node's processes.

    python -m vlp_models.contrib.launchers.node FOLDER [--index 1 --endpoint HOST:PORT]

`run_node` is called by the engines that run Python (SLURM, Ray); the command is for those that run a container or a
process. In a pod of Kubeflow, index and endpoint come from the variables that its torch runtime sets.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vlp_models.common.device import cpu_count
from vlp_models.common.environment import program_environment
from vlp_models.common.log import configure_logging
from vlp_models.common.loopback import require_loopback
from vlp_models.common.supervise import die_with_parent, kill_stopped_descendants
from vlp_models.contrib.launchers.launch import OUTCOME, POLL, STOPPED, Launch, is_there, read_outcome, write_outcome
from vlp_models.contrib.launchers.machine import explain_difference
from vlp_models.errors import LaunchError, VLPError

RESTARTS = 3  # of a node's processes, after one of them was lost
JOIN_SECONDS = 1800  # that nodes wait for each other
LINGER = 30.0  # seconds after the training's end that torchrun may wait for nodes that have not reported theirs
BEAT = 5.0  # seconds between signs of life
WORKER = "vlp_models.contrib.launchers.worker"
# Variables of the engine or of DVC that would mislead Lightning, or the stage.
MISLEADING = ("SLURM", "SUBMITIT", "SRUN", "SBATCH", "PMI", "PET_", "DVC_")


def run_node(folder: Path, index: int, endpoint: str = "", stop_requested: Callable[[], bool] = lambda: False) -> int:
    """Run this node's processes to their end; return 0 if they ended by themselves, whatever the training's outcome.

    Args:
        index: 0 for the node that holds the rendezvous.
        endpoint: HOST:PORT of the rendezvous, the same on all nodes; not needed by a single one.
        stop_requested: called often; once it returns True, the processes are terminated.

    Raises:
        LaunchError: this machine does not see the folder.
    """
    launch = Launch.read(folder)
    threading.Thread(target=kill_stopped_descendants, daemon=True).start()
    try:
        _check(launch)
        return _run_agent(launch, index, endpoint, stop_requested)
    except VLPError as error:
        write_outcome(folder, socket.gethostname(), error.exit_code, str(error))
        return 0


def _run_agent(launch: Launch, index: int, endpoint: str, stop_requested: Callable[[], bool]) -> int:
    """Run torchrun to its end; return its exit code."""
    folder = launch.folder
    # Only node 0 removes it, so that it is removed once.
    outcome = read_outcome(folder) if index == 0 else None
    if outcome is not None and outcome["code"] in STOPPED:  # of an attempt that the engine has started again
        (folder / OUTCOME).unlink()
    log = folder / f"node-{index}-{socket.gethostname()}.log"
    with _signs_of_life(log.with_suffix(".alive")), log.open("ab") as output:
        # Read before the fork: afterwards the child would read its own.
        own_pid = os.getpid()
        torchrun = [sys.executable, "-m", "torch.distributed.run", *_rendezvous(launch, index, endpoint)]
        agent = subprocess.Popen(
            [*torchrun, "-m", WORKER, str(folder), launch.id],
            cwd=launch.root,
            env=_environment(launch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _set_signals(own_pid),
        )
        over, stopping = math.inf, False
        # Once there is an outcome, torchrun may only linger for nodes that have not reported theirs.
        while agent.poll() is None:  # not wait(): a handler of signals may ask the process as well
            over = min(over, time.monotonic()) if is_there(folder / OUTCOME) else math.inf
            if stop_requested() and not stopping:
                agent.terminate()
                stopping = True
            if time.monotonic() > over + LINGER:
                _kill(agent)
            time.sleep(POLL)
    return agent.returncode


def _set_signals(parent: int) -> None:
    """Let torchrun and its processes die with this one, and ignore the signal that SLURM sends to all of a job's."""
    die_with_parent(parent)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """End torchrun, which heeds no signal while it waits for other nodes, and its processes."""
    import psutil

    with contextlib.suppress(psutil.Error):
        # Listed first: once torchrun has ended, its processes have another parent.
        for process in psutil.Process(agent.pid).children(recursive=True):
            process.kill()
    agent.kill()


def _check(launch: Launch) -> None:
    """Refuse a node with other code or packages, a host name that does not resolve, or too few GPUs."""
    if difference := explain_difference(launch.machine):
        raise LaunchError(difference)
    if launch.nodes == 1:
        require_loopback()
    else:  # the processes of all nodes connect to one of them by its host name
        try:
            socket.getaddrinfo(socket.getfqdn(), None)
        except OSError:
            raise LaunchError(
                f"the host name {socket.getfqdn()} does not resolve; add it to /etc/hosts or the DNS on every node"
            ) from None
    if launch.gpu:
        import torch

        gpus = torch.cuda.device_count()
        if gpus < launch.devices:
            raise LaunchError(
                f"has {gpus} GPUs; `trainer.devices: {launch.devices}` with `trainer.accelerator: gpu` needs "
                f"{launch.devices} on every node"
            )


def _rendezvous(launch: Launch, index: int, endpoint: str) -> list[str]:
    # Node 0 holds the store, at the endpoint where all nodes meet.
    conf = f"is_host={int(index == 0)},join_timeout={JOIN_SECONDS}"
    options = [f"--nnodes={launch.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={launch.id}", f"--rdzv-conf={conf}"]
    # A single machine needs no name: neither its own nor `localhost` (torchrun's --standalone) may resolve.
    options += ["--local-addr=127.0.0.1"] if launch.nodes == 1 else []
    options += [f"--rdzv-endpoint={endpoint if launch.nodes > 1 else '127.0.0.1:0'}"]
    return [*options, f"--nproc-per-node={launch.devices}", f"--max-restarts={RESTARTS}"]


def _environment(launch: Launch) -> dict[str, str]:
    env = {name: value for name, value in program_environment().items() if not name.startswith(MISLEADING)}
    # The processes of a node share its cores.
    env.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // launch.devices)))
    # Else the processes that torchrun starts again find the addresses of the lost ones in the store, and gloo waits.
    return env | {"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@contextmanager
def _signs_of_life(path: Path) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):  # the next beat may succeed
                path.touch()
            ended.wait(BEAT)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vlp_models.contrib.launchers.node", description=__doc__)
    parser.add_argument("folder", type=Path)
    # Set by Kubeflow's torch runtime in every pod.
    parser.add_argument("--index", type=int, default=int(os.environ.get("PET_NODE_RANK", "0")))
    master = (os.environ.get("PET_MASTER_ADDR", ""), os.environ.get("PET_MASTER_PORT", ""))
    parser.add_argument("--endpoint", default=":".join(master) if all(master) else "")
    arguments = parser.parse_args()
    configure_logging()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        code = run_node(arguments.folder, arguments.index, arguments.endpoint, stop.is_set)
    except VLPError as error:
        print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0 if is_there(arguments.folder / OUTCOME) else code)


if __name__ == "__main__":
    main()
