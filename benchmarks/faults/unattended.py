"""Parts of the unattended stack are killed, alone or in pairs: the worker and server of `vlp up`, a flow, its trainer.

The stack starts them again by itself, and the flow goes on; a flow that failed is continued by the next one.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from ground import DEPENDENTS, Command, Ground, patience, ran
from moments import Fault, Outcome, reach, set_params, until

WEEKLY = "/deployments/name/retrain/weekly"
ENDED = ("COMPLETED", "FAILED", "CANCELLED")  # plain-ok
PARTS = ("worker", "server", "keeper", "second-keeper", "engine", "stage", "dvc", "supervisor")
LONG = 300  # seconds in which a flow has ended, whatever was killed


class Stack:
    """The server and worker that `vlp up` starts in the ground's project."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self.root = ground, ground.project / ".work" / "stack"
        self.prepared = ground.folder / "stack"  # with the database and the deployments of an earlier fault

    def up(self) -> str:
        """Start what does not run; return what went wrong."""
        if self.prepared.exists() and not self.root.exists():
            shutil.copytree(self.prepared, self.root, symlinks=True)
        more = [] if self.root.exists() else ["--port", str(_free_port())]
        run = Command("vlp up", self.ground.project, more=more)
        return run.output[-400:] if run.wait() else ""

    def down(self) -> str:
        run = Command("vlp down", self.ground.project)
        problem = run.output[-400:] if run.wait() else ""
        if not problem and not self.prepared.exists():
            shutil.copytree(self.root, self.prepared, symlinks=True)
        return problem

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "record.json").read_text()))

    def call(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.record['port']}/api{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        for _ in range(30):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(1)  # its database is busy, and nothing was written
        raise TimeoutError(f"Prefect's server at port {self.record['port']} stays busy")

    def start_flow(self) -> str:
        deployment = self.call(WEEKLY)["id"]
        return str(self.call(f"/deployments/{deployment}/create_flow_run", {})["id"])

    def state(self, flow: str) -> str:
        """Return the state of a flow run; empty: the server does not answer."""
        with suppress(OSError, urllib.error.URLError, ValueError):
            return str(self.call(f"/flow_runs/{flow}")["state_type"])
        return ""

    def wait(self, flow: str) -> str:
        """Wait for the end of a flow run, and return its state; a crashed one is resumed by the stack itself."""
        until(lambda: self.state(flow) in ENDED, None, patience(LONG), pause=1)
        return self.state(flow)

    def logs(self, flow: str) -> str:
        lines: list[str] = []
        while True:
            body = {"logs": {"flow_run_id": {"any_": [flow]}}, "sort": "TIMESTAMP_ASC", "offset": len(lines)}
            page = self.call("/logs/filter", body)
            lines += [entry["message"] for entry in page]
            if not page:
                return "\n".join(lines)

    def find(self, part: str) -> psutil.Process | None:
        """Return the process of a part, or None if it does not run."""
        if part in ("stage", "dvc", "supervisor"):
            return self.ground.process(part)
        for process in self.ground.descendants():
            with suppress(psutil.Error):
                if part == "engine" and "prefect.engine" in process.cmdline():
                    return process
                if process.pid == (self.record.get(part) or {}).get("pid"):
                    return process
        return None


def killed_parts(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Kill one part, or two at once, while a flow of the worker runs the stage."""
    chance = random.Random(fault.chance)
    parts = chance.sample(PARTS, 1 if fault.kind.endswith("part") else 2)
    outcome.note = " and ".join(parts)

    def strike(stack: Stack) -> None:
        for process in [stack.find(part) for part in parts]:
            with suppress(psutil.Error):
                if process is not None:
                    process.kill()

    return _disturb(ground, fault, outcome, strike)


def edited_at_the_end(ground: Ground, fault: Fault, outcome: Outcome) -> Command:
    """Edit params.yaml around the end of a flow's training, and restore it; or kill the worker at this moment, too."""
    chance = random.Random(fault.chance)
    run = fault.stage.replace("@", ".")
    outcome.note = chance.choice(("params", "params and worker", "params and dvc"))
    outcome.may_repeat.add(fault.stage)

    def strike(stack: Stack) -> None:
        restore = set_params(ground, {f"{run}.seed": 97})
        if " and " in outcome.note and (process := stack.find(outcome.note.rpartition(" ")[2])):
            with suppress(psutil.Error):
                process.kill()
        until(lambda: ground.process("stage") is None, None, 60)
        time.sleep(4 * chance.random())
        restore()

    return _disturb(ground, fault, outcome, strike)


UNATTENDED: dict[str, Callable[[Ground, Fault, Outcome], Command]] = {
    "unattended: one part": killed_parts,
    "unattended: two parts": killed_parts,
    "unattended: params edited": edited_at_the_end,
}


def _disturb(ground: Ground, fault: Fault, outcome: Outcome, strike: Callable[[Stack], None]) -> Command:
    """Run a flow by `vlp up`, strike in it, and wait for its end without help; a failed one is started again."""
    stack = Stack(ground)
    if problem := stack.up():
        outcome.blame("silent", f"vlp up: {problem}")
        return Command("true", ground.project)
    recorded, flow = ground.recorded(), stack.start_flow()
    outcome.hit = reach(ground, fault, None)
    if outcome.hit:
        strike(stack)
    state = stack.wait(flow)
    outcome.note += f"; the flow: {state or 'no server'}"
    if state in ("FAILED", "CANCELLED"):  # plain-ok
        flow = stack.start_flow()
        state = stack.wait(flow)
    if state != "COMPLETED":
        outcome.blame("endless", f"the flow is {state or 'without a server'}")
    else:
        repeated = ran(stack.logs(flow)) & recorded - outcome.may_repeat - DEPENDENTS
        outcome.blame("lost", *(f"the flow repeats {stage}" for stage in sorted(repeated)))
    if problem := stack.down():
        outcome.blame("lost", f"vlp down: {problem}")
    return Command("true", ground.project)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
