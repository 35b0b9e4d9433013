"""Clones of the project: an empty one, and one after `vlp run` at the tiny size, built once per test session.

Also runs commands in a clone, as a subprocess or in this process, and the code blocks of CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from vlp_models.cli.main import main
from vlp_models.common import source_hash
from vlp_models.common.lock import file_lock

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"[Ii]n\s(\S+\.\w+):\n\Z")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command in `folder`, with the virtual environment activated."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    env |= {"DVC_SITE_CACHE_DIR": str(folder / ".dvc" / "site"), "TMPDIR": str(folder.parent), "OMP_NUM_THREADS": "2"}
    env |= {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env.pop("MLFLOW_TRACKING_URI", None)
    return env


def run(folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`."""
    done = subprocess.run(list(command), cwd=folder, env=environment(folder), capture_output=True, text=True)
    if check:
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def run_in_process(folder: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `vlp ...` in `folder` like `run`, but in this process, which has already imported torch and MLflow.

    Only for commands that start no process, and in clones whose code is unchanged: the running code is not theirs.
    """
    assert command[0] == "vlp"
    stdout, stderr = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, environment(folder), clear=True),
        patch.object(sys, "argv", list(command)),
        patch.object(source_hash, "other_package", return_value=None),  # it is refused although it is equal
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    done = subprocess.CompletedProcess(list(command), int(code or 0), stdout.getvalue(), stderr.getvalue())
    if check:
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def commit(folder: Path, message: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", *identity, "commit", "-qm", message], cwd=folder, check=True)


def copy_tracked_files(folder: Path, *, without: Sequence[str] = ("tests",)) -> None:
    """Copy what git tracks to `folder`, without the files below the paths of `without`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if not name.startswith(tuple(f"{path}/" for path in without)) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def init_dvc(folder: Path) -> None:
    """Make a git and DVC project of a folder, with the files of `dvc init`, which takes seconds to import DVC."""
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").touch()
    (folder / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
    (folder / ".dvcignore").touch()
    for command in (["init", "-q"], ["add", ".dvc", ".dvcignore"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def new_clone(folder: Path) -> Path:
    """Copy the tracked files, without tests, to a new git and DVC project."""
    copy_tracked_files(folder)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    commit(folder, "clone")
    return folder


def build_project(folder: Path) -> Path:
    """Return a clone in `folder` after `vlp run` at the tiny size; the first test process that asks builds it.

    No test may change it: they work on a `copy_project`. The run's output is in `folder`/run.log.
    """
    project, output = folder / "project", folder / "run.log"
    with file_lock(folder / "lock", "test session", wait=1200):
        if not output.exists():
            shutil.rmtree(project, ignore_errors=True)
            new_clone(project)
            run(project, "vlp", "use", "tiny")
            output.write_text(run(project, "vlp", "run").stdout)
    return project


def copy_project(built: Path, folder: Path) -> Path:
    """Copy a built project. MLflow stores absolute paths: they are changed to the copy's."""
    subprocess.run(["cp", "-a", str(built), str(folder)], check=True)
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        for table in tables:
            columns = [row[1] for row in database.execute(f'pragma table_info("{table}")')]
            for column in columns:
                database.execute(
                    f'update "{table}" set "{column}" = replace("{column}", ?, ?) where instr("{column}", ?)',
                    (str(built), str(folder), str(built)),
                )
        database.commit()
    for file in (folder / "mlartifacts").rglob("*"):
        if file.is_file() and str(built).encode() in (content := file.read_bytes()):
            file.write_bytes(content.replace(str(built).encode(), str(folder).encode()))
    return folder


def follow_section(clone: Path, section: str) -> None:
    """Write the files and run the commands of a section of CONTRIBUTING.md, in its order."""
    text = (clone / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text.split(f"## {section}\n")[1].partition("\n## ")[0]
    done = 0
    for block in BLOCK.finditer(text):
        before, (language, body) = text[: block.start()], block.groups()
        if language == "bash":
            run(clone, "bash", "-ec", body)
        else:
            file = FILE.search(before)
            assert file is not None, f"{section}: no target for this block:\n{body}"
            (clone / file[1]).parent.mkdir(exist_ok=True)
            (clone / file[1]).write_text(body, encoding="utf-8")
        done += 1
    assert done, section
