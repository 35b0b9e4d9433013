"""Loader processes work where torch's default way of sending batches fails, and no training waits for a dead one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from toy_dataset import Toy, same_weights

from vlp_models.data.batch import Batch
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.errors import DataError, ProcessLostError

TESTS = Path(__file__).parents[1]
TRAIN = """
import sys
from pathlib import Path

import torch
from toy_dataset import make_toy

from vlp_models.errors import VLPError

folder = Path(sys.argv[1])
try:
    model, result = make_toy(folder / "toy").fit(folder / "work", num_workers=2, max_epochs=1)
    torch.save(model.state_dict(), folder / "weights")
except VLPError as error:
    sys.exit(str(error))
"""


def train(folder: Path, shared_memory: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Train the toy with two loader processes, on a machine whose /dev/shm has this size."""
    command = [sys.executable, "-c", TRAIN, str(folder)]
    if shared_memory:
        unshare = ["unshare", "--mount", "sh", "-c"]
        mount = f"mount -t tmpfs -o size={shared_memory} tmpfs /dev/shm"
        if subprocess.run([*unshare, mount], capture_output=True).returncode:
            pytest.skip("this account may not mount a file system in a namespace of its own")
        command = [*unshare, f'{mount} && exec "$@"', "sh", *command]
    env = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS / 'support'}", **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["shared memory", "a short TMPDIR"])
def test_batches_need_neither_shared_memory_nor_a_short_tmpdir(toy: Toy, tmp_path: Path, lacks: str) -> None:
    if lacks == "shared memory":
        done = train(tmp_path, shared_memory="64k")
    else:
        with tempfile.TemporaryDirectory(prefix="t" * 150) as folder:
            done = train(tmp_path, TMPDIR=folder)
    assert done.returncode == 0, done.stderr
    alone, _ = toy.fit(tmp_path / "alone", max_epochs=1)
    weights = torch.load(tmp_path / "weights", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in alone.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["4k", "12k"])  # too little for the first queue, and for all of them
def test_a_loader_process_that_cannot_start_is_named_with_the_way_out(tmp_path: Path, shared_memory: str) -> None:
    done = train(tmp_path, shared_memory)
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert sentence.startswith("params.yaml: `trainer.num_workers: 2`: a loader process cannot start (no space left")


class Killing:
    """A tracker that kills the loader processes after an update."""

    def sync(self, log: Path) -> None:
        for process in multiprocessing.active_children():
            process.kill()


@pytest.mark.slow
def test_a_killed_loader_process_ends_the_training_which_then_resumes(toy: Toy, tmp_path: Path) -> None:
    settings = {"num_workers": 2, "max_epochs": 4, "checkpoint_every_steps": 1}
    with pytest.raises(ProcessLostError, match=r"loader process was lost.*The same command resumes from the last"):
        toy.fit(tmp_path / "work", tracker=Killing(), **settings)
    assert not multiprocessing.active_children()
    resumed, result = toy.fit(tmp_path / "work", **settings)
    assert result.resumed_from
    whole, _ = toy.fit(tmp_path / "whole", **{**settings, "num_workers": 0})
    assert same_weights(resumed, whole)


@pytest.mark.slow
def test_an_error_of_the_code_in_a_loader_process_is_no_lost_process(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ShardDataset, indices: list[int]) -> None:
        raise RuntimeError("a plugin's mistake")

    monkeypatch.setattr(ShardDataset, "__getitems__", fail)
    with pytest.raises(RuntimeError, match="a plugin's mistake"):
        toy.fit(tmp_path / "work", num_workers=2, max_epochs=1)


def test_a_loss_noticed_while_a_checkpoint_is_written_is_not_a_fault_of_the_file(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:  # torch's handler of signals raises wherever the process is
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(ProcessLostError, match="loader process was lost"):
        toy.fit(tmp_path / "work", max_epochs=1, checkpoint_every_steps=1)


@pytest.mark.slow
def test_the_reason_why_a_batch_is_not_sent_reaches_the_training(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(collate: object) -> list[Batch]:
        dataset = ShardDataset(toy.shards, "train", "captions")
        return list(ResumableLoader(dataset, batch_size=8, collate=collate, seed=1, shuffle=True, num_workers=2))

    with pytest.raises(DataError, match=r"cannot send its batch \(.*lambda.*\); set `trainer\.num_workers: 0`"):
        read(lambda samples: lambda: samples)  # a function cannot be pickled

    def refuse(self: ShardDataset, indices: list[int]) -> None:
        raise DataError("shard-0.tar: damaged; build the shards again")

    monkeypatch.setattr(ShardDataset, "__getitems__", refuse)
    with pytest.raises(DataError, match=r"\Ashard-0\.tar: damaged; build the shards again\Z"):
        read(list)
