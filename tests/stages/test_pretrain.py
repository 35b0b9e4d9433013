"""Pretraining stages through the real command line: killed in the middle, told to stop, run again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_world import TRAINER, write_workspace

from vlp_models.params import to_plain
from vlp_models.stages import pretrain
from vlp_models.workspace.paths import Workspace

EPOCHS, STEPS = 40, 240


def start(root: Path, stage: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vlp_models.cli", "stage", stage]
    with (root / "stderr").open("ab") as stderr:
        return subprocess.Popen(command, cwd=root, env=environment, stdout=stderr, stderr=stderr)


def steps_done(root: Path, stage: str) -> int:
    logs = list(root.glob(f".work/{stage}/*/log.jsonl"))
    return len(logs[0].read_text().splitlines()) if logs else 0


def stop_at(root: Path, stage: str, step: int, number: signal.Signals) -> int:
    """Starts the stage, sends the signal once `step` updates are done, and returns the exit code."""
    process = start(root, stage)
    deadline = time.monotonic() + 120
    while steps_done(root, stage) < step and process.poll() is None:
        assert time.monotonic() < deadline, (root / "stderr").read_text()
        time.sleep(0.002)
    process.send_signal(number)
    return process.wait(60)


@pytest.mark.pipeline
@pytest.mark.parametrize("stage", ["pretrain", "scheduled_sampling"])
def test_killed_and_stopped_it_gives_the_same_bytes(tmp_path: Path, stage: str) -> None:
    """kill -9 at a random step, rerun; SIGTERM at a random later step, exit 75; rerun: as if nothing had happened."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer = {**to_plain(TRAINER), "checkpoint_every_steps": 7}
    settings = {}
    if stage == "scheduled_sampling":
        settings = {"scheme": "c", "init": "scratch", "ramp": {"start": 0.2, "end": 0.9, "steps": 150}}
    for root in (whole, broken):
        changes = {"max_epochs": EPOCHS, **settings}
        write_workspace(root, **{"trainer": trainer, stage: changes})
    uninterrupted = start(whole, stage)

    killed_at = random.randrange(10, STEPS // 2)
    stopped_at = random.randrange(killed_at + 10, STEPS - 20)
    when = f"kill -9 at {killed_at}, SIGTERM at {stopped_at}"
    assert stop_at(broken, stage, killed_at, signal.SIGKILL) == -signal.SIGKILL, when
    assert not (broken / "checkpoints" / stage).exists()
    assert stop_at(broken, stage, stopped_at, signal.SIGTERM) == 75, when + (broken / "stderr").read_text()
    assert not (broken / "checkpoints" / stage).exists()
    assert start(broken, stage).wait(120) == 0, when + (broken / "stderr").read_text()
    assert (broken / "stderr").read_text().count("going on from step") == 2, when
    assert uninterrupted.wait(120) == 0, (whole / "stderr").read_text()

    for file in (
        f"reports/curves/{stage}.csv",
        f"checkpoints/{stage}/model.safetensors",
        f"checkpoints/{stage}/config.json",
        f"checkpoints/{stage}/manifest.json",
    ):
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), f"{file}; {when}"
    assert len((whole / f"reports/curves/{stage}.csv").read_text().splitlines()) == STEPS + 1
    assert not list(broken.glob(f".work/{stage}/*/*.ckpt"))


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    params = write_workspace(tmp_path)
    pretrain.run(params, Workspace(tmp_path))
    final = json.loads((tmp_path / "reports" / "pretrain.json").read_text())
    assert final["steps"] == 12
    assert final["train_samples"] == 44
    assert {"loss", "val_loss", "mlm", "moc", "ism", "msg", "seconds", "samples_per_s"} <= set(final)
    manifest = json.loads((tmp_path / "checkpoints" / "pretrain" / "manifest.json").read_text())
    assert manifest["stage"] == "pretrain"
    # a second run starts anew and finds the same
    weights = (tmp_path / "checkpoints" / "pretrain" / "model.safetensors").read_bytes()
    pretrain.run(params, Workspace(tmp_path))
    assert (tmp_path / "checkpoints" / "pretrain" / "model.safetensors").read_bytes() == weights


def test_changed_params_are_another_piece_of_work(tmp_path: Path) -> None:
    from dataclasses import replace

    from vlp_models.runs.fitting import read_inputs, work_directory

    params = write_workspace(tmp_path)
    inputs = read_inputs(Workspace(tmp_path))

    def work(seed: int, **trainer: int) -> Path:
        settings = {"pretrain": to_plain(replace(params.pretrain, seed=seed))}
        changed = replace(params.trainer, **trainer)
        return work_directory(Workspace(tmp_path), "pretrain", changed, settings, inputs.files)

    assert work(1) == work(1, log_every_steps=5, checkpoint_every_steps=9)  # how often to save decides nothing
    assert len({work(1), work(2), work(1, devices=2)}) == 3
