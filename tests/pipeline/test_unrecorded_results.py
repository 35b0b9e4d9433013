"""A stage has finished, and its result is not in dvc.lock yet: every process is killed there, params.yaml is edited.

The stage is a stand-in for a training, of one second; DVC, the supervisor and the code of flows and stages are real.
tests/faults/test_faults.py has a real training.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cloned_project import init_dvc

ROOT = Path(__file__).parents[2]
STAGE = "pretrain@tden"
TRAINER = """
import os, signal, sys, time
from pathlib import Path
import psutil
from vlp_models.common.log import configure_logging
from vlp_models.common.workspace import Workspace, fingerprint
from vlp_models.pipeline.dvc.consistency import unchanged_inputs
from vlp_models.pipeline.guard import guarded
from vlp_models.pipeline.unrecorded_results import restore_unrecorded_result, save_unrecorded_result

def edit(epochs):
    params = Path("params.yaml")
    params.write_text(params.read_text().replace("max_epochs: 102", f"max_epochs: {epochs}"))

def kill(*names):
    own = psutil.Process()
    for process in reversed([own, *own.parents()]):
        if any(name in " ".join(process.cmdline()[:3]) for name in names):
            process.kill()
    time.sleep(30)  # until the supervisor, or the guard of the stage, ends this process

def reach(moment):
    code = Path(moment)
    if code.exists():
        text = code.read_text()
        code.unlink()
        exec(text)

configure_logging()
workspace = Workspace(Path.cwd())
with guarded(workspace, "pretrain@tden"), unchanged_inputs(workspace, "params.yaml", "pretrain", "tden") as params:
    epochs = params.pretrain["tden"].max_epochs
    work = workspace.work("pretrain-tden", fingerprint({"epochs": epochs}, {}))
    if not restore_unrecorded_result(workspace, work, "pretrain@tden"):
        with open("trained", "a") as trained:
            trained.write(f"{epochs} ")
        Path("result").write_text(str(epochs))
        reach("during")
        save_unrecorded_result(workspace, work, "pretrain@tden", [workspace.root / "result"])
        reach("saved")
reach("ended")
"""
# A flow: `dvc repro` of the stage, under the supervisor.
FLOW = """
import sys
from pathlib import Path
from vlp_models.flows import process
from vlp_models.pipeline.dvc.lock_file import repair
process.REPRO = [sys.executable, "dvc_repro.py"]
repair(Path.cwd())
process.repro(Path.cwd(), ["pretrain@tden"], print)
"""
# `vlp_models.pipeline.dvc.repro`, killed at the moment in the file `dies`: before or after a method of DVC.
DVC = """
import os, signal
from pathlib import Path
from dvc import dvcfile, stage
from vlp_models.pipeline.dvc import repro

def die(owner, name, after):
    method = getattr(owner, name)
    def dying(*arguments, **options):
        result = method(*arguments, **options) if after else None
        os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, dying)

MOMENTS = {
    "before it hashes the result": (stage.Stage, "save_outs", False),
    "after it has cached the result": (stage.Stage, "commit", True),
    "after it has written dvc.lock": (dvcfile.ProjectFile, "_dump_lockfile", True),
}
if Path("dies").exists():
    moment = Path("dies").read_text()
    Path("dies").unlink()
    die(*MOMENTS[moment])
