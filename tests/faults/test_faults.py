"""A pretraining under DVC is killed, its state damaged, its disk full: the result equals that of an undisturbed run.

The quick tests run one real stage on a toy dataset; the long ones inject each kind of fault of the campaign into the
whole tiny pipeline. Full disks are simulated by RLIMIT_FSIZE, which needs no privilege (EFBIG instead of ENOSPC).
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cloned_project import init_dvc
from ground import BIN, ROOT, Ground, environment, role_of
from injure import KINDS, draw, inflict
from moments import STEP_FILES
from toy_dataset import write_workspace

STAGE = {
    "cmd": "vlp stage pretrain ${key}",
    "params": ["pretrain.${key}"],
    "deps": ["data/shards", "data/tokenizer", "checkpoints/initial/tden"],
    "outs": ["checkpoints/pretrain/${key}"],
    "metrics": ["reports/training/pretrain/${key}.json"],
    "plots": ["reports/curves/pretrain/${key}.csv"],
}


class Project:
    """A DVC project with `pretrain@tden` as its only stage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment(folder) | {"PYTHONPATH": str(ROOT)}
        folder.mkdir()
        write_workspace(folder, pretrain={"tden": {"max_epochs": 8}}, trainer={"checkpoint_every_steps": 1})
        (folder / "dvc.yaml").write_text(
            yaml.safe_dump({"stages": {"pretrain": {"foreach": {"tden": {}}, "do": STAGE}}})
        )
        init_dvc(folder)

    def start(self, *command: str, file_limit: int = 0) -> subprocess.Popen[str]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        return subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=limit if file_limit else None,
        )

    def run(self, *command: str, file_limit: int = 0) -> tuple[int, str]:
        process = self.start(*command, file_limit=file_limit)
        output, _ = process.communicate(timeout=200)
        return process.returncode, output

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob(f".work/pretrain-tden/*/{STEP_FILES}"))

    @property
    def result(self) -> tuple[bytes, bytes]:
        files = ("checkpoints/pretrain/tden/model.safetensors", "reports/curves/pretrain/tden.csv")
        return tuple((self.folder / name).read_bytes() for name in files)  # type: ignore[return-value]

    def pid(self, role: str) -> int:
        import psutil

        for process in psutil.process_iter(["cwd", "cmdline"]):
            if process.info["cwd"] == str(self.folder) and role_of(process.info["cmdline"] or []) == role:
                return int(process.pid)
        raise AssertionError(f"no {role}")


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("faults") / "project")


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Iterator[tuple[bytes, bytes]]:
    code, output = project.run("vlp", "run")
    assert code == 0, output
    yield project.result


@pytest.fixture
def fresh(project: Project, undisturbed: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Delete everything that a run wrote; return what a run must produce."""
    for name in ("dvc.lock", ".work", "checkpoints/pretrain", "reports", ".dvc/cache"):
        path = project.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return undisturbed


@pytest.mark.pipeline
@pytest.mark.core
def test_second_run_dvc_killed_and_checkpoint_damaged(project: Project, fresh: tuple[bytes, bytes]) -> None:
    first = project.start("vlp", "run")
    wait_for(lambda: project.checkpoints)
    stage = project.pid("stage")
    os.kill(stage, signal.SIGSTOP)
    code, output = project.run("vlp", "run")
    assert code == 2 and "another `vlp run`" in output, output
    os.kill(project.pid("dvc"), signal.SIGKILL)
    os.kill(stage, signal.SIGCONT)
    assert first.communicate(timeout=60)[0]
    assert first.returncode != 0
    wait_for(lambda: not Path(f"/proc/{stage}").exists(), 30)  # it stopped on its own, with its state saved
    assert not (project.folder / "checkpoints" / "pretrain" / "tden").exists()

    newest = project.checkpoints[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    code, output = project.run("vlp", "run")
    assert code == 0, output
    assert "damaged (its sha256 does not match)" in output and "resuming from step" in output
    assert project.result == fresh


@pytest.mark.pipeline
def test_result_that_dvc_did_not_record_is_restored(project: Project, fresh: tuple[bytes, bytes]) -> None:
    assert project.run("vlp", "run")[0] == 0
    (project.folder / "dvc.lock").unlink()  # as if DVC had been killed after the stage's end
    shutil.rmtree(project.folder / ".dvc" / "cache" / "runs")
    code, output = project.run("vlp", "run")
    assert code == 0 and "restored the result of a finished run" in output, output
    assert "steps  loss" not in output, "not trained again"
    assert project.result == fresh


@pytest.mark.pipeline
def test_full_disk_is_an_error_message_and_nothing_is_lost(project: Project, fresh: tuple[bytes, bytes]) -> None:
    code, output = project.run("vlp", "stage", "pretrain", "tden", file_limit=20_000)
    assert code == 2 and "free some space" in output and "Traceback" not in output, output
    assert not list(project.folder.rglob("*.partial"))
    code, output = project.run("vlp", "run")
    assert code == 0, output
    assert project.result == fresh


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    made = Ground(tmp_path_factory.mktemp("ground") / "tiny")
    made.make()
    return made


@pytest.mark.pipeline
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_each_kind_of_fault(ground: Ground, number: int) -> None:
    outcome = inflict(ground, draw(0, number, ground.stages))
    assert not outcome.problems, outcome.record
