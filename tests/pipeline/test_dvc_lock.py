"""dvc.lock: repaired after a kill, consistent with what a stage used; results kept until DVC has recorded them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.cli.pipeline import run_stage
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, ParamsError
from vlp_models.pipeline import unrecorded_results
from vlp_models.pipeline.dvc.lock_file import (
    BACKUP,
    DAMAGED,
    REPRO_MODULE,
    RWLOCK,
    back_up,
    drop_former_inputs,
    read_holders,
    read_stages,
    repair,
)
from vlp_models.pipeline.stages import prepare, tokenizer
from vlp_models.pipeline.unrecorded_results import (
    KEPT_DAYS,
    RECORD,
    remove_outdated_work,
    restore_unrecorded_result,
    save_unrecorded_result,
)

ROOT = Path(__file__).parents[2]
INTACT = "schema: '2.0'\nstages:\n  a:\n    cmd: run a\n  b:\n    cmd: run b\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an intact dvc.lock and its backup."""
    (tmp_path / "dvc.lock").write_text(INTACT)
    back_up(tmp_path)
    return tmp_path


def test_a_stage_that_loses_an_input_runs_again(tmp_path: Path) -> None:
    """DVC alone takes the stage for unchanged, so the result would be that of the former inputs."""

    def dvc(*arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def write_pipeline(*inputs: str) -> dict[str, Any]:
        stages = {"join": {"cmd": "cat *.txt > joined", "deps": [*inputs], "outs": ["joined"]}}
        (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
        return stages

    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    dvc("init", "--no-scm", "--quiet")
    pipeline = write_pipeline("a.txt", "b.txt")
    dvc("repro")
    assert drop_former_inputs(tmp_path, pipeline) is None
    pipeline = write_pipeline("a.txt")
    (tmp_path / "b.txt").unlink()
    assert json.loads(dvc("status", "--json")) == {}, "otherwise the repair is not needed"
    lock = drop_former_inputs(tmp_path, pipeline)
    assert lock is not None
    (tmp_path / "dvc.lock").write_text(lock)
    dvc("repro")
    assert (tmp_path / "joined").read_text() == "a.txt\n"


@pytest.mark.parametrize("length", range(len(INTACT) - 1))
def test_lock_file_truncated_anywhere_is_restored_or_valid(root: Path, length: int) -> None:
    (root / "dvc.lock").write_text(INTACT[:length])
    done = repair(root)
    if INTACT[:length] == INTACT[: INTACT.index("  b:")]:  # a complete file with one stage
        assert (read_stages(root / "dvc.lock") or {})["a"] == {"cmd": "run a"}
    else:
        assert len(done) == 1 and "restored from" in done[0]
        assert (root / "dvc.lock").read_text() == INTACT
        assert (root / DAMAGED).read_text() == INTACT[:length]
    assert repair(root) == []


def test_conflict_markers_are_an_error_and_both_sides_stay(root: Path) -> None:
    ours, theirs = "    cmd: run b\n", "    cmd: run c\n"
    merged = INTACT.replace(ours, f"<<<<<<< HEAD\n{ours}=======\n{theirs}>>>>>>> other\n")
    (root / "dvc.lock").write_text(merged)
    with pytest.raises(DataError, match=r"dvc\.lock:\d+: git's conflict markers; .*git checkout --ours dvc\.lock"):
        repair(root)
    assert (root / "dvc.lock").read_text() == merged


def test_intact_lock_file_is_left_alone_and_backed_up(root: Path) -> None:
    other = INTACT.replace("run b", "run c")
    (root / "dvc.lock").write_text(other)
    assert repair(root) == []
    back_up(root)
    (root / "dvc.lock").write_text("")
    back_up(root)  # keeps the older backup
    assert (root / BACKUP).read_text() == other
    repair(root)
    assert (root / "dvc.lock").read_text() == other


def test_repair_backs_up_the_lock_file_before_the_first_stage(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(INTACT)
    assert repair(tmp_path) == []
    (tmp_path / "dvc.lock").write_text("")
    assert "restored from" in repair(tmp_path)[0]
    assert (tmp_path / "dvc.lock").read_text() == INTACT


@pytest.mark.parametrize("content", [INTACT[:-1], ""])
def test_damaged_lock_file_without_a_backup_is_moved_away(tmp_path: Path, content: str) -> None:
    (tmp_path / "dvc.lock").write_text(content)
    assert "moved to dvc.lock.damaged" in repair(tmp_path)[0]
    assert not (tmp_path / "dvc.lock").exists()


@contextmanager
def running(cwd: Path, *command: str) -> Iterator[int]:
    """Run a program that waits; yield its pid."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"started\n"
        yield program.pid
        program.communicate(b"\n")


def hold(root: Path, pid: int, command: str) -> None:
    """Write an rwlock as DVC does, in which a process writes one path and reads another."""
    (root / RWLOCK).parent.mkdir(parents=True, exist_ok=True)
    entry = {"pid": pid, "cmd": command}
    content = {"write": {f"{root}/data/a": entry}, "read": {f"{root}/data/b": [entry]}}
    (root / RWLOCK).write_text(json.dumps(content))


WAITS = "print('started', flush=True); input()"


def test_entries_whose_pid_belongs_to_another_program_are_dropped(tmp_path: Path) -> None:
    """As after a reboot, or in a new pod: DVC would wait for that program forever."""
    with running(tmp_path, "-c", WAITS) as pid:
        hold(tmp_path, pid, "/srv/project/.venv/bin/dvc repro pretrain@tden")
        (dropped,) = repair(tmp_path)
    assert dropped == f"{RWLOCK}: dropped the entries of DVC processes that have ended: pid {pid}"
    assert json.loads((tmp_path / RWLOCK).read_text()) == {"write": {}, "read": {}}
    assert repair(tmp_path) == []


@pytest.mark.parametrize(
    ("program", "command", "inside"),
    [
        ("dvc", "/srv/project/.venv/bin/dvc repro", True),
        ("dvc", "/usr/lib/python3/dvc/__main__.py repro", False),
        (REPRO_MODULE, "dvc repro", True),
        (REPRO_MODULE, "dvc repro", False),
        ("notebook.py", "notebook.py --fast", True),
        ("notebook.py", "/home/ann/notebook.py", False),
    ],
)
def test_entries_of_a_running_dvc_are_kept(tmp_path: Path, program: str, command: str, inside: bool) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
        (folder / program).write_text(WAITS)
    with running(project if inside else elsewhere, program) as pid:
        hold(project, pid, command)
        assert repair(project) == []
        assert read_holders(project / RWLOCK) == {pid: command}


def test_entries_of_others_stay_when_one_is_dropped(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own = {"pid": os.getpid(), "cmd": sys.argv[0]}
    hold(tmp_path, gone.pid, "dvc repro")
    content = json.loads((tmp_path / RWLOCK).read_text())
    content["write"]["c"] = own
    content["read"][f"{tmp_path}/data/b"].append(own)
    (tmp_path / RWLOCK).write_text(json.dumps(content))
    assert f"pid {gone.pid}" in repair(tmp_path)[0]
    assert json.loads((tmp_path / RWLOCK).read_text()) == {"write": {"c": own}, "read": {f"{tmp_path}/data/b": [own]}}


@pytest.mark.parametrize("content", ["[]", '{"write": 3}', '{"write": {"a": {}}}', '{"read": {"a": {"pid": 1}}}'])
def test_an_rwlock_of_another_form_is_left_to_dvc(tmp_path: Path, content: str) -> None:
    (tmp_path / RWLOCK).parent.mkdir(parents=True)
    (tmp_path / RWLOCK).write_text(content)
    repair(tmp_path)
    assert content == "[]" or (tmp_path / RWLOCK).read_text() == content


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (("min_frequency: 2", "min_frequency: 3"), True),
        (("log_every_steps: 10", "log_every_steps: 11"), False),
        (("", ""), False),
    ],
)
def test_stage_fails_if_its_params_are_edited_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], refused: bool
) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "tokenizer")
    ran = []

    def edit_params(*_: Any) -> None:
        text = Path("params.yaml").read_text()
        assert edit[0] in text
        Path("params.yaml").write_text(text.replace(*edit))
        ran.append(True)

    monkeypatch.setattr(tokenizer, "run", edit_params)
    if refused:
        with pytest.raises(ParamsError, match="`tokenizer` was edited while tokenizer ran"):
            run_stage("tokenizer", "", "params.yaml")
    else:
        run_stage("tokenizer", "", "params.yaml")
    assert ran


@pytest.mark.parametrize("path", ["data/withdrawn.jsonl", "data/raw/scenes/batch-2/pairs.csv", "lists/split.json", ""])
def test_prepare_fails_if_its_inputs_change_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Otherwise an image withdrawn meanwhile would stay in the data, and a new batch would never be used."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "data" / "raw" / "scenes" / "batch-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("karpathy: ", "karpathy: ../../../lists/split.json #"))
    monkeypatch.setenv("DVC_STAGE", "prepare@scenes")

    def add_file(*_: Any) -> None:
        Path("data/raw/scenes/.partial").mkdir()
        if path:
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_text("{}")

    monkeypatch.setattr(prepare, "run", add_file)
    if path:
        with pytest.raises(DataError, match=r"changed while prepare scenes ran, .*Run the same command again"):
            run_stage("prepare", "scenes", "params.yaml")
    else:
        run_stage("prepare", "scenes", "params.yaml")


def test_unknown_stage_is_an_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsError, match=r"no stage `pretain`; did you mean `pretrain`\?"):
        run_stage("pretain", "", "params.yaml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("record", [None, "", "{}", "[]", '{"files": 3, "code": ""}'])
def test_unrecorded_result_is_restored_unless_its_record_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None
) -> None:
    monkeypatch.setenv("DVC_STAGE", "tokenizer")
    workspace = Workspace(tmp_path)
    work, output = workspace.work("tokenizer", "0123"), tmp_path / "data" / "vocab.txt"
    output.parent.mkdir()
    output.write_text("a\nb\n")
    save_unrecorded_result(workspace, work, "tokenizer", [output])
    output.unlink()
    if record is not None:
        (work / RECORD).write_text(record)
    assert restore_unrecorded_result(workspace, work, "tokenizer") == output.exists() == (record is None)


@pytest.mark.parametrize("undone", [False, True])
def test_a_result_belongs_to_the_code_that_made_it(
    undone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The code is edited while the stage runs. The work directory is the same for other code: chunks stay valid."""
    monkeypatch.setenv("DVC_STAGE", "shards")
    workspace = Workspace(tmp_path)
    work, output = workspace.work("shards", "0123"), tmp_path / "shard.tar"
    unrecorded_results.hash_code.cache_clear()  # a process of its own
    assert not restore_unrecorded_result(workspace, work, "shards")
    output.touch()
    with monkeypatch.context() as patch:
        patch.setattr(unrecorded_results, "code_hash", lambda modules: "edited")
        save_unrecorded_result(workspace, work, "shards", [output])
        if undone:
            patch.undo()
        unrecorded_results.hash_code.cache_clear()
        assert restore_unrecorded_result(workspace, work, "shards") == undone
    assert undone or f"not used, made by other code: the result in {work}" in caplog.text


def test_old_work_of_other_inputs_is_removed(tmp_path: Path) -> None:
    workspace, long_ago = Workspace(tmp_path), time.time() - 86_400 * KEPT_DAYS - 60
    own, old, recent, finished = (workspace.work("pretrain-tden", digit * 16) for digit in "0123")
    kept, other_run = workspace.work("pretrain-tden", "kept"), workspace.work("pretrain-other", "1" * 16)
    (finished / RECORD).touch()
    for work in (own, old, recent, finished, kept, other_run):
        (work / "step-00000002.ckpt").touch()
        if work != recent:
            for path in work.iterdir():
                os.utime(path, (long_ago, long_ago))
    remove_outdated_work(own)
    assert sorted(own.parent.iterdir()) == [own, recent, kept] and other_run.exists()
