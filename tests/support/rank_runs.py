"""Starts rank_fit.py as a user would start a training, and reads what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_dataset import Toy, untimed

from vlp_models.common.portable import VARIABLES
from vlp_models.data.tokenizer import Tokenizer

SCRIPT = str(Path(__file__).with_name("rank_fit.py"))
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
EVERYTHING = {"optimizer": {"muon_lr": 3e-3, "clip_norm": 0.5}, "ema_decay": 0.9, "batch_size": 6}
STEPS = 16
LONGEST = 150  # seconds: a run that hangs fails here


def run(
    root: Path,
    work: str,
    launcher: list[str] | None = None,
    portable: bool = False,
    prefix: Sequence[str] = (),
    **settings: Any,
) -> tuple[int, str]:
    """Exit code and stderr of the process that a user would have started, with portable instructions or without."""
    command = [*prefix, sys.executable, *(launcher or []), SCRIPT, str(root), json.dumps({"work": work, **settings})]
    # After a crash in native code, stderr has each thread's Python code.
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", **(VARIABLES if portable else {})}
    process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr_text = process.communicate(timeout=LONGEST)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has started and left behind
    return process.returncode, stderr_text


def result(root: Path, work: str, ranks: int = 2) -> tuple[dict[str, torch.Tensor], int, list[dict[str, Any]]]:
    """All processes' weights, which must be the same; the update that the run went on from; the log."""
    first, *others = (load_file(root / work / f"weights-{rank}.safetensors") for rank in range(ranks))
    for other in others:
        assert all(torch.equal(weight, other[name]) for name, weight in first.items())
    return first, *json.loads((root / work / "rows.json").read_text())


def apart(work: Path, root: Path, weights: dict[str, torch.Tensor], **settings: Any) -> tuple[float, Any]:
    """How far from what one process ends with, as a part of the way that its weights went; and its result."""
    toy = Toy(root / "shards", Tokenizer.load(root / "tokenizer"))
    start = toy.model(**STILL).state_dict()
    model, alone = toy.fit(work, toy.model(**STILL), **settings)
    end = model.state_dict()
    moved = torch.cat([(end[name] - start[name]).flatten() for name in end]).norm()
    distance = torch.cat([(end[name] - weights[name]).flatten() for name in end]).norm()
    return float(distance / moved), alone


def matches_one_process(root: Path, work: Path, strategy: str, portable: bool = False) -> None:
    """Check all objectives, clipping, EMA, an epoch's uneven end, validation; Lightning starts the second process."""
    name = f"{strategy}-{portable}"
    # AdamW divides by what is nearly nothing, and makes much of float32's order of adding up, unless eps is larger.
    settings = {**EVERYTHING, "optimizer": {"clip_norm": 0.5, "eps": 1e-4}}
    code, stderr = run(root, name, portable=portable, config=STILL, strategy=strategy, **settings)
    assert code == 0, stderr
    weights, _, rows = result(root, name)
    distance, alone = apart(work, root, weights, **settings)
    assert distance < 1e-5
    assert alone.steps == STEPS == rows[-1]["step"]
    for row, wanted in zip(rows, untimed(alone.rows), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert len(list((root / name).glob("*.ckpt"))) == 2
    assert (root / name / "log.jsonl").read_text().count("\n") == STEPS  # written once, not twice


def continues_elsewhere(root: Path, first: dict[str, Any], second: dict[str, Any], *, equal: bool) -> None:
    """Check a run that is stopped twice, and continued each time with another strategy or number of processes.

    AdamW, Muon, an average. equal: the result is bitwise that of a run that nothing stops.
    """
    muon = {"muon_lr": 3e-3, "muon_dtype": "float32", "clip_norm": 0.5, "eps": 1e-4}
    settings = {**EVERYTHING, "optimizer": muon, "config": STILL}
    whole_run, work = "continued-whole", "continued"
    assert run(root, whole_run, **settings, **first)[0] == 0
    for step, processes in ((6, first), (10, second)):
        stop = {"step": step, "number": signal.SIGTERM, "to": [0]}
        code, stderr = run(root, work, signal=stop, **settings, **processes)
        assert code == 75, stderr
    code, stderr = run(root, work, **settings, **first)
    assert code == 0, stderr
    ranks = first.get("devices", 2)
    wanted, _, rows = result(root, whole_run, ranks)
    weights, resumed_from, found = result(root, work, ranks)
    assert resumed_from == 10
    if equal:
        assert found == rows and all(torch.equal(weights[name], weight) for name, weight in wanted.items())
    for name, weight in wanted.items():
        assert torch.allclose(weights[name], weight, rtol=1e-5, atol=1e-6), name
