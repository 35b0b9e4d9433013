"""Pretraining stages through the real command line: killed in the middle, signaled to stop, run again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_dataset import TINY, TRAINER, write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.params import Params, load_params, to_plain
from vlp_models.pipeline.stages import initial, pretrain

EPOCHS, STEPS = 20, 120
XGPT = {"xgpt": {"family": "xgpt", "config": {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1}}}
TURNS: dict[str, Any] = {
    "model": "xgpt",
    "max_epochs": EPOCHS // 4,  # four updates a batch
    "recipe": {
        "mix": "alternate",
        "reuse_batch": True,
        "objectives": dict.fromkeys(("ic", "imlm", "ida", "tifg"), 1.0),
    },
    "snapshots": {"keep": 4, "metric": "val_ic"},
}


def start(root: Path, run: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vlp_models.cli.main", "stage", "pretrain", run]
    with (root / "stderr").open("ab") as stderr:
        return subprocess.Popen(command, cwd=root, env=environment, stdout=stderr, stderr=stderr)


def steps_done(root: Path, run: str) -> int:
    logs = list(root.glob(f".work/pretrain-{run}/*/log.jsonl"))
    return len(logs[0].read_text().splitlines()) if logs else 0


def stop_at(root: Path, run: str, step: int, number: signal.Signals) -> int:
    """Starts the stage, sends the signal once `step` updates are done, and returns the exit code."""
    process = start(root, run)
    deadline = time.monotonic() + 120
    while steps_done(root, run) < step and process.poll() is None:
        assert time.monotonic() < deadline, (root / "stderr").read_text()
        time.sleep(0.002)
    process.send_signal(number)
    return process.wait(60)


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    # tests/training resumes the others in one process
    ["none", pytest.param("c", marks=pytest.mark.long), pytest.param("turns", marks=pytest.mark.long)],
)
def test_resume_after_kill_and_stop_is_bitwise_equal(tmp_path: Path, scheme: str) -> None:
    """kill -9 at a random step, rerun; SIGTERM at a random later step, exit 75; rerun: as in one go, in this process.

    `turns`: XGPT's four objectives in turns on one batch, and the average of its best validations."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer = {**to_plain(TRAINER), "checkpoint_every_steps": 7}
    run = "xgpt" if scheme == "turns" else "tden"
    passes = {"scheme": scheme, "ramp": {"start": 0.2, "end": 0.9, "steps": 80}}
    settings = TURNS if run == "xgpt" else {"max_epochs": EPOCHS, "scheduled_sampling": passes}
    for root in (whole, broken):
        write_workspace(root, trainer=trainer, models=XGPT, pretrain={run: settings})
    pretrain.run(load_params(whole / "params.yaml"), Workspace(whole), run)
    checkpoint = f"checkpoints/pretrain/{run}"

    killed_at = random.randrange(10, STEPS // 2)
    stopped_at = random.randrange(killed_at + 10, STEPS - 20)
    when = f"kill -9 at {killed_at}, SIGTERM at {stopped_at}"
    assert stop_at(broken, run, killed_at, signal.SIGKILL) == -signal.SIGKILL, when
    assert not (broken / checkpoint).exists()
    assert stop_at(broken, run, stopped_at, signal.SIGTERM) == 75, when + (broken / "stderr").read_text()
    assert not (broken / checkpoint).exists()
    assert start(broken, run).wait(120) == 0, when + (broken / "stderr").read_text()
    assert (broken / "stderr").read_text().count("resuming from step") == 2, when

    curve = f"reports/curves/pretrain/{run}.csv"
    for file in (curve, *(f"{checkpoint}/{name}" for name in ("model.safetensors", "config.json", "manifest.json"))):
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), f"{file}; {when}"
    assert len((whole / curve).read_text().splitlines()) == STEPS + 1
    assert not list(broken.glob(f".work/pretrain-{run}/*/*.ckpt"))


