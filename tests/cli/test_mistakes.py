"""Common mistakes, one a row: what is wrong, the command, and the sentence that it answers with.

No answer may show a traceback, an errno or a codec. File permissions count for root as well (`without_root_rights`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cloned_project import ROOT, environment, run_in_process
from mistakes import Arrange, file_size_limit, folder, make_template, mode, nothing, setting, without_root_rights
from mistakes_table import TABLE, Mistake

from vlp_models.cli.main import app, main
from vlp_models.common import progress
from vlp_models.common.lock import HELD_LOCK, file_lock
from vlp_models.common.workspace import Workspace

RAW = ("Traceback", "Errno", "codec", "Error(", "getpwuid")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the project that every test copies; the first process that asks builds it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers
    with file_lock(shared / "mistakes.lock", "test session", wait=300):
        if not (shared / "mistakes").exists():
            make_template(shared / "mistakes.partial").rename(shared / "mistakes")
    return shared / "mistakes"


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the template, in a folder whose name is not ASCII and has a space."""
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    subprocess.run(["cp", "-a", str(template), str(tmp_path / "B\xfcro \u65e5\u672c")], check=True)
    return tmp_path / "B\xfcro \u65e5\u672c"


NAMES = {command.name for command in app.registered_commands}  # a folder of contrib may be absent
ROWS = [row for row in TABLE if row.command.split()[0] in NAMES]


@pytest.mark.parametrize("mistake", ROWS, ids=lambda mistake: f"{mistake.command}: {mistake.what}")
def test_a_mistake_is_answered_with_one_sentence(project: Path, mistake: Mistake) -> None:
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # as a command's own process does before it imports MLflow
    mistake.arrange(project)
    with without_root_rights(), mistake.during():
        done = run_in_process(project, "vlp", *shlex.split(mistake.command), check=False)
    check_answer(done.stdout + done.stderr, mistake.sentence)
    assert done.returncode == mistake.code, done.stdout + done.stderr


def check_answer(output: str, sentence: str) -> None:
    assert re.search(sentence, output), output
    assert not [word for word in RAW if word in output], output


REFUSED = r"the file system is read-only; work in a copy"
READ_ONLY = {
    "run": REFUSED,
    "use presets/longer.yaml": REFUSED,
    "promote captioning": REFUSED,
    "history captioning": "no decision yet",
    "caption data/raw/photos/0.png": REFUSED,
    "ingest": REFUSED,
    "doctor": f"problem +permissions +.*{REFUSED}",
    "status": REFUSED,
    "stage validate": REFUSED,
    "plan": "dvc.yaml is up to date",
}


@pytest.mark.parametrize("command", [command for command in READ_ONLY if command.split()[0] in NAMES])
def test_a_read_only_installation_is_named(read_only_answers: dict[str, str], command: str) -> None:
    check_answer(read_only_answers[command], READ_ONLY[command])


@pytest.fixture(scope="module")
def read_only_answers(template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each command in a project that is mounted read-only, all by one process."""
    project = tmp_path_factory.mktemp("read-only") / "project"
    subprocess.run(["cp", "-a", str(template), str(project)], check=True)
    (project / ".work" / "locks" / "mlflow.lock").unlink(missing_ok=True)
    mount = f"mount --bind {project} {project} && mount -o remount,ro,bind {project} {project} && exec "
    code = (
        "import json, pathlib, sys; sys.path[:0] = sys.argv[1].split(':'); from cloned_project import run_in_process\n"
        "run = lambda c: run_in_process(pathlib.Path(sys.argv[2]), 'vlp', *c.split(), check=False)\n"
        "done = {command: run(command) for command in sys.argv[3:]}\n"
        "print(json.dumps({command: result.stdout + result.stderr for command, result in done.items()}))"
    )
    python = shlex.join([sys.executable, "-c", code, f"{ROOT / 'tests' / 'support'}:{ROOT}", str(project), *READ_ONLY])
    done = in_namespace("-rm", "sh", "-c", mount + python, COLUMNS="500")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def in_namespace(options: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its own users or mounts; skip where the system forbids that."""
    unshare = ["unshare", "--user", *options.split()]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow user namespaces")
    return subprocess.run([*unshare, *command], capture_output=True, text=True, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("command", "has_home", "sentence"),
    [
        ("run", False, r"vlp: uid-12345: no home folder, .* set HOME to a writable folder"),
        ("status", False, r"note +dvc status: .*could not determine the home directory"),
        ("status", True, r"stale +\d+ stages"),  # DVC needs a name as well, which `vlp` sets
    ],
)
def test_a_user_whom_the_system_does_not_know_needs_only_a_home_folder(
    project: Path, command: str, has_home: bool, sentence: str
) -> None:
    env = environment(project) | {"PYTHONPATH": str(ROOT)} | ({"HOME": str(project.parent)} if has_home else {})
    for name in ("LOGNAME", "USER", *(() if has_home else ("HOME",))):
        env.pop(name, None)
    vlp = [sys.executable, "-m", "vlp_models.cli.main", command]
    clean = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in env.items()), *vlp])
    unknown = "--map-user=12345 --map-group=12345"
    done = in_namespace(unknown, "sh", "-c", f"cd {shlex.quote(str(project))} && exec {clean}")
    check_answer(done.stdout + done.stderr, sentence)


