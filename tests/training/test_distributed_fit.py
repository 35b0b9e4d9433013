"""Trainings over two processes on a CPU, started, stopped and killed for real.

43 training samples in batches of 6 leave one for an epoch's last batch, so that one process has none of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_runs import EVERYTHING, STILL, apart, continues_elsewhere, matches_one_process, result, run
from toy_dataset import Toy, untimed, write_shards, write_tokenizer

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import TrainerParams
from vlp_models.training.processes import count_processes, forked_processes

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FORKED = {"devices": 1, "cpu_processes": 2, "reproducible": "portable"}  # `fit` forks the second process


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    write_shards(folder / "shards", train=43, val=7)
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.mark.slow
def test_two_processes_match_one_process(root: Path, tmp_path: Path) -> None:
    matches_one_process(root, tmp_path, strategy="ddp")


@pytest.mark.long
def test_two_processes_match_one_process_with_muon(root: Path, tmp_path: Path) -> None:
    """Its orthogonalization, in bfloat16, makes more of float32's order of adding up; the ranks agree bitwise."""
    settings = {**EVERYTHING, "optimizer": {"muon_lr": 3e-3, "eps": 1e-4}}
    code, stderr = run(root, "muon", config=STILL, **settings)
    assert code == 0, stderr
    assert apart(tmp_path, root, result(root, "muon")[0], **settings)[0] < 0.05


@pytest.mark.slow
def test_a_misspelled_snapshot_metric_stops_all_processes_before_the_first_update(root: Path, tmp_path: Path) -> None:
    work = str(tmp_path / "work")
    code, stderr = run(root, work, snapshots={"keep": 1, "metric": "val_los"}, batch_size=6, **FORKED)
    assert code == 2 and "did you mean `val_loss`" in stderr, stderr
    assert not list(Path(work).glob("*.ckpt"))


def test_batch_size_must_be_divisible_by_the_number_of_processes(root: Path) -> None:
    from vlp_models.training.data import LoaderFactory

    loaders = LoaderFactory(
        root / "shards", "captions", sources={}, collate=lambda s: s, batch_size=10, num_workers=0, seed=1
    )
    with pytest.raises(ParamsError, match=r"batch_size: 10.* divisible by the 4 processes .*; use 8"):
        loaders(0, 4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"devices": 2, "config": {"pooler_batch_norm": True}}, "batch normalization"),
    ],
)
def test_incompatible_trainer_settings_are_refused(
    root: Path, tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    toy = Toy(root / "shards", Tokenizer.load(root / "tokenizer"))
    settings = dict(settings)
    with pytest.raises(ParamsError, match=text):
        toy.fit(tmp_path, toy.model(**settings.pop("config", {})), **settings)


def test_number_of_processes_must_match_torchrun(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    toy = Toy(root / "shards", Tokenizer.load(root / "tokenizer"))
    with pytest.raises(ParamsError, match=r"is 2 processes, but torchrun started 8"):
        toy.fit(tmp_path, devices=2)


@pytest.fixture(scope="module")
def whole(root: Path) -> tuple[dict[str, torch.Tensor], int, list[dict[str, Any]]]:
    """A run of two processes that nothing disturbs, with dropout."""
    code, stderr = run(root, "whole", **EVERYTHING)
    assert code == 0, stderr
    return result(root, "whole")


def ends_the_same(
    root: Path, work: str, whole: Any, step: int, launcher: list[str] | None = None, **settings: Any
) -> None:
    code, stderr = run(root, work, launcher, **EVERYTHING, **settings)
    assert code == 0, stderr
    weights, resumed_from, rows = result(root, work, settings.get("devices", 2))
    assert resumed_from == step
    assert rows == whole[2]
    assert all(torch.equal(weights[name], weight) for name, weight in whole[0].items())


@pytest.mark.slow
def test_forked_processes_train_as_those_that_lightning_starts(root: Path, whole: Any) -> None:
    """Bitwise, after a stop signal to the first process and a kill of the second."""
    for number, to, message in (
        (signal.SIGTERM, 0, "is saved, the same command resumes"),
        (signal.SIGKILL, 1, "process of this run has ended"),
    ):
        work = f"forked-{number}-{to}"
        code, stderr = run(root, work, signal={"step": 6, "number": number, "to": [to]}, **EVERYTHING, **FORKED)
        assert code == 75 and message in stderr, stderr
        points = sorted(path.name for path in (root / work).glob("*.ckpt"))
        ends_the_same(root, work, whole, int(points[-1][5:13]), **FORKED)


@pytest.mark.slow
def test_forked_processes_end_with_the_first(root: Path) -> None:
    """After `kill -9` of the first, the kernel kills the others."""
    end = {"step": 6, "number": signal.SIGKILL, "to": [0], "stopped": [1]}
    assert run(root, "orphan", signal=end, **EVERYTHING, **FORKED)[0] == -signal.SIGKILL
    child = int((root / "orphan" / "pid-1").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FORKED, {"devices": 2}], ids=["forked", "lightning"])
def test_without_a_loopback_interface_several_processes_are_refused_at_once(
    root: Path, settings: dict[str, Any]
) -> None:
    isolated = ["unshare", "--map-root-user", "--net"]  # its `lo` is down
    if subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("this account may not have a network of its own")
    code, stderr = run(root, "isolated", prefix=isolated, batch_size=6, **settings)
    assert code == 2 and "(`ip link set lo up`), or train with one process" in stderr, stderr


def test_an_error_in_a_forked_process_is_printed_and_stops_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    before = psutil.Process().children()  # of other tests
    with pytest.raises(RuntimeError, match="the first lost the second"), forked_processes(2):
        if os.environ["RANK"] == "1":
            raise DataError("shard 7 is damaged")
        time.sleep(0.5)
        raise RuntimeError("the first lost the second")
    assert "process 1: shard 7 is damaged" in capfd.readouterr().err
    assert "RANK" not in os.environ
    assert set(psutil.Process().children()) <= set(before)


LOST_EARLY = """
import os, signal, torch
from vlp_models.training import processes
processes.NOTICE_SECONDS = 0.5
with processes.forked_processes(2):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.init_process_group("gloo")  # waits for the other for half an hour
"""


def test_a_process_that_is_lost_before_they_meet_ends_the_training() -> None:
    done = subprocess.run([sys.executable, "-c", LOST_EARLY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and "a process of this training was lost; the same command resumes" in done.stderr


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 3),
        ({"reproducible": "machine"}, 1),  # threads use the cores
        ({"devices": 2}, 1),
        ({"launcher": "torchrun"}, 1),
        ({"strategy": "fsdp"}, 1),
    ],
)
def test_processes_of_a_cpu(settings: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(TrainerParams(accelerator="cpu", reproducible="portable"), **settings)
    assert count_processes(3, params, torch.nn.Linear(2, 2)) == count
    assert count_processes(3, params, torch.nn.Linear(2, 2), batch_size=6) == count
    assert count_processes(3, params, torch.nn.Linear(2, 2), batch_size=7) == 1
    assert count_processes(3, params, torch.nn.BatchNorm2d(2)) == 1
    monkeypatch.setenv("RANK", "0")
    assert count_processes(3, params, torch.nn.Linear(2, 2)) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["lightning", "torchrun"])
