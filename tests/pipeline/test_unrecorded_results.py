"""A stage has finished, and its result is not in dvc.lock yet: every order of edits, their undoing and kills.

A model predicts the outcome of each order. The stage is a stand-in for a training, of one second; DVC, the supervisor
and the code of flows and stages are real. tests/faults/test_faults.py has a real training.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloned_project import init_dvc

ROOT = Path(__file__).parents[2]
STAGE = "pretrain@tden"
# In the order in which a run reaches them: the trainer, from the third one on DVC.
MOMENTS = ("during", "saved", "ended", "params read", "cached", "before dvc.lock", "after dvc.lock")
ACTIONS = """
import os, re, time
from pathlib import Path
import psutil

def edit(pattern, text):
    params = Path("params.yaml")
    params.write_text(re.sub(pattern, text, params.read_text()))

def kill(*names):
    own = psutil.Process()
    for process in reversed([own, *own.parents()]):
        if any(name in " ".join(process.cmdline()[:3]) for name in names):
            process.kill()
    time.sleep(30)  # until the supervisor, or the guard of the stage, ends this process

def reach(moment):
    code = Path(moment)
    if code.is_file():
        text = code.read_text()
        code.unlink()
        exec(text)
"""
TRAINER = """
from pathlib import Path
from actions import reach
from vlp_models.common.log import configure_logging
from vlp_models.common.workspace import Workspace, fingerprint
from vlp_models.pipeline.dvc.consistency import unchanged_inputs
from vlp_models.pipeline.guard import guarded
from vlp_models.pipeline.unrecorded_results import restore_unrecorded_result, save_unrecorded_result

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
# `vlp_models.pipeline.dvc.repro`, with the later moments: before or after a method of DVC.
DVC = """
from actions import reach
from dvc import dvcfile, stage
from vlp_models.pipeline.dvc import repro

def watch(owner, name, before, after):
    method = getattr(owner, name)
    def watched(*arguments, **options):
        reach(before)
        result = method(*arguments, **options)
        reach(after)
        return result
    setattr(owner, name, watched)

watch(stage.Stage, "save_outs", "params read", "")
watch(stage.Stage, "commit", "", "cached")
watch(dvcfile.ProjectFile, "_dump_lockfile", "before dvc.lock", "after dvc.lock")
raise SystemExit(repro.main())
"""
# What happens at a moment: `edit` changes a param of the stage, `other` one of another stage.
EVENTS = {
    "edit": "edit('max_epochs: 10[0-9]', 'max_epochs: 103')",
    "undo": "edit('max_epochs: 10[0-9]', 'max_epochs: 102')",
    "other": "edit('wait_minutes: .*', 'wait_minutes: 1')",
    "stage killed": "kill('trainer.py')",
    "dvc killed": "kill('dvc_repro.py')",
    "command killed": "kill('flow.py')",
    "all killed": "kill('flow.py', 'supervise', 'dvc_repro.py', 'trainer.py')",
    "dvc killed in dvc.lock": "Path('dvc.lock').write_text(''); kill('dvc_repro.py')",
}
Order = tuple[tuple[str, str], ...]  # of (event, moment)


def predict(order: Order) -> str:
    """Return how a run with these events ends: killed, edited (the stage is not recorded) or recorded."""
    happens, is_edited = {moment: event for event, moment in order}, False
    for moment in MOMENTS:
        event = happens.get(moment, "")
        if "killed" in event:
            return "recorded, killed" if moment == "after dvc.lock" else "killed"
        is_edited = event == "edit" or (is_edited and event != "undo")
        # The stage compares when it ends, DVC when it has read params.yaml.
        if is_edited and moment in ("saved", "ended"):
            return "edited"
    return "recorded"


def make_orders() -> Iterator[Any]:
    """Yield single events, and for `make test-long` also others and pairs."""
    for moment in MOMENTS[1:]:
        by_trainer = moment in ("saved", "ended")
        for event in EVENTS:
            impossible = {
                "undo": True,
                "stage killed": moment != "saved",  # it has ended
                "command killed": not by_trainer,  # DVC goes on for a while
                "dvc killed in dvc.lock": moment != "before dvc.lock",
            }
            if not impossible.get(event):
                yield make_order((event, moment), is_long=event == "other" and not by_trainer)
    for first, second in itertools.combinations(MOMENTS, 2):
        for event, then in (("edit", "undo"), ("edit", "all killed"), ("other", "dvc killed")):
            yield make_order((event, first), (then, second), is_long=True)


def make_order(*order: tuple[str, str], is_long: bool) -> Any:
    marks = [pytest.mark.pipeline, *([pytest.mark.long] if is_long else [])]
    return pytest.param(order, id=", ".join(f"{event}: {moment}" for event, moment in order), marks=marks)


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
        for name, code in (("actions", ACTIONS), ("trainer", TRAINER), ("flow", FLOW), ("dvc_repro", DVC)):
            (folder / f"{name}.py").write_text(code)
        site = {"DVC_SITE_CACHE_DIR": str(folder / ".dvc" / "site")}
        self.env = {**os.environ, **site, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "VLP_GRACE": "5"}
        init_dvc(folder)
        assert self.run()[0] == 0 and self.trained == [101]

    def run(self) -> tuple[int, str]:
        flow = [sys.executable, "flow.py"]
        pipe = subprocess.PIPE
        done = subprocess.run(flow, cwd=self.folder, env=self.env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout

    def set_epochs(self, epochs: int) -> None:
        params = self.folder / "params.yaml"
        params.write_text(re.sub(r"max_epochs: 10\d\n", f"max_epochs: {epochs}\n", params.read_text()))

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
    built.set_epochs(102)
    yield built
    shutil.rmtree(built.folder)
    backup.rename(built.folder)


@pytest.mark.parametrize("order", make_orders())
def test_a_finished_training_is_never_thrown_away(project: Project, order: Order) -> None:
    for event, moment in order:
        (project.folder / moment).write_text(EVENTS[event])
    code, output = project.run()
    outcome = predict(order)
    assert (code == 0) == (outcome == "recorded"), output
    # The message of an edit appears if, and only if, the edit is why nothing is recorded.
    assert ("`pretrain.tden` was edited" in output and "its result is not recorded" in output) == (outcome == "edited")
    if "dvc.lock" not in order[-1][0]:
        assert project.recorded_epochs() == (102 if "recorded" in outcome else 101)

    # With the edit, another training; without it, this one.
    is_edited = "max_epochs: 103\n" in (project.folder / "params.yaml").read_text()
    for epochs in [103, 102] if is_edited else [102]:
        for moment in MOMENTS:  # events that this run has not reached
            (project.folder / moment).unlink(missing_ok=True)
        project.set_epochs(epochs)
        code, output = project.run()
        assert code == 0 and project.recorded_epochs() == epochs and "was edited" not in output, output
        if epochs == 103 and "recorded" not in outcome:
            assert "has results of other params or inputs, none of these" in output
    assert project.trained == [101, 102, *([103] if is_edited else [])]