def take_too_much_memory() -> None:
    import torch

    torch.empty(2**50)


def open_too_many_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        with contextlib.ExitStack() as opened:
            while True:
                opened.enter_context(socket.socket())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def start_too_many_threads() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, limits[1]))  # no room for a stack
    try:
        threading.Thread(target=print).start()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    ("exhaust", "sentence"),
    [
        (lambda: bytearray(2**62), "vlp: out of memory; free some, lower the `batch_size`"),
        (take_too_much_memory, "vlp: out of memory; free some, lower the `batch_size`"),
        (open_too_many_files, "vlp: too many open files; raise the limit with `ulimit -n`"),
        (start_too_many_threads, "vlp: no further process or thread; raise the limit with `ulimit -u`"),
    ],
    ids=["Python's memory", "torch's memory", "files", "threads"],
)
def test_an_exhausted_machine_is_named_with_the_limit_to_raise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, exhaust: Callable[[], object], sentence: str
) -> None:
    monkeypatch.setattr("vlp_models.cli.main.app", exhaust)
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(sentence)


def test_a_name_that_the_terminal_cannot_show_is_escaped(project: Path) -> None:
    setting("data.photos.root", "data/raw/B\xfcro")(project)
    env = environment(project) | {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    vlp = [sys.executable, "-m", "vlp_models.cli.main"]
    done = subprocess.run([*vlp, "plan"], cwd=project, env=env, capture_output=True, text=True)
    check_answer(done.stderr, r"data/raw/B\\xfcro`: no such folder")
    assert done.returncode == 2


NEW_RUN = "finetune.more={task: captioning, start: pretrain/tden}"
FAILURES: dict[str, tuple[str, Arrange, str, Callable[[], AbstractContextManager[object]]]] = {
    "package is missing": ("models.tden.text_init=package:no-bert", nothing, "not installed", contextlib.nullcontext),
    "folder is read-only": (NEW_RUN, mode(".", 0o555), "permission denied", contextlib.nullcontext),
    "disk is full": (NEW_RUN, nothing, r"params\.yaml: the disk is full", lambda: file_size_limit(300)),
    "dvc.yaml is a folder": (NEW_RUN, folder("dvc.yaml"), r"dvc\.yaml: a folder", contextlib.nullcontext),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_use_changes_both_files_or_none(project: Path, failure: str) -> None:
    assign, arrange, sentence, during = FAILURES[failure]
    arrange(project)
    before = contents(project)
    with without_root_rights(), during():
        done = run_in_process(project, "vlp", "use", "--set", assign, check=False)
    check_answer(done.stdout + done.stderr, sentence)
    assert done.returncode != 0
    assert contents(project) == before


def test_use_restores_params_if_dvc_yaml_cannot_be_replaced(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, replace = contents(project), Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.name == "dvc.yaml":
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    done = run_in_process(
        project, "vlp", "use", "--set", "finetune.more={task: captioning, start: pretrain/tden}", check=False
    )
    check_answer(done.stderr, r"dvc\.yaml: permission denied")
    assert contents(project) == before


def contents(project: Path) -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()) for path in sorted(project.iterdir()) if path.is_file()]


def test_use_is_refused_while_a_run_uses_the_workspace(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, lock = contents(project), Workspace(project).lock
    command = ("vlp", "use", "presets/longer.yaml")
    with file_lock(lock, "`vlp run`"):
        done = run_in_process(project, *command, check=False)
        check_answer(done.stderr, rf"another `vlp run` \(pid {os.getpid()}\) is using this workspace; wait for it")
        assert done.returncode == 2 and contents(project) == before
        monkeypatch.setenv(HELD_LOCK, str(lock.resolve()))  # as for a command of the flow that holds it
        run_in_process(project, *command)
    assert contents(project) != before


def test_a_slow_command_announces_its_work_on_a_terminal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ANNOUNCE_AFTER", 0.0)
    monkeypatch.setattr("vlp_models.pipeline.promotion_commands.history_rows", lambda *given: time.sleep(0.2) or [])
    for terminal, expected in ((True, "checking the ledger ...\n"), (False, "")):
        monkeypatch.setattr(progress, "on_terminal", lambda terminal=terminal: terminal)
        assert run_in_process(project, "vlp", "history", "captioning").stderr == expected
