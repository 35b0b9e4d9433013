"""Keep what `vlp up` started running:  python -m vlp_models.contrib.stack.keep   (in the project's folder)

Every few seconds a keeper starts the server or the worker again if it has died, resumes runs whose process has died,
and notifies people of both, and of scheduled runs that have not started. `vlp up` starts two keepers, and each starts
the other again, so no two kills end the stack. They act in turn, by the lock of `vlp up` and `vlp down`, and end when
record.json no longer names them.

A run is resumed as itself: Crashed, then scheduled again, up to `ATTEMPTS` times. Finished stages are not repeated, and
an interrupted training continues.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.log import configure_logging, get_logger
from vlp_models.contrib.stack.processes import KEEPERS, Stack, flow_processes, start_process
from vlp_models.errors import BusyError, VLPError, shorten_list
from vlp_models.flows.notify import notify

logger = get_logger(__name__)

EVERY = 5.0  # seconds
AGAIN = 20.0  # seconds between two starts of the same process, for example of a server whose port is taken
CALL_SECONDS = 5.0  # the lock is held during a call
SETTLED = timedelta(seconds=30)  # until a worker has started the process of a Pending run, or reported all of a crash
RECENT = timedelta(hours=1)  # older crashes are left alone
LATE = timedelta(minutes=15)  # after its scheduled time, people are notified of a run that has not started
NOTICE_AGAIN = 3600.0  # seconds: of a process that dies again and again there is one notice in this time
NOTICED = "noticed.json"  # in .work/stack: what people were notified of
ATTEMPTS = 3  # a run that ends its process each time, for example for lack of memory, stays Crashed then
RESUMED = ("retrain", "train", "evaluate")  # flows whose repetition changes nothing; a rollback would be a second one
CRASHED, CANCELING, CANCELED = "CRASHED", "CANCELLING", "CANCELLED"  # Prefect's types of states; plain-ok
DIED = ("RUNNING", "PENDING", CANCELING, CRASHED)


def keep(root: Path) -> None:
    """Look after the stack of a project until `vlp down` ends it."""
    while True:
        time.sleep(EVERY)
        notices: list[Notice] = []
        try:
            with file_lock(root / ".work" / "stack" / "lock", "keeper of the stack"):
                stack = Stack(root)
                if os.getpid() not in [stack.record.get(name, {}).get("pid") for name in KEEPERS]:
                    return
                look_after(stack, notices)
        except BusyError:  # `vlp up`, `vlp down` or the other keeper
            continue
        except (VLPError, OSError) as error:  # a full disk, a server that is starting: try again
            logger.warning("%s", error)
        # Without the lock: a webhook may take minutes to time out.
        for notice in notices:
            notify(stack.root, logger.warning, flow="vlp up", bad=True, **asdict(notice))


@dataclass(frozen=True)
class Notice:
    """What the keepers notify people of; `flows.notify` has the names."""

    run: str
    state: str
    message: str
    link: str


def look_after(stack: Stack, notices: list[Notice]) -> None:
    """Start what has died, resume the runs that died with it, and add what people should know."""
    for name in (*KEEPERS, "server", "worker"):
        entry = stack.record.get(name)
        if entry and stack.find(name) is None and time.time() - psutil.boot_time() - entry["started"] > AGAIN:
            logger.warning("%s: ended; starting it again", name)
            start_process(stack, name)
            notices += notice_lost(stack, name)
    if stack.is_healthy():
        resume_dead_runs(stack)
        notices += notice_late_runs(stack)


def notice_lost(stack: Stack, name: str) -> list[Notice]:
    """Return a notice of a server or worker that had died, unless there was one within the last hour."""
    file = stack.folder / NOTICED
    noticed = read_json_or_none(file) or {}
    if name in KEEPERS or time.time() - noticed.get(name, 0.0) < NOTICE_AGAIN:
        return []
    write_json(file, {**noticed, name: time.time()})
    message = f"Prefect's {name} had ended and was started again; {stack.folder / f'{name}.log'} ends with its reason"
    return [Notice(name, "Lost", message, stack.url)]


def notice_late_runs(stack: Stack) -> list[Notice]:
    """Return one notice of all runs that should have started a quarter of an hour ago; none of earlier ones."""
    before = (datetime.now(UTC) - LATE).isoformat()
    late = {"state": {"name": {"any_": ["Late"]}}, "next_scheduled_start_time": {"before_": before}}
    query = {"flow_runs": late, "sort": "EXPECTED_START_TIME_DESC", "limit": 50}
    runs = stack.call("/flow_runs/filter", query, timeout=CALL_SECONDS) or []
    file = stack.folder / NOTICED
    noticed = read_json_or_none(file) or {}
    new = [run for run in runs if run["id"] not in noticed.get("late", [])]
    if not new:
        return []
    # Only runs that are still late: the file does not grow.
    write_json(file, {**noticed, "late": [run["id"] for run in runs]})
    names = shorten_list([f"{run['name']} (due {run['next_scheduled_start_time'][:16]})" for run in new], 5)
    message = f"not started: {names}. The worker may be busy with another run, or not reach the server"
    return [Notice(new[0]["name"], "Late", message, f"{stack.url}/runs")]


def resume_dead_runs(stack: Stack) -> None:
    """Set the true state of runs whose process has died; later schedule those of `RESUMED` again."""
    for run in dead_runs(stack):
        state, age = run["state_type"], datetime.now(UTC) - datetime.fromisoformat(run["state"]["timestamp"])
        if state == CRASHED:
            # Not at once: a worker reports a crash twice, and the second report would hit the resumed run.
            if SETTLED < age < RECENT and run["run_count"] <= ATTEMPTS and flow_name(stack, run) in RESUMED:
                logger.warning("%s: its process died; it continues", run["name"])
                end_run(stack, run, CRASHED, "its process died")
                set_state(stack, f"/flow_runs/{run['id']}", "SCHEDULED", "continues", name="AwaitingRetry")
        elif state != "PENDING" or age > SETTLED:
            end_run(stack, run, CANCELED if state == CANCELING else CRASHED, "its process died")


def cancel_dead_runs(stack: Stack) -> None:
    """Set the true state of the runs that `vlp down` has interrupted: the next `vlp up` does not resume them."""
    for run in dead_runs(stack):
        if run["state_type"] != CRASHED:
            end_run(stack, run, CANCELED, "interrupted by `vlp down`; the next run continues there")


def flow_name(stack: Stack, run: dict[str, Any]) -> str:
    return str((stack.call(f"/flows/{run['flow_id']}", timeout=CALL_SECONDS) or {}).get("name"))


def dead_runs(stack: Stack) -> list[dict[str, Any]]:
    """Return the runs that the server shows as at work or as crashed, and that have no process."""
    query = {"flow_runs": {"state": {"type": {"any_": list(DIED)}}}, "sort": "START_TIME_DESC", "limit": 50}
    runs = stack.call("/flow_runs/filter", query, timeout=CALL_SECONDS) or []
    alive = set(flow_processes(stack).values())
    dead = []
    for run in runs:
        if run["id"] not in alive:
            # The list is older than that of the processes: a run that has ended in between has another state now.
            now = stack.call(f"/flow_runs/{run['id']}", timeout=CALL_SECONDS) or {}
            if now.get("state_id") == run["state_id"]:
                dead.append(run)
    return dead


def end_run(stack: Stack, run: dict[str, Any], kind: str, message: str) -> None:
    """End a dead run and its tasks, and free its GPU slot."""
    if run["state_type"] != kind:
        set_state(stack, f"/flow_runs/{run['id']}", kind, message)
    query = {"flow_runs": {"id": {"any_": [run["id"]]}}, "limit": 200}
    for task in stack.call("/task_runs/filter", query, timeout=CALL_SECONDS) or []:
        if task["state_type"] in ("RUNNING", "PENDING"):
            set_state(stack, f"/task_runs/{task['id']}", kind, message)
    # A lease does not name its holder. One that is older than every run at work was left by a dead one; it would end
    # after five minutes.
    oldest = min((process.create_time() for process in flow_processes(stack)), default=time.time())
    for file in (stack.folder / "prefect" / "concurrency_leases").glob("*.json"):
        lease = read_json_or_none(file) or {}
        if "created_at" in lease and datetime.fromisoformat(lease["created_at"]).timestamp() < oldest:
            lease_id = {"lease_id": lease["id"]}
            stack.call("/v2/concurrency_limits/decrement-with-lease", lease_id, timeout=CALL_SECONDS)


def set_state(stack: Stack, path: str, kind: str, message: str, *, name: str = "") -> None:
    """Set the state of a run, which its own process can no longer report."""
    state: dict[str, Any] = {"type": kind, "name": name or kind.capitalize(), "message": message}
    if kind == "SCHEDULED":
        state["state_details"] = {"scheduled_time": datetime.now(UTC).isoformat()}
    stack.call(f"{path}/set_state", {"state": state, "force": True}, timeout=CALL_SECONDS)


if __name__ == "__main__":
    configure_logging()
    keep(Path.cwd())
