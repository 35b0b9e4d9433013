"""The processes that `vlp up` starts, Prefect's server and worker and their keepers, and the server's REST API.

.work/stack has their logs, Prefect's database (PREFECT_HOME) and record.json with the port, the processes, each with
pid and start time, and the deployments whose schedules are still to be resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from vlp_models.common.environment import program_environment
from vlp_models.common.io import read_json, write_json
from vlp_models.errors import DataError, last_words

POOL = "vlp"
RUN_ID = "PREFECT__FLOW_RUN_ID"  # environment variable of a flow and everything below it
KEEPERS = ("keeper", "second-keeper")
SETTINGS = "prefect.toml"
DEFAULT_PORT = 4200
START_SECONDS = 180.0


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


def _since_boot(process: psutil.Process) -> float:
    """Return when a process started, in seconds since boot; unlike the time of day it ignores clock changes."""
    return process.create_time() - psutil.boot_time()
