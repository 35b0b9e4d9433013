"""The setup of docs/guides/deployment.md, by hand, on a toy project: server, pool, deployments, worker, webhook."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from flow_project import Listener, make_project, set_flow
from prefect_server import Server

ROOT = Path(__file__).parents[2]
TRAINER = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGINT, save)
pathlib.Path("started").touch()
time.sleep(120)
"""


@dataclass
class Site:
    server: Server
    project: Path
    webhook: Listener
    worker: subprocess.Popen[bytes]

    def next_message(self, state: str, seconds: float = 30) -> str:
        """Wait for the webhook's message about a run that ended in `state`, and return it."""
        wait_until(lambda: any(body["state"] == state for body in self.webhook.bodies), seconds, self.webhook.bodies)
        message = str(next(body["message"] for body in self.webhook.bodies if body["state"] == state))
        self.webhook.bodies.clear()
        return message


def wait_until(condition: Callable[[], bool], seconds: float = 60, what: object = "it did not happen in time") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def documented_commands(page: str) -> list[str]:
    """Return the commands of a page's first console block, in order."""
    block = (ROOT / "docs" / page).read_text().partition("```console\n")[2].partition("```")[0]
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in block.splitlines() if line]


@contextlib.contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """Run the first commands of docs/guides/deployment.md up to the worker, in their order."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        webhook = stack.enter_context(Listener())
        stack.callback(webhook.shutdown)
        threading.Thread(target=webhook.serve_forever, daemon=True).start()
        patch.setenv("VLP_WEBHOOK", webhook.url)
        project = make_project(folder, patch)
        set_flow(project, webhook="env:VLP_WEBHOOK")
        (project / "flows").symlink_to(ROOT / "flows")
        shutil.copytree(ROOT / "deploy", project / "deploy")
        shorten(ROOT / "deploy" / "zombie.yaml", project / "deploy" / "zombie.yaml", "within: 600", "within: 90")
        shorten(ROOT / "prefect.yaml", project / "prefect.yaml", "schedule_after: 360", "schedule_after: 1")
        (project / "answer-promote-vqa").write_text("3 refused: gain 0.2 is below 0.5")
        write_reports(project / "reports")
        server = Server(folder / "prefect")
        stack.callback(server.close)
        for command in documented_commands("guides/deployment.md"):
            arguments = shlex.split(command.rstrip("&").partition("prefect ")[2])
            if "worker start" in command:
                break
            if command.startswith("prefect ") and "server start" not in command:
                server.run(arguments, project)
        site = Site(server, project, webhook, server.start(arguments, project))
        stack.callback(lambda: server.stop(site.worker))
        yield site


def shorten(source: Path, copy: Path, value: str, shorter: str) -> None:
    """Copy a shipped file with one shorter waiting time."""
    text = source.read_text()
    assert text.count(value) == 1
    copy.write_text(text.replace(value, shorter))


def write_reports(reports: Path) -> None:
    """Write the reports from which artifacts are made."""
    (reports / "promotion").mkdir()
    numbers = {"metric": "accuracy", "value": 41.0, "champion_value": 40.8}
    decision = {"action": "refused", "version": 1, "reasons": ["gain 0.2 is below 0.5"], "numbers": numbers}
    (reports / "promotion" / "vqa.json").write_text(json.dumps(decision))
    record = {"task": "vqa", "run": "vqa", "dataset": "scenes", "split": "test", "metric": "accuracy", "value": 41.0}
    (reports / "summary.json").write_text(json.dumps([record]))
    (reports / "validation.json").write_text(json.dumps({"tables": {"captions": {"good": 200, "bad": 1}}}))
    (reports / "ingest.json").write_text(json.dumps({"new": 3, "duplicates": 1, "leaks": 0, "bad": 0}))
    measure = {"name": "caption length", "value": 3.1, "limit": 2.0, "drifted": True}
    (reports / "drift.json").write_text(json.dumps({"gate": False, "drifted": True, "measures": [measure]}))
    (reports / "index.html").write_text("<html></html>")
