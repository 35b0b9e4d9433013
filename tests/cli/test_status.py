"""`vlp status` while a stage runs, and with damaged files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from vlp_models.cli.status import status
from vlp_models.common.lock import file_lock
from vlp_models.common.workspace import Workspace
from vlp_models.flows.process import hold_workspace

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def test_a_live_trainer_and_the_holders_of_dvcs_lock_are_shown(project: Path) -> None:
    log = project / ".work" / "finetune-vqa" / "abc" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 10, "epoch": 1, "loss": 2.0}\n{"step": 20, "epoch": 2, "loss": 1.5}\n')
    os.utime(log, (1e9, 1e9))
    (project / "vlp").write_text("import time; time.sleep(60)")
    trainer = subprocess.Popen([sys.executable, "vlp", "stage", "finetune", "vqa"], cwd=project)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    writers = {f"{project}/data/a": {"pid": os.getpid(), "cmd": "dvc repro"}}
    held = {"write": writers, "read": {f"{project}/data/b": [{"pid": ended.pid, "cmd": "dvc status"}]}}
    (project / ".dvc" / "tmp" / "rwlock").write_text(json.dumps(held))
    try:
        deadline = time.monotonic() + 20
        result = status(project)
        while not any("finetune vqa" in line for line in result.running):
            assert time.monotonic() < deadline
            result = status(project)
        assert f"pid {trainer.pid}: finetune vqa" in result.running, "the log is that of the training before"
        log.touch()
        result = status(project)
    finally:
        trainer.kill()
        trainer.wait()
    assert f"pid {trainer.pid}: finetune vqa, step 20, epoch 2, loss 1.5" in result.running
    assert f"pid {os.getpid()}: dvc repro, holds DVC's lock" in result.running
    assert f"pid {ended.pid}: dvc status, holds DVC's lock (dead: DVC will release its lock)" in result.running


def test_the_flow_or_command_that_uses_the_workspace_is_shown(project: Path) -> None:
    """Also between two stages, and while a supervisor keeps the lock of a flow that was killed."""
    with hold_workspace(project, "retrain", 0, print):
        assert status(project).running == [f"flow retrain (pid {os.getpid()})"]
    assert status(project).running == []
    with file_lock(Workspace(project).lock, "`vlp run`"):
        assert status(project).running == [f"`vlp run` (pid {os.getpid()})"]


def test_damage_becomes_notes(project: Path) -> None:
    (project / ".dvc" / "tmp" / "rwlock").write_text("")
    (project / "promotions").mkdir()
    (project / "promotions" / "ledger.jsonl").write_text("{}\n")
    (project / "reports").mkdir()
    (project / "reports" / "registered.json").write_text("{")
    result = status(project)
    notes = "\n".join(result.notes)
    assert "rwlock cannot be read" in notes and "ledger.jsonl, line 1" in notes
    assert {row["task"] for row in result.tasks} == {"captioning", "vqa"}


def test_a_task_that_tracking_does_not_list_has_its_own_metric(project: Path) -> None:
    raw = yaml.safe_load((project / "params.yaml").read_text())
    raw["tracking"]["metric"] = {}
    (project / "params.yaml").write_text(yaml.safe_dump(raw))
    assert {row["task"]: row["metric"] for row in status(project).tasks} == {"captioning": "CIDEr", "vqa": "accuracy"}


def test_every_candidate_of_a_task_is_shown_with_its_run_and_model(project: Path) -> None:
    receipts = [
        {"name": "vlp-vqa", "version": 4, "run": "b", "model": "toy", "challenger": True},
        {"name": "vlp-vqa", "version": 3, "run": "a", "model": "tden", "challenger": False},
    ]
    for run, value in (("a", 61.25), ("b", 70.5)):
        scores = project / "reports" / "eval" / run / "scores.json"
        scores.parent.mkdir(parents=True)
        both = [{"metric": "accuracy", "split": s, "value": v} for s, v in (("test", value), ("val", value + 1))]
        scores.write_text(json.dumps(both))
    (project / "reports" / "registered.json").write_text(json.dumps({"vqa": receipts}))
    row = next(row for row in status(project).tasks if row["task"] == "vqa")
    assert row["challenger"] == "version 4 (b, toy), 70.50"
    assert row["candidates"] == "version 3 (a, tden), 61.25"
    text = (project / "params.yaml").read_text()
    assert "  split: test" in text
    (project / "params.yaml").write_text(text.replace("  split: test", "  split: val"))
    row = next(row for row in status(project).tasks if row["task"] == "vqa")
    assert (row["challenger"], row["candidates"]) == ("version 4 (b, toy), 71.50", "version 3 (a, tden), 62.25")
