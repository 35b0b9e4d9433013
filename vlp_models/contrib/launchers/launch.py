"""The seam: hand a training to `trainer.launcher`, wait for it, show its output, return its exit code.

`vlp stage pretrain tden` trains in its own process if `trainer.launcher` is `local`. Otherwise it calls `launch`, which
writes a folder that all nodes must see,

    .work/launches/pretrain-tden/
        launch.json         what to train, on how many nodes, with which code
        node-0-HOST.log     the output of each node; all are copied to stderr
        node-0-HOST.alive   touched by the node every few seconds
        stop                written to stop the training
        outcome.json        exit code of the training; without it no process came to its end

and lets an engine run `run_node` (node.py) once per node: torchrun.py, slurm.py, ray_train.py or kubeflow.py. Each
node starts `trainer.devices` processes of `vlp stage pretrain tden` with torchrun. Checkpoints are in the project as
always, so whatever ends a training (a stop, a preemption, a lost node), the next one resumes from the last of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vlp_models.common.io import write_json
from vlp_models.common.log import get_logger
from vlp_models.common.packages import OWN, PIP
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.launchers.machine import describe_machine
from vlp_models.contrib.launchers.params import LaunchersParams
from vlp_models.errors import LaunchError, MissingToolError, Terminated, first_line
from vlp_models.params import Params
from vlp_models.pipeline.guard import run_by_dvc

logger = get_logger(__name__)

LAUNCHERS = Table("launchers", {})  # name -> `module:start`
PACKAGES = {"slurm": "submitit", "ray": "ray", "kubeflow": "kubeflow"}  # the extra of the same name installs it
LAUNCH, STOP, OUTCOME = "launch.json", "stop", "outcome.json"
STOPPED = (75, 128 + signal.SIGTERM)  # exit codes of a training that was stopped during, or before, its updates
POLL = 0.5  # seconds
SILENT = 30.0  # seconds without a sign of life after which a node counts as gone
REPORT_SECONDS = 180.0  # after the training's end, for the engine to report it
QUOTED_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A training that an engine is asked to start.

    id: of this attempt; a process of an earlier one stops when it finds another id.
    by_dvc: DVC runs the stage, and records its outputs once they are hashed.
    endpoint: HOST:PORT where the machines of `vlp join` meet; empty if another engine than torchrun starts the nodes.
    machine: what every node must have (common/packages.py).
    """

    id: str
    root: str
    stage: str
    key: str
    params_file: str
    nodes: int
    devices: int
    gpu: bool
    by_dvc: bool
    endpoint: str
    machine: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.stage}@{self.key}"

    @property
    def folder(self) -> Path:
        return Path(self.root) / ".work" / "launches" / f"{self.stage}-{self.key}"

    @classmethod
    def read(cls, folder: Path) -> Launch:
        """Read the launch of a folder; an error if this machine does not see it."""
        try:
            return cls(**json.loads((folder / LAUNCH).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise LaunchError(
                f"{folder / LAUNCH} cannot be read on this machine ({first_line(error)}): the project's folder must be "
                "on a file system that all nodes see, under the same path"
            ) from None


class Job(Protocol):
    """A started training."""

    def end(self) -> str | None:
        """Return None while it waits or runs, afterwards how it ended in the engine's words."""
        ...

    def cancel(self) -> None:
        """Take it from the engine: it did not stop by itself, or was never started."""
        ...

    def clean_up(self) -> None:
        """Remove what the engine keeps of a job that has ended; its output is copied."""
        ...


def launch(params: Params, workspace: Workspace, stage: str, key: str, params_file: str) -> int:
    """Train `stage@key` with the engine of `trainer.launcher`; return the training's exit code.

    SIGINT and SIGTERM stop the training, which saves its state (exit code 75).

    Raises:
        LaunchError: the engine refuses it, a node cannot take part, or nodes were lost.
        MissingToolError: the engine's package is not installed.
    """
    kind, trainer = params.trainer.launcher, params.trainer
    if trainer.accelerator == "auto" and kind != "torchrun":
        raise LaunchError(
            f"params.yaml: `trainer.launcher: {kind}` needs `trainer.accelerator: gpu` or `cpu`: the engine reserves "
            "GPUs before a process can look for them"
        )
    try:
        start = import_target(LAUNCHERS[kind])
    except ModuleNotFoundError as error:
        # Another missing module is a bug, not a missing extra.
        if (error.name or "").partition(".")[0] != PACKAGES.get(kind):
            raise
        raise MissingToolError(
            f"params.yaml: `trainer.launcher: {kind}` needs the package {PACKAGES[kind]}: "
            f"`{PIP} install '{OWN}[{kind}]'`"
        ) from None
    request = Launch(
        id=uuid.uuid4().hex[:12],
        root=str(workspace.root.resolve()),
        stage=stage,
        key=key,
        params_file=params_file,
        nodes=trainer.num_nodes,
        devices=trainer.devices,
        gpu=trainer.accelerator in ("gpu", "cuda"),
        by_dvc=run_by_dvc(),
        endpoint=params.section(LaunchersParams).torchrun.endpoint if kind == "torchrun" else "",
        machine=describe_machine(),
    )
    folder = request.folder
    shutil.rmtree(folder, ignore_errors=True)  # processes of an earlier launch find another id, and stop
    folder.mkdir(parents=True, exist_ok=True)  # an earlier process may have written to it again
    write_json(folder / LAUNCH, asdict(request))
    nodes = "one node" if request.nodes == 1 else f"{request.nodes} nodes"
    processes = f"{request.devices} {'process' if request.devices == 1 else 'processes'} each"
    logger.info("%s: starting on %s, %s by %s", request.name, nodes, processes, kind)
    try:
        job: Job = start(request, params)
    except BaseException:
        (folder / STOP).touch()  # a signal may come after the engine has accepted the job
        raise
    return _exit_code(request, _follow(job, request))


def _follow(job: Job, launch: Launch) -> str:
    """Copy the nodes' output to stderr until the job has ended; return how it ended."""
    output = _Output(launch)
    # When the outcome was first read; infinite before that.
    over = math.inf
    try:
        while (ended := job.end()) is None:
            output.copy()
            # A training that has an outcome is over; the engine gets some time to notice.
            outcome = read_outcome(launch.folder)
            # A stopped training may be requeued by the engine, and then goes on.
            final = outcome is not None and outcome["code"] not in STOPPED
            over = min(over, time.monotonic()) if final else math.inf
            if time.monotonic() > over + REPORT_SECONDS:  # the engine does not respond, or has not noticed
                ended = "the engine does not report its end"
                break
            time.sleep(POLL)
    except (KeyboardInterrupt, Terminated):
        logger.info("%s: stopping; it saves its state after the current update", launch.name)
        ended = _stop(job, launch, output)
    except BaseException:
        (launch.folder / STOP).touch()
        job.cancel()
        raise
    output.copy()
    job.clean_up()
    return ended


def _stop(job: Job, launch: Launch, output: _Output) -> str:
    try:
        while (ended := job.end()) is None:
            silent = False
            with contextlib.suppress(OSError):  # the file system does not respond: try again
                (launch.folder / STOP).touch()  # each time: a SLURM job that is requeued removes it
                now = (launch.folder / STOP).stat().st_mtime  # by the clock that also stamps the signs of life
                alive = [path.stat().st_mtime for path in launch.folder.glob("node-*.alive")]
                silent = max(alive, default=0) < now - SILENT
            if silent:
                job.cancel()  # it waits in a queue, and nothing reads the file
                return "stopped while it waited"
            output.copy()
            time.sleep(POLL)
    except (KeyboardInterrupt, Terminated):  # asked twice
        job.cancel()
        raise
    return ended


def _exit_code(launch: Launch, ended: str) -> int:
    """Return the training's exit code; an error if it has none."""
    folder = launch.folder
    if (outcome := read_outcome(folder)) is not None:
        if outcome["message"]:
            raise LaunchError(f"{launch.name}: {outcome['host']}: {outcome['message']}")
        return int(outcome["code"])
    if (folder / STOP).exists():
        raise Terminated
    # No outcome: the node that fell silent first is the likely cause.
    nodes = sorted(folder.glob("node-*.alive"))
    if not nodes:
        raise LaunchError(
            f"{launch.name}: ended before any node wrote to {folder} ({ended}); this folder must be on a file system "
            "that all nodes see, under the same path"
        )
    silent = min(nodes, key=lambda path: path.stat().st_mtime)
    log = silent.with_suffix(".log")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-QUOTED_LINES:] if log.exists() else []
    raise LaunchError(
        f"{launch.name}: {ended}; first silent node: {silent.stem.split('-', 2)[2]}, since "
        f"{time.strftime('%H:%M:%S', time.localtime(silent.stat().st_mtime))}. Checkpoints are kept: run again to "
        "resume. The node's last lines:\n" + "\n".join(f"  {line}" for line in lines)
    )


class _Output:
    """The logs of all nodes, copied to stderr as they grow; with several nodes, each line after its host's name."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._copied: dict[Path, int] = {}  # bytes of each log

    def copy(self) -> None:
        with contextlib.suppress(OSError):  # the file system does not respond: the next call copies the rest
            for path in sorted(self._launch.folder.glob("node-*.log")):
                prefix = f"[{path.stem.split('-', 2)[2]}] " if self._launch.nodes > 1 else ""
                start = self._copied.get(path, 0)
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read()
                # A last line without an end is read again by the next call, once it is complete.
                data = data[: data.rfind(b"\n") + 1]  # whole lines
                self._copied[path] = start + len(data)
                for line in data.decode("utf-8", "replace").splitlines():
                    print(f"{prefix}{line}", file=sys.stderr, flush=True)


def is_there(path: Path) -> bool:
    """Return whether the file is there; False as well while its file system does not respond."""
    try:
        return path.exists()
    except OSError:
        return False


def last_line(error: BaseException) -> str:
    """Return the last line of an engine's error, or its type's name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Return host, code and message of the training's end; None before it."""
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # A file that is being written is not valid JSON yet, and counts as missing.
        return None
    return outcome


def write_outcome(folder: Path, host: str, code: int, message: str = "") -> None:
    """Write how the training ended, unless a process has written it before: the first reason is the cause."""
    # Mode `x` fails if the file exists: of all processes of all nodes, exactly one writes it.
    with contextlib.suppress(FileExistsError), (folder / OUTCOME).open("x", encoding="utf-8") as file:
        json.dump({"host": host, "code": code, "message": message}, file)
