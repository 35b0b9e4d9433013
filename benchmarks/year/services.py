"""The services of the year: PostgreSQL, an object store (SeaweedFS), MLflow's server, a receiver of webhooks.

Each is the real program on loopback, in a process of its own that can be killed and started again on the same data.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
MODELS_KEY, DATA_KEY = ("models", "secret-of-models"), ("data", "secret-of-data")  # access key, its secret
UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Service:
    """A program with a log, started in a session of its own; `ports` stay the same over restarts and interruptions."""

    def __init__(self, folder: Path, name: str, ports: int = 1) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "ports.json"
        if not file.exists():
            file.write_text(json.dumps([free_port() for _ in range(ports)]))
        self.ports: list[int] = json.loads(file.read_text())
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self, user: str | None = None) -> None:
        if answers(self.ports[0]):
            raise RuntimeError(f"port {self.ports[0]} of {self.name} is in use; is another year at work?")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=user,
            )
        wait_until(self.is_ready, 120, self.name)

    def is_ready(self) -> bool:
        return answers(self.ports[0])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the program and its children; after 30 seconds SIGKILL."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


class Postgres(Service):
    """PostgreSQL's programs are those of the package pgserver."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "postgresql")
        import pgserver

        self.programs = Path(pgserver.__file__).parent / "pginstall" / "bin"
        self.user = UNPRIVILEGED if os.geteuid() == 0 else None
        self.data = self.folder / "data"
        if not (self.data / "PG_VERSION").exists():
            self.data.mkdir(mode=0o700, exist_ok=True)
            if self.user:
                shutil.chown(self.data, self.user)
                shutil.chown(self.folder, self.user)
            command = [str(self.programs / "initdb"), "-D", str(self.data), "-U", "vlp", "--auth=trust", "-E", "UTF8"]
            subprocess.run(command, check=True, capture_output=True, user=self.user, cwd=self.folder)

    @property
    def uri(self) -> str:
        return f"postgresql+psycopg://vlp@127.0.0.1:{self.ports[0]}/postgres"

    def command(self) -> Sequence[str]:
        small = ["-c", "max_wal_size=64MB", "-c", "min_wal_size=32MB"]
        return [str(self.programs / "postgres"), "-D", str(self.data), "-p", str(self.ports[0]), "-k", "", *small]

    def start(self, user: str | None = None) -> None:
        super().start(self.user)

    def is_ready(self) -> bool:
        check = [str(self.programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.ports[0]), "-q"]
        return subprocess.run(check).returncode == 0

    def size(self) -> int:
        """Return the bytes of the tables and indexes, without the log that PostgreSQL reuses."""
        import psycopg

        with psycopg.connect(host="127.0.0.1", port=self.ports[0], user="vlp", dbname="postgres") as connection:
            row = connection.execute("select pg_database_size('postgres')").fetchone()
        return int(row[0]) if row else 0


class Bucket(Service):
    """SeaweedFS with the buckets `models` and `data`, each with its own access key."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "seaweedfs", ports=8)  # S3, master, volume, filer; for each another for gRPC
        (self.folder / "data").mkdir(exist_ok=True)
        if not self.keys_file.exists():
            self.write_keys(DATA_KEY)

    @property
    def keys_file(self) -> Path:
        return self.folder / "keys.json"

    def write_keys(self, data_key: tuple[str, str]) -> None:
        """Write the identities, for the next start: that of `models` and the given one of `data`."""
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
            for name, (key, secret) in (("models", MODELS_KEY), ("data", data_key))
        ]
        self.keys_file.write_text(json.dumps({"identities": identities}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def command(self) -> Sequence[str]:
        options = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder / 'data'}", "-volume.max=50", "-s3"]
        options += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # not needed, and their ports are fixed
        options += [f"-s3.config={self.keys_file}", "-master.volumeSizeLimitMB=64", "-volume.minFreeSpace=1"]
        for name, port, grpc in zip(
            ("s3", "master", "volume", "filer"), self.ports[::2], self.ports[1::2], strict=True
        ):
            options += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
        return ["weed", "server", *options]

    def is_ready(self) -> bool:
        try:
            client = self.client(MODELS_KEY)
            present = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
            for name in {"models", "data"} - present:
                client.create_bucket(Bucket=name)
        except Exception:  # its parts start one after the other
            return False
        return True

    def client(self, key: tuple[str, str]) -> Any:
        import boto3

        names = {"aws_access_key_id": key[0], "aws_secret_access_key": key[1], "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, **names)


class MlflowServer(Service):
    """MLflow's server with the database's records and the bucket's artifacts; clients need no key of the bucket."""

    def __init__(self, folder: Path, database: Postgres, bucket: Bucket) -> None:
        super().__init__(folder, "mlflow")
        self.database, self.bucket = database, bucket

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def command(self) -> Sequence[str]:
        stores = ["--backend-store-uri", self.database.uri, "--artifacts-destination", "s3://models/artifacts"]
        where = ["--host", "127.0.0.1", "--port", str(self.ports[0]), "--workers", "1"]
        return [str(BIN / "mlflow"), "server", *stores, "--serve-artifacts", *where]

    def environment(self) -> dict[str, str]:
        key, secret = MODELS_KEY
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1"}
        keys |= {"MLFLOW_S3_ENDPOINT_URL": self.bucket.endpoint, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        return os.environ | keys

    def is_ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
            return bool(answer.status == 200)
        return False


class Inbox(http.server.ThreadingHTTPServer):
    """Receives the webhook's messages and appends each as a line to a file."""

    def __init__(self, file: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Receiver)
        self.file, self.lock = file, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/hook"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


class _Receiver(http.server.BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock, self.server.file.open("ab") as file:
            file.write(json.dumps(json.loads(body)).encode() + b"\n")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""
