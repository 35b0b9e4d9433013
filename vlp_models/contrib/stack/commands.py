"""`vlp up` and `vlp down`: a Prefect server and a worker for this project, on this machine.

`vlp up` runs the commands of docs/guides/deployment.md ("Set up by hand") that are still needed. Everything is in
.work/stack: logs, Prefect's database (PREFECT_HOME) and record.json with the port, the processes, each with pid and
start time, and the deployments whose schedules are still to be resumed. Keepers (keep.py) start what has died again;
after a reboot, `vlp up` or the units of deploy/systemd do.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from vlp_models.common.environment import PROXIES, program_environment
from vlp_models.common.io import read_json, write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.packages import require_module
from vlp_models.common.source_hash import refuse_other_package
from vlp_models.errors import DataError, last_words
from vlp_models.pipeline.guard import stopped_by_signals

POOL, POOL_LIMIT = "vlp", 3  # one run works, two may wait for the workspace
WEEKLY = "retrain/weekly"
RUN_ID = "PREFECT__FLOW_RUN_ID"  # environment variable of a flow and everything below it
KEEPERS = ("keeper", "second-keeper")
TO_RESUME = "to_resume"  # in record.json: ids of deployments that were active before `prefect deploy`
SETTINGS = "prefect.toml"
NEEDED = ("params.yaml", "prefect.yaml", "deploy/zombie.yaml")
PROCESSES = (*KEEPERS, "worker", "server")  # in the order in which they are stopped, so that runs can report their end
DEFAULT_PORT = 4200
START_SECONDS = 180.0
LOCK_SECONDS = 60.0  # a keeper holds the lock for a moment
SAVE_SECONDS = 120.0  # a trainer has 20 s to save, then Prefect and its supervisor kill it


class Stack:
    """Prefect's server and worker of one project, and the server's REST API.

    Raises:
        DataError: record.json is damaged.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root.absolute(), root.absolute() / ".work" / "stack"
        self.record = _read_record(self.folder / "record.json")

    @property
    def port(self) -> int:
        return int(self.record.get("port", DEFAULT_PORT))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Return the environment of Prefect's processes, without the Prefect settings of the shell."""
        env = {name: value for name, value in program_environment().items() if not name.startswith("PREFECT_")}
        return env | {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # GPU slots survive a restart of the server.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            # Runs that ended 90 days ago are deleted, with their logs and artifacts; the default keeps them forever.
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "true",
            "PWD": str(self.root),
        }

    def save(self, **values: Any) -> None:
        """Update record.json; a value None removes the key."""
        self.record = {key: value for key, value in (self.record | values).items() if value is not None}
        write_json(self.folder / "record.json", self.record)

    def find(self, name: str) -> psutil.Process | None:
        """Return the recorded process if it is alive: the same pid, started at the same time since boot."""
        entry = self.record.get(name, {})
        try:
            process = psutil.Process(int(entry["pid"]))
            # A pid alone may be another process by now; a second of tolerance for rounding.
            is_same = abs(_since_boot(process) - float(entry["started"])) < 1
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, KeyError, TypeError, ValueError):
            return None

    def start(self, name: str, command: list[str]) -> None:
        """Start a command that outlives this terminal, and record it."""
        # A background job of a shell ignores SIGINT and passes that on, but only SIGINT stops a worker.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Prefect reads prefect.toml and .env of the folder that it is started in. A project's .env may name a login or
        # a database of another server, which would apply to this one.
        (self.folder / SETTINGS).unlink(missing_ok=True)
        if (self.root / SETTINGS).exists():
            shutil.copyfile(self.root / SETTINGS, self.folder / SETTINGS)
        log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = subprocess.Popen(
                command,
                cwd=self.folder if name == "server" else self.root,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own, so that closing the terminal does not end it.
                start_new_session=True,
            )
        finally:
            os.close(log)
        # Recorded at once: a process that is not recorded cannot be stopped.
        try:
            self.save(**{name: {"pid": child.pid, "started": _since_boot(psutil.Process(child.pid))}})
        except BaseException:  # a full disk, for example
            child.kill()
            raise

    def wait(self, name: str, condition: Callable[[], bool]) -> None:
        """Wait until the process answers."""
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            problem = "ended" if self.find(name) is None else "does not answer"
            if problem == "ended" or time.monotonic() > deadline:
                log = self.folder / f"{name}.log"
                last = last_words(log.read_text(encoding="utf-8", errors="replace"))
                raise DataError(f"Prefect's {name} {problem}; {log} ends with: {last}; fix that and run `vlp up` again")
            time.sleep(0.5)

    def prefect(self, *arguments: str) -> None:
        """Run a prefect command to its end."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(command, cwd=self.root, env=self.environment(), capture_output=True, text=True)
        if done.returncode:
            raise DataError(f"`prefect {' '.join(arguments)}` failed: {last_words(done.stderr, done.stdout)}")

    def call(self, path: str, body: Any = None, method: str = "", timeout: float = 60) -> Any:
        """Return the REST API's answer; None for 404. With a body, the method is POST unless given."""
        data, headers = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api{path}", data, headers, method=method or None)
        # An empty handler: no proxy, whatever the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for attempts_left in reversed(range(10)):
            try:
                with opener.open(request, timeout=timeout) as answer:
                    return json.loads(answer.read() or "null")
            # HTTPException and ValueError: another program answers on this port, without HTTP or JSON.
            except (OSError, HTTPException, ValueError) as error:
                code = error.code if isinstance(error, urllib.error.HTTPError) else None
                if code == 404:
                    break
                if code != 503 or not attempts_left:  # 503: SQLite is locked
                    log = self.folder / "server.log"
                    raise DataError(f"{self.url}: Prefect's server does not answer ({error}); see {log}") from error
            time.sleep(1)
        return None

    def is_healthy(self) -> bool:
        try:
            return self.call("/health", timeout=2) is True
        except DataError:
            return False


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


