"""A local S3 server (moto's) on loopback, with a bucket, for whoever streams from one or pushes to one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "pairs"


class Server:
    """`client`: boto3's. Its objects outlast a stop."""

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        self.address = f"http://127.0.0.1:{self.port}"
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=self.address, **keys)
        self.client.create_bucket(Bucket=BUCKET)

    def stop(self) -> None:
        listening = self._server._server
        self._server.stop()
        listening.server_close()

    def start(self) -> None:
        self._server._port = self.port
        for _ in range(50):
            try:
                self._server.start()
            except OSError:  # the port is not free yet
                time.sleep(0.1)
            else:
                return

    def upload(self, directory: Path, prefix: str) -> str:
        """Every file of a folder; returns its address."""
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            self.client.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(directory)}")
        return f"s3://{BUCKET}/{prefix}"


@contextmanager
def s3_server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.stop()


def credentials(monkeypatch: pytest.MonkeyPatch, server: Server, home: Path) -> None:
    """What a process finds in its environment, and nothing of this machine's own."""
    for name, value in {
        "AWS_ENDPOINT_URL": server.address,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(home / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
