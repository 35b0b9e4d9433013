"""A local S3 server (moto) on loopback with a bucket, for tests that stream from it or push to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "pairs"
OWNER = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}


class Server:
    """`client`: boto3's. Its objects outlast a stop."""

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.client: Any = boto3.client("s3", endpoint_url=self.address, **OWNER)
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

    @contextmanager
    def denying(self, keys: str) -> Iterator[None]:
        """Who reads is a user of IAM's that may read all of the bucket but these keys (a pattern)."""
        import boto3
        from moto.core.authorization import enable_iam_authentication

        iam: Any = boto3.client("iam", endpoint_url=self.address, **OWNER)
        name, bucket = f"reader-{time.monotonic_ns()}", f"arn:aws:s3:::{BUCKET}"
        iam.create_user(UserName=name)
        grants = {"Allow": f"{bucket}/*", "Deny": f"{bucket}/{keys}"}
        policy = [{"Effect": effect, "Action": "s3:*", "Resource": resource} for effect, resource in grants.items()]
        document = json.dumps({"Version": "2012-10-17", "Statement": policy})
        iam.put_user_policy(UserName=name, PolicyName="reads", PolicyDocument=document)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        with pytest.MonkeyPatch.context() as patch, enable_iam_authentication():
            patch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
            patch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
            yield

    @contextmanager
    def dropping(self, ending: str, after: int, times: int) -> Iterator[list[str]]:
        """The first `times` GETs of keys that end so: the connection breaks off after `after` bytes of the contents.
        Gives the paths that all such GETs asked for, as they come."""
        listening = self._server._server
        whole, asked = listening.app, []

        def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            answer = whole(environ, start)
            if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].endswith(ending):
                return answer
            asked.append(environ["PATH_INFO"])
            return _broken_off(answer, after) if len(asked) <= times else answer

        listening.app = app
        try:
            yield asked
        finally:
            listening.app = whole

    def upload(self, directory: Path, prefix: str) -> str:
        """Every file of a folder; returns its address."""
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            self.client.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(directory)}")
        return f"s3://{BUCKET}/{prefix}"


def _broken_off(answer: Iterable[bytes], after: int) -> Iterator[bytes]:
    contents = b"".join(answer)
    assert len(contents) > after, "nothing would be lost"
    yield contents[:after]
    raise ConnectionResetError("as if the network had gone")


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
