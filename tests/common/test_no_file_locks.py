"""On a file system without locks each command that needs one names the path and the way out."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from cloned_project import environment, new_clone

NO_LOCKS = """
import fcntl
import os

def flock(descriptor, operation):
    number = int(os.environ["FLOCK_ERRNO"])
    raise OSError(number, os.strerror(number))

fcntl.flock = flock
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone with a module next to it that makes every lock fail, as the kernel does there."""
    folder = tmp_path_factory.mktemp("locks")
    (folder / "modules").mkdir()
    (folder / "modules" / "sitecustomize.py").write_text(NO_LOCKS)
    return new_clone(folder / "project")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "path"),
    [
        ("run plan", errno.ENOSYS, ".work/run.lock: "),
        ("use tiny", errno.ENOLCK, ".work/run.lock: "),
        ("ingest", errno.EOPNOTSUPP, ".work/ingest/lock: "),
        ("promote vqa", errno.ENOSYS, ".work/locks/mlflow.lock: "),
    ],
)
def test_the_path_and_the_way_out_are_named(project: Path, command: str, number: int, path: str) -> None:
    env = environment(project) | {"FLOCK_ERRNO": str(number), "COLUMNS": "1000"}
    env["PYTHONPATH"] = f"{project.parent / 'modules'}{os.pathsep}{project}"
    done = subprocess.run(["vlp", *command.split()], cwd=project, env=env, capture_output=True, text=True)
    (line,) = [line for line in done.stderr.splitlines() if "the file system has no file locks" in line]
    assert f"{project}/{path}" in line and "Move the project to a local disk" in line
    assert done.returncode != 0 and "Traceback" not in done.stderr