raise SystemExit(repro.main())
"""
# What is killed, and when -> file, content. The trainer executes `saved` and `ended` at these moments.
ALL = "kill('flow.py', 'supervise', 'dvc_repro.py', 'trainer.py')"
KILLED = {
    "stage, after its result is saved": ("saved", "kill('trainer.py')"),
    "dvc, before the stage's check": ("saved", "kill('dvc_repro.py')"),
    "command, before the stage's check": ("saved", "kill('flow.py')"),
    "all, before the stage's check": ("saved", ALL),
    "dvc, when the stage ends": ("ended", "kill('dvc_repro.py')"),
    "command, when the stage ends": ("ended", "kill('flow.py')"),
    "all, when the stage ends": ("ended", ALL),
    "dvc, before it hashes the result": ("dies", "before it hashes the result"),
    "dvc, after it has cached the result": ("dies", "after it has cached the result"),
    "dvc, after it has written dvc.lock": ("dies", "after it has written dvc.lock"),
}


class Project:
    """A DVC project with one stage. DVC has recorded its result of 101 epochs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        params = yaml.safe_load((ROOT / "params.yaml").read_text())
        params["pretrain"]["tden"]["max_epochs"] = 101
        (folder / "params.yaml").write_text(yaml.safe_dump(params))
        stage = {"cmd": f"{sys.executable} trainer.py", "params": ["pretrain.${key}"], "outs": ["result"]}
        (folder / "dvc.yaml").write_text(
            yaml.safe_dump({"stages": {"pretrain": {"foreach": {"tden": {}}, "do": stage}}})
        )
        for name, code in (("trainer", TRAINER), ("flow", FLOW), ("dvc_repro", DVC)):
            (folder / f"{name}.py").write_text(code)
        site = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc" / "site")}
        self.env = {**os.environ, **site, "PYTHONPATH": str(ROOT), "VLP_GRACE": "5"}
        init_dvc(folder)
        assert self.run()[0] == 0 and self.trained == [101]

    def run(self) -> tuple[int, str]:
        flow = [sys.executable, "flow.py"]
        pipe = subprocess.PIPE
        done = subprocess.run(flow, cwd=self.folder, env=self.env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout

    def set_epochs(self, before: int, after: int) -> None:
        params = self.folder / "params.yaml"
        text = params.read_text()
        assert text.count(f"max_epochs: {before}\n") == 1
        params.write_text(text.replace(f"max_epochs: {before}\n", f"max_epochs: {after}\n"))

    @property
    def trained(self) -> list[int]:
        """The epochs of each training, in order."""
        return [int(epochs) for epochs in (self.folder / "trained").read_text().split()]

    def recorded_epochs(self) -> int:
        """Return the params that dvc.lock records, after a check that the result that it records is theirs."""
        entry = yaml.safe_load((self.folder / "dvc.lock").read_text())["stages"][STAGE]
        epochs = int(entry["params"]["params.yaml"]["pretrain.tden"]["max_epochs"])
        assert entry["outs"][0]["md5"] == hashlib.md5(str(epochs).encode()).hexdigest()
        return epochs


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("unrecorded") / "project")


@pytest.fixture
def project(built: Project) -> Iterator[Project]:
    """The project after a change of its params: the next run is the first with 102 epochs."""
    backup = built.folder.with_name("backup")
    shutil.copytree(built.folder, backup, symlinks=True)
    built.set_epochs(101, 102)
    yield built
    shutil.rmtree(built.folder)
    backup.rename(built.folder)


def interrupt(project: Project, moment: str, code: str) -> str:
    """Run with what happens at a moment; return the output."""
    (project.folder / moment).write_text(code)
    returned, output = project.run()
    assert returned != 0, output
    return output


@pytest.mark.pipeline
@pytest.mark.parametrize("killed", KILLED)
def test_a_finished_result_is_restored_after_a_kill(project: Project, killed: str) -> None:
    output = interrupt(project, *KILLED[killed])
    assert "was edited" not in output
    recorded = "written dvc.lock" in killed
    assert project.recorded_epochs() == (102 if recorded else 101)
    code, output = project.run()
    assert code == 0 and project.trained == [101, 102] and project.recorded_epochs() == 102, output
    assert recorded or "restored the result of a finished run" in output or "is cached - skipping run" in output
    assert "was edited" not in output


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("moment", "code"),
    [("during", "edit(103)"), ("saved", "edit(103)"), ("ended", "edit(103)"), ("ended", ALL)],
    ids=["during the training", "after the result is saved", "after the stage's check", "after a kill"],
)
def test_a_finished_result_is_kept_if_params_are_edited(project: Project, moment: str, code: str) -> None:
    output = interrupt(project, moment, code)
    assert project.recorded_epochs() == 101
    if code == ALL:
        project.set_epochs(102, 103)
    else:
        assert "`pretrain.tden` was edited" in output and "its result is not recorded" in output
    for epochs in (103, 102):  # 102: the edit is undone
        returned, output = project.run()
        assert returned == 0 and project.trained == [101, 102, 103] and project.recorded_epochs() == epochs, output
        assert "was edited" not in output
        reason = "not used, made with other params or inputs" if epochs == 103 else "restored the result"
        assert reason in output
        if epochs == 103:
            project.set_epochs(103, 102)
