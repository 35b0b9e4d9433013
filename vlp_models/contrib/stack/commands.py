"""`vlp up` and `vlp down`: a Prefect server and a worker for this project, on this machine.

`vlp up` runs the commands of docs/guides/deployment.md ("Set up by hand") that are still needed. Keepers (keep.py)
start what has died again; after a reboot, `vlp up` or the units of deploy/systemd do.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import psutil
import typer

from vlp_models.common.environment import PROXIES
from vlp_models.common.lock import file_lock
from vlp_models.common.packages import require_module
from vlp_models.common.source_hash import refuse_other_package
from vlp_models.contrib.stack.keep import cancel_dead_runs
from vlp_models.contrib.stack.processes import DEFAULT_PORT, KEEPERS, POOL, Stack, flow_processes, start_process
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import load_params
from vlp_models.pipeline.guard import stopped_by_signals

POOL_LIMIT = 3  # one run works, two may wait for the workspace
WEEKLY = "retrain/weekly"
TO_RESUME = "to_resume"  # in record.json: ids of deployments that were active before `prefect deploy`
NEEDED = ("params.yaml", "prefect.yaml", "deploy/zombie.yaml")
PROCESSES = (*KEEPERS, "worker", "server")  # in the order in which they are stopped, so that runs can report their end
LOCK_SECONDS = 60.0  # a keeper holds the lock for a moment
SAVE_SECONDS = 120.0  # a trainer has 20 s to save, then Prefect and its supervisor kill it


def up(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the server. Default: that of the last `vlp up`, else 4200."),
    ] = None,
) -> None:
    """Start a Prefect server and a worker for this project, with its deployments. They outlive the terminal."""
    root = Path.cwd()
    for name in NEEDED:
        if not (root / name).exists():
            raise DataError(f"{root / name}: not found; run `vlp up` in a project's folder (`vlp init` makes one)")
    refuse_other_package(root)
    require_module("prefect", "`vlp up`")
    with file_lock(root / ".work" / "stack" / "lock", "`vlp up`", wait=LOCK_SECONDS, announce_after=5):
        stack = Stack(root)
        before = [name for name in PROCESSES if stack.find(name) is not None]
        with stopped_by_signals("vlp up", announce=False):
            try:
                start_server(stack, port)
                set_up(stack)
                start_worker(stack)
                for name in KEEPERS:
                    if stack.find(name) is None:
                        start_process(stack, name)
                print_next(stack)
            except BaseException:
                # Nothing that this call started stays running: the next one starts from the same state.
                stop_processes(stack, [name for name in PROCESSES if name in stack.record and name not in before])
                raise


def start_server(stack: Stack, port: int | None) -> None:
    """Start the server unless it runs, and wait until it answers."""
    running = stack.find("server")
    if running is not None and port not in (None, stack.port):
        raise DataError(f"the server already runs on port {stack.port}; run `vlp down` first to move it to port {port}")
    if running is None:
        port = port or stack.port
        # Prefect's own message comes seconds later, and in its log.
        with socket.socket() as probe:
            # As servers do; without it a port is refused for a minute after its last server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                reason = "needs root" if isinstance(error, PermissionError) else "is in use by another program"
                # The next port, or 1 after the last one; below 1024 the default, which needs no root.
                free = DEFAULT_PORT if port < 1024 else port % 65535 + 1
                raise DataError(f"port {port} {reason}; run `vlp up --port {free}`") from error
        stack.save(port=port)
        start_process(stack, "server")
    stack.wait("server", stack.is_healthy)
    _say("server", f"{_started(stack, 'server', running)}, UI at {stack.url}")


def set_up(stack: Stack) -> None:
    """Create the work pool, the GPU slots, the deployments and the automation that do not exist yet."""
    import yaml

    # A pool that exists is left as it is: its limit may have been changed by hand.
    if is_new := stack.call(f"/work_pools/{POOL}") is None:
        stack.prefect("work-pool", "create", POOL, "--type", "process")
        stack.prefect("work-pool", "set-concurrency-limit", POOL, str(POOL_LIMIT))
    _say("work pool", f"{POOL}, {'created' if is_new else 'exists'}")
    if is_new := stack.call("/v2/concurrency_limits/gpu") is None:
        stack.prefect("gcl", "create", "gpu", "--limit", "1")
    _say("GPU slots", f"gpu, {'created' if is_new else 'exists'}")
    # The deployments contain the project's folder, so a moved project registers them again.
    digest = hashlib.sha256(os.fsencode(stack.root) + (stack.root / "prefect.yaml").read_bytes()).hexdigest()
    if is_new := stack.record.get("deployed") != digest or stack.call(f"/deployments/name/{WEEKLY}") is None:
        register_deployments(stack)
        stack.save(deployed=digest)
    else:
        resume_schedules(stack)
    _say("deployments", f"prefect.yaml, {'registered' if is_new else 'unchanged'}")
    name = yaml.safe_load((stack.root / "deploy" / "zombie.yaml").read_text(encoding="utf-8"))["name"]
    # `deploy/zombie.yaml` turns runs without a heartbeat into crashed ones.
    if is_new := name not in {automation["name"] for automation in stack.call("/automations/filter", {})}:
        stack.prefect("automation", "create", "--from-file", "deploy/zombie.yaml")
    _say("automation", f"{name}, {'created' if is_new else 'exists'}")


def register_deployments(stack: Stack) -> None:
    """Run `prefect deploy --all`, and resume the schedules that it pauses though they were active.

    It may fail or be interrupted after it has paused some. If this process is killed, the next `vlp up` resumes them.
    """
    active = set(stack.record.get(TO_RESUME, []))
    for deployment in stack.call("/deployments/filter", {}):
        if any(schedule["active"] for schedule in deployment["schedules"]):
            active.add(deployment["id"])
    # Written before they are paused, so that a kill loses none.
    stack.save(**{TO_RESUME: sorted(active) or None})
    try:
        stack.prefect("deploy", "--all")
    finally:
        resume_schedules(stack)


def resume_schedules(stack: Stack) -> None:
    """Resume the schedules of the deployments that record.json lists, and remove the list."""
    paused = stack.record.get(TO_RESUME)
    if not paused:
        return
    for deployment in stack.call("/deployments/filter", {}):
        for schedule in deployment["schedules"] if deployment["id"] in paused else ():
            stack.call(f"/deployments/{deployment['id']}/schedules/{schedule['id']}", {"active": True}, "PATCH")
    stack.save(**{TO_RESUME: None})


def start_worker(stack: Stack) -> None:
    """Start the worker unless it runs, and wait until the server has received its heartbeat."""
    running = stack.find("worker")
    # `stopping` was set by a `vlp down` that timed out.
    if running is not None and stack.record["worker"].get("stopping"):
        raise DataError(f"the worker (pid {running.pid}) is still stopping; wait for it, then run `vlp up` again")
    if running is None:
        name = start_process(stack, "worker")
        workers = f"/work_pools/{POOL}/workers/filter"
        # The server lists a worker once it has sent a heartbeat.
        stack.wait("worker", lambda: any(worker["name"] == name for worker in stack.call(workers, {})))
    _say("worker", _started(stack, "worker", running))


def print_next(stack: Stack) -> None:
    """Print the commands that a user needs next."""
    weekly = stack.call(f"/deployments/name/{WEEKLY}")
    typer.echo(f"\nexport PREFECT_API_URL={stack.url}/api   # for every prefect command")
    if proxies := [name.lower() for name in os.environ if name.lower() in PROXIES]:
        # HTTPX fails on some forms of `all_proxy` even for a server that needs no proxy.
        without = " all_proxy=" * ("all_proxy" in proxies)
        typer.echo(f"export no_proxy={shlex.quote(os.environ['no_proxy'])}{without}   # the server needs no proxy")
    # A prefect.yaml without this deployment has nothing to run or to resume.
    if weekly is not None:
        typer.echo(f"prefect deployment run {WEEKLY}   # run now")
        for schedule in weekly["schedules"]:
            if not schedule["active"]:
                typer.echo(f"prefect deployment schedule resume {WEEKLY} {schedule['id']}   # start the schedule")
    with suppress(ParamsError):  # an invalid params.yaml is the first run's to report
        if not load_params(stack.root / "params.yaml").flow.commit:
            typer.echo("vlp use --set flow.commit=true   # let each run commit and push what it changes")
    typer.echo(
        "vlp status   # what runs, and the next scheduled run\nvlp down   # stop both; a training saves its state"
    )


def down() -> None:
    """Stop the worker and the server that `vlp up` started. A training saves its state and continues next time."""
    root = Path.cwd()
    if not (root / ".work" / "stack" / "record.json").exists():
        raise DataError(f"{root}: `vlp up` has started nothing in this folder")
    with file_lock(root / ".work" / "stack" / "lock", "`vlp down`", wait=LOCK_SECONDS, announce_after=5):
        stack = Stack(root)
        stop_processes(stack, PROCESSES)


def stop_processes(stack: Stack, names: Sequence[str]) -> None:
    """Stop these of `PROCESSES`, and with the worker the flows that continue without one."""
    for name in names:
        process = stack.find(name)
        if name in KEEPERS:  # they act only with the lock
            if process is not None:
                process.terminate()
                psutil.wait_procs([process], timeout=10)
            stack.save(**{name: None})
            continue
        stopped = "is not running" if process is None else stop(stack, name, process)
        stack.save(**{name: None})
        _say(name, stopped)
        if name == "worker" and (count := stop_orphaned_runs(stack)):
            _say("runs", f"{count} without a worker interrupted, the next run continues there")
        if name == "worker" and stack.is_healthy():
            with suppress(DataError):  # what it cannot report is marked later (deploy/zombie.yaml)
                cancel_dead_runs(stack)


def stop(stack: Stack, name: str, process: psutil.Process) -> str:
    """Interrupt a process, wait for it and everything below it, and return what happened.

    Raises:
        DataError: the worker is still at work, for example saving a large model.
    """
    # The worker's children are its flows; below them are supervisors, DVC and trainers.
    runs, below = _children(process), _children(process, recursive=True)
    if not stack.record[name].get("stopping"):  # Prefect answers a second SIGINT with SIGKILL
        stack.save(**{name: {**stack.record[name], "stopping": True}})
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
    # Children by then may have other parents, so they were listed before the interrupt.
    _, alive = psutil.wait_procs([process, *below], timeout=SAVE_SECONDS)
    if alive and name == "worker":
        raise DataError(
            f"the worker (pid {process.pid}) has not stopped after {SAVE_SECONDS:.0f} s; run `vlp down` again to wait "
            f"for it, or end it with `kill -9 {process.pid}`"
        )
    # A server that has not stopped is killed; a worker is not, since its trainer may be saving.
    for child in alive:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    interrupted = f"; {len(runs)} interrupted, the next run continues there" if name == "worker" and runs else ""
    return f"stopped (pid {process.pid}){interrupted}"


def stop_orphaned_runs(stack: Stack) -> int:
    """Interrupt the flows that continue after their worker was killed, wait for them, and return how many they were."""
    runs = list(flow_processes(stack))
    # Listed before the signal: a child whose parent has ended is not found below it.
    below = [child for run in runs for child in _children(run, recursive=True)]
    for run in runs:
        with suppress(psutil.NoSuchProcess):
            run.terminate()
    psutil.wait_procs([*runs, *below], timeout=SAVE_SECONDS)
    return len(runs)


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    """Return the processes below one; none if it has just ended."""
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def describe(root: Path) -> list[str]:
    """Return one line each for server, worker, UI and the next scheduled run; nothing without a `vlp up`."""
    stack = Stack(root)
    lines = []
    for name in ("server", "worker"):
        if name in stack.record:
            process = stack.find(name)
            ended = (
                "ended; it is being started again"
                if any(map(stack.find, KEEPERS))
                else "ended; `vlp up` starts it again"
            )
            lines.append(f"{name}: {_started(stack, name, process) if process else ended}")
    if stack.find("server") is not None:
        lines.append(f"UI: {stack.url}")
        scheduled = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
        try:
            runs = stack.call(
                "/flow_runs/filter", scheduled | {"sort": "EXPECTED_START_TIME_ASC", "limit": 1}, timeout=5
            )
        except DataError as error:
            return [*lines, str(error)]
        when = [datetime.fromisoformat(run["expected_start_time"]).astimezone() for run in runs]
        lines.append(f"next run: {when[0]:%Y-%m-%d %H:%M %Z}" if when else "next run: none; the schedule is paused")
    return lines


def _started(stack: Stack, name: str, running: psutil.Process | None) -> str:
    """Return `running` as a phrase, or that the process of this name was started now."""
    if running is None:
        return f"started (pid {stack.record[name]['pid']})"
    return f"running since {datetime.fromtimestamp(running.create_time()):%Y-%m-%d %H:%M} (pid {running.pid})"


def _say(subject: str, text: str) -> None:
    typer.echo(f"{subject:12} {text}")


COMMANDS = {"Run unattended": {"up": up, "down": down}}
WORK = {"up": "starting Prefect", "down": "waiting for the worker, whose trainings save their state"}
