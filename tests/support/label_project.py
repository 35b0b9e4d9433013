"""A project with photos, and `vlp label` as a process that serves them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from photos import photo as draw

ROOT = Path(__file__).parents[2]
READY = 90.0  # seconds


def make_project(project: Path, photos: int, **data: Any) -> Path:
    """Make a project whose dataset `own` has drawn photos without captions; photos are compared by their colors."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["data"] = {"own": {"format": "pairs", "root": "data/raw/own", "pairs": "pairs.csv", **data}}
    params["generate"] = {}
    params["features"]["source"], params["detector"]["source"] = "grid", "none"
    params["tracking"]["uri"] = "sqlite:///mlflow.db"
    (project / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    folder = project / "data/raw/own/img"
    folder.mkdir(parents=True)
    for number in range(photos):
        draw(number).save(folder / f"{number:03}.jpg")
    return project


@dataclass
class Client:
    """A browser, as far as HTTP is concerned."""

    address: str
    session: requests.Session
    name: str

    def get(self, path: str, **more: Any) -> requests.Response:
        return self.session.get(self.address + path, timeout=60, **more)

    def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """Send JSON and return the response's, whose status must be this one."""
        response = self.session.post(self.address + path, json={"browser": self.name, **body}, timeout=60)
        assert response.status_code == status, response.text
        return dict(response.json())

    def answer(self, image: str, caption: str, status: int = 200, by: str = "Zoë", **more: str) -> dict[str, Any]:
        return self.post("/answer", status, image=image, caption=caption, by=by, **more)


class LabelServer:
    """`vlp label` in a project, on a port that stays the same over restarts."""

    def __init__(self, root: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.root, self.options = root, options
        self.listing = root / "data/raw/own/pairs.csv"
        self.log = root / "label.log"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "vlp_models.cli.main", "label", "--port", str(self.port), *self.options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=self.root, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + READY
        while not (match := re.search(r"open (http://\S+)/\?token=([\w-]+);", self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.address, self.token = match[1], match[2]

    def client(self, name: str) -> Client:
        session = requests.Session()
        session.trust_env = False
        client = Client(self.address, session, name)
        assert client.get("/", params={"token": self.token}).ok
        return client

    def wait_for(self, client: Client, topic: str, text: str) -> dict[str, Any]:
        """Return the progress as soon as its note on a topic contains a text."""
        deadline = time.monotonic() + READY
        while True:
            progress = client.get("/progress").json()["progress"]
            if text in progress["notes"].get(topic, ""):
                return dict(progress)
            assert time.monotonic() < deadline, json.dumps(progress)
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        self.process.wait(timeout=60)
        return self.log.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LabelServer]]:
    """Return a function that starts the command; what it started is stopped in the end."""
    servers: list[LabelServer] = []

    def start_server(root: Path = tmp_path, *options: str) -> LabelServer:
        servers.append(LabelServer(root, *options))
        return servers[-1]

    yield start_server
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