@pytest.mark.parametrize("to", [[0], [1], "group"], ids=["first", "second", "group"])
def test_a_stop_signal_stops_all_processes_at_the_same_update(root: Path, whole: Any, to: Any, launcher: Any) -> None:
    number = signal.SIGINT if to == [1] else signal.SIGTERM
    work = f"stopped-{to}-{launcher is None}"
    code, stderr = run(root, work, launcher, signal={"step": 6, "number": number, "to": to}, **EVERYTHING)
    assert code == (75 if launcher is None else 1), stderr  # torchrun has an exit code of its own
    assert "is saved, the same command resumes from there" in stderr
    points = sorted(path.name for path in (root / work).glob("*.ckpt"))
    ends_the_same(root, work, whole, int(points[-1][5:13]), launcher)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["lightning", "torchrun"])
@pytest.mark.parametrize("to", [[0], [1], [1, 0]], ids=["first", "second", "both"])
def test_kill_of_one_process_ends_the_others_and_resume_is_equal(
    root: Path, whole: Any, to: Any, launcher: Any
) -> None:
    work = f"killed-{to}-{launcher is None}"
    code, stderr = run(root, work, launcher, signal={"step": 6, "number": signal.SIGKILL, "to": to}, **EVERYTHING)
    assert code not in (0, 75) or "has ended" in stderr
    ends_the_same(root, work, whole, 6, launcher)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_one_process(root: Path) -> None:
    continues_elsewhere(root, {"strategy": "ddp"}, {"devices": 1}, equal=False)


def test_recomputed_activations_change_no_number(root: Path, tmp_path: Path) -> None:
    """With dropout, whose draws are repeated."""
    toy = Toy(root / "shards", Tokenizer.load(root / "tokenizer"))
    plain, first = toy.fit(tmp_path / "plain", toy.model(), **EVERYTHING)
    spared, second = toy.fit(tmp_path / "spared", toy.model(), activation_checkpointing=True, **EVERYTHING)
    assert untimed(second.rows) == untimed(first.rows)
    other = spared.state_dict()
    assert all(torch.equal(other[name], weight) for name, weight in plain.state_dict().items())
    assert not any("forward" in vars(module) for module in spared.modules())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_blocks_learn_the_same(root: Path, tmp_path: Path) -> None:
    toy = Toy(root / "shards", Tokenizer.load(root / "tokenizer"))
    settings = {"optimizer": {"eps": 1e-4}, "batch_size": 6, "max_steps": 4}
    plain, _ = toy.fit(tmp_path / "plain", toy.model(**STILL), **settings)
    compiled, _ = toy.fit(tmp_path / "compiled", toy.model(**STILL), compile=True, **settings)
    other = compiled.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.allclose(other[name], weight, rtol=1e-4, atol=1e-5), name