@pytest.mark.slow
def test_outputs_of_a_run(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    pretrain.run(params, workspace, "tden")
    final = json.loads((tmp_path / "reports/training/pretrain/tden.json").read_text())
    assert final["steps"] == 12
    assert final["train_samples"] == 44 and final["samples"] == 88
    assert (final["model"], final["family"], final["start"]) == ("tden", "tden", "initial/tden")
    assert {"loss", "val_loss", "seconds", "samples_per_s", "peak_memory_mb"} <= set(final)
    assert final["precision"] == "32-true"
    header = workspace.curve("pretrain/tden").read_text().partition("\n")[0].split(",")
    assert {"loss", "val_loss", "mlm", "moc", "ism", "msg"} <= set(header)
    checkpoint = workspace.checkpoint("pretrain/tden")
    assert json.loads((checkpoint / "manifest.json").read_text())["stage"] == "pretrain@tden"
    # a second run starts again and finds the same; it removes what an interrupted one with other settings has left
    weights = (checkpoint / "model.safetensors").read_bytes()
    (own,) = (tmp_path / ".work" / "pretrain-tden").iterdir()
    old = workspace.work("pretrain-tden", "0123456789abcdef")
    (old / "step-00000002.ckpt").touch()
    os.utime(old / "step-00000002.ckpt", (0, 0))
    pretrain.run(params, workspace, "tden")
    assert (checkpoint / "model.safetensors").read_bytes() == weights
    assert list(old.parent.iterdir()) == [own]


def weights(workspace: Workspace, name: str) -> dict[str, torch.Tensor]:
    return load_file(workspace.checkpoint(name) / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def with_(params: Params, run: str, **changes: Any) -> Params:
    return replace(params, pretrain={**params.pretrain, run: replace(params.pretrain[run], **changes)})


def test_initial_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    before = weights(workspace, "initial/tden")
    initial.run(params, workspace, "tden")
    assert same(weights(workspace, "initial/tden"), before)
    other = replace(params, models={"tden": replace(params.models["tden"], seed=2)})
    initial.run(other, workspace, "tden")
    assert not same(weights(workspace, "initial/tden"), before)


@pytest.mark.slow
def test_scheduled_sampling_starts_from_a_single_pass_run(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    with pytest.raises(DataError, match=r"dvc repro pretrain@tden"):
        pretrain.run(params, workspace, "two-pass")
    pretrain.run(params, workspace, "tden")
    still = replace(params.pretrain["two-pass"].optimizer, lr=0.0, muon_lr=0.0)
    pretrain.run(with_(params, "two-pass", optimizer=still), workspace, "two-pass")
    assert same(weights(workspace, "pretrain/two-pass"), weights(workspace, "pretrain/tden")), "it began there"
    pretrain.run(params, workspace, "two-pass")
    assert not same(weights(workspace, "pretrain/two-pass"), weights(workspace, "pretrain/tden"))
    header = workspace.curve("pretrain/two-pass").read_text().partition("\n")[0].split(",")
    assert {"mlm", "msg", "ism", "mlm_pass2", "msg_pass2", "moc_pass2", "val_loss"} <= set(header)


def test_other_config_loads_what_fits_and_logs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deeper = {**TINY, "sentence_layers": TINY["sentence_layers"] + 1}
    run = {"model": "deeper", "start": "pretrain/tden", "recipe": {"objectives": {"mlm": 1.0}}, "max_steps": 1}
    changes = {"models": {"deeper": {"family": "tden", "config": deeper}}, "pretrain": {"deeper": run}}
    params, workspace = write_workspace(tmp_path, **changes), Workspace(tmp_path)
    pretrain.run(params, workspace, "tden")
    still = replace(params.pretrain["deeper"].optimizer, lr=0.0, muon_lr=0.0)
    pretrain.run(with_(params, "deeper", optimizer=still), workspace, "deeper")
    before, after = weights(workspace, "pretrain/tden"), weights(workspace, "pretrain/deeper")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert "another architecture; loaded what fits" in capsys.readouterr().err


def test_changed_code_gets_its_own_work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a killed run would resume with another loss than it started with."""
    from vlp_models.pipeline import training_job

    params, workspace = with_start(tmp_path)

    def work() -> Path:
        return training_job.TrainingJob(params, workspace, "pretrain/tden", view="captions", settings={}).work

    before = work()
    assert work() == before
    monkeypatch.setattr(training_job, "code_hash", lambda names: "another sign in a loss")
    assert work() != before


def test_changed_params_get_their_own_work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlp_models.pipeline.training_job import TrainingJob

    params, workspace = with_start(tmp_path)

    def work(seed: int, **trainer: int) -> Path:
        settings = {"pretrain": to_plain(replace(params.pretrain["tden"], seed=seed))}
        changed = replace(params, trainer=replace(params.trainer, **trainer))
        return TrainingJob(changed, workspace, "pretrain/tden", view="captions", settings=settings).work

    assert work(1) == work(1, log_every_steps=5, checkpoint_every_steps=9)  # how often to save changes no result
    assert work(1) == work(1, devices=2)  # a run resumes with another number of processes
    assert work(1) != work(2)
    here = work(1)
    monkeypatch.setattr("vlp_models.pipeline.training_job.is_portable", lambda: True)
    assert work(1) != here, "a state of another process's instructions"


def with_start(root: Path) -> tuple[Params, Workspace]:
    """Return a workspace with the checkpoint that the pretraining starts from."""
    params, workspace = write_workspace(root), Workspace(root)
    initial.run(params, workspace, "tden")
    return params, workspace
