"""Starts rank_fit.py as a user would start a training, and reads what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vlp_models.common.portable import VARIABLES

SCRIPT = str(Path(__file__).with_name("rank_fit.py"))
LONGEST = 150  # seconds: a run that hangs fails here


def run(
    root: Path, work: str, launcher: list[str] | None = None, portable: bool = False, **settings: Any
) -> tuple[int, str]:
    """Exit code and stderr of the process that a user would have started, with portable instructions or without."""
    command = [sys.executable, *(launcher or []), SCRIPT, str(root), json.dumps({"work": work, **settings})]
    env = {**os.environ, **VARIABLES} if portable else None
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