def start_process(stack: Stack, name: str) -> str:
    """Start the server, the worker or a keeper; return the last word of its command: a worker's name."""
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    if name == "server":
        command = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(stack.port)]
    elif name == "worker":
        label = f"{socket.gethostname()} {datetime.now():%Y-%m-%d %H:%M:%S}"
        command = [*prefect, "worker", "start", "--pool", POOL, "--name", label]
    else:
        command = [sys.executable, "-m", "vlp_models.contrib.stack.keep"]
    stack.start(name, command)
    return command[-1]


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
    from vlp_models.contrib.stack.keep import cancel_dead_runs

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


def flow_processes(stack: Stack) -> dict[psutil.Process, str]:
    """Return process -> id of the runs at work: of each the topmost process, that of the flow as long as it lives.

    A worker prepares a run in a process that becomes the flow's, and a trainer may still save when its flow is dead.
    """
    # Flows of other projects have another PREFECT_HOME.
    home, runs = stack.environment()["PREFECT_HOME"], {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get("PREFECT_HOME") == home and (run := environment.get(RUN_ID)):
                runs[process] = run
    parents = {process.pid: run for process, run in runs.items()}
    return {process: run for process, run in runs.items() if parents.get(_parent(process)) != run}


def _parent(process: psutil.Process) -> int:
    """Return the pid of a process's parent, 0 if it has just ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


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


def _read_record(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with suppress(DataError):
        record = read_json(path)
        if isinstance(record, dict):
            return record
    raise DataError(
        f"{path}: damaged: not a JSON object, so the processes that `vlp up` started are unknown. "
        "`ps -ef | grep 'prefect --no-prompt'` shows them: end this project's worker and server with `kill -INT PID`, "
        "delete the file, and run `vlp up` again"
    )


def _started(stack: Stack, name: str, running: psutil.Process | None) -> str:
    """Return `running` as a phrase, or that the process of this name was started now."""
    if running is None:
        return f"started (pid {stack.record[name]['pid']})"
    return f"running since {datetime.fromtimestamp(running.create_time()):%Y-%m-%d %H:%M} (pid {running.pid})"


def _since_boot(process: psutil.Process) -> float:
    """Return when a process started, in seconds since boot; unlike the time of day it ignores clock changes."""
    return process.create_time() - psutil.boot_time()


def _say(subject: str, text: str) -> None:
    typer.echo(f"{subject:12} {text}")


COMMANDS = {"Run unattended": {"up": up, "down": down}}
WORK = {"up": "starting Prefect", "down": "waiting for the worker, whose trainings save their state"}
